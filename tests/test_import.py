"""What `import loopline` does, seen from a fresh process: nothing but bring in modules."""

import json
import subprocess
import sys
import textwrap

import pytest

WATCH = """
    import json, sys

    events, watching = [], [False]
    WATCHED = ("socket.", "subprocess.", "os.fork", "os.exec", "os.posix_spawn", "os.system", "os.spawn",
               "_thread.start", "signal.", "os.putenv", "os.unsetenv", "urllib.", "ctypes.dlopen")
    WRITES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.", "tempfile.")

    def hook(event, args):
        if watching[0]:
            if event.startswith(WATCHED + WRITES):
                events.append(f"{event} {args!r}"[:200])
            elif event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
                if "__pycache__" not in str(args[0]):
                    events.append(f"open for writing {args!r}"[:200])

    sys.addaudithook(hook)

    import atexit, gc, hashlib, locale, logging, os, pickle, random, signal, threading, time, warnings
    import numpy, torch

    def digest(value):
        return hashlib.sha256(pickle.dumps(value)).hexdigest()

    def state():
        names = [name for name in logging.root.manager.loggerDict if not name.startswith("loopline")]
        loggers = [logging.root, *map(logging.getLogger, names)]
        return {
            "dtype": str(torch.get_default_dtype()),
            "device": str(torch.get_default_device()),
            "grad mode": torch.is_grad_enabled(),
            "inference mode": torch.is_inference_mode_enabled(),
            "anomaly mode": torch.is_anomaly_enabled(),
            "threads of torch": [torch.get_num_threads(), torch.get_num_interop_threads()],
            "deterministic": [torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark,
                              torch.backends.cudnn.deterministic],
            "matmul": torch.get_float32_matmul_precision(),
            "random of python": digest(random.getstate()),
            "random of numpy": digest(numpy.random.get_state()[1].tolist()),
            "random of torch": digest(torch.get_rng_state().tolist()),
            "numpy errors": numpy.geterr(),
            "print options": str(torch._tensor_str.PRINT_OPTS) + str(numpy.get_printoptions()),
            "signals": [str(signal.getsignal(s)) for s in sorted(signal.valid_signals())],
            "handlers and levels": [[log.name, log.level, len(log.handlers), log.disabled] for log in loggers],
            "our handlers": [[name, log.level, len(log.handlers)]
                             for name, log in sorted(logging.root.manager.loggerDict.items())
                             if name.startswith("loopline") and isinstance(log, logging.Logger)
                             and (log.level or log.handlers)],
            "warnings": [str(f) for f in warnings.filters],
            "hooks": [str(sys.excepthook), str(sys.unraisablehook), str(threading.excepthook), str(sys.displayhook),
                      str(sys.gettrace()), str(sys.getprofile()), str(sys.settrace)],
            "streams": [id(sys.stdout), id(sys.stderr), id(sys.stdin)],
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "path": list(sys.path),
            "finders": [str(f) for f in sys.meta_path],
            "threads": sorted(t.name for t in threading.enumerate()),
            "exits": atexit._ncallbacks(),
            "collector": [gc.isenabled(), gc.get_threshold(), len(gc.callbacks)],
            "recursion": sys.getrecursionlimit(),
            "locale": locale.setlocale(locale.LC_ALL),
        }

    import _thread
    start = _thread.start_new_thread

    def watched_start(*args, **kwargs):  # not an audit event before 3.12
        events.append("a thread was started")
        return start(*args, **kwargs)

    _thread.start_new_thread = threading._start_new_thread = watched_start

    before, modules = state(), set(sys.modules)
    watching[0] = True
    import loopline
    watching[0] = False
    after = state()
    changed = {name: [before[name], after[name]] for name in before if before[name] != after[name]}
    print(json.dumps({"events": events, "changed": changed, "modules": sorted(set(sys.modules) - modules)}))
"""

# parts of the standard library that torch happens not to bring along
STANDARD = {"difflib", "graphlib", "uuid"}

HEAVY = {
    "cloudpickle", "fsspec", "importlib.metadata", "ipywidgets", "joblib", "lightning", "matplotlib", "mlflow",
    "pandas", "psutil", "pynvml", "rich", "scipy", "sklearn", "tensorboard", "torchmetrics", "torchvision", "tqdm",
    "trackio", "wandb",
}  # fmt: skip


def fresh(code, *options):
    said = subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True, timeout=120
    )
    return said.stdout


@pytest.fixture(scope="module")
def seen():
    """What a fresh process sees while loopline is imported after torch and numpy."""
    return json.loads(fresh(WATCH).splitlines()[-1])


def test_importing_opens_no_socket_starts_nothing_and_writes_nothing(seen):
    assert seen["events"] == []


def test_importing_changes_no_global(seen):
    assert seen["changed"] == {}


def test_importing_brings_in_little_beside_torch(seen):
    others = {name for name in seen["modules"] if name.split(".")[0] != "loopline"}
    assert sorted(others - STANDARD) == []


def test_importing_brings_in_nothing_heavy():
    code = "import sys, loopline; print(*sorted(sys.modules))"
    bare = "import sys, torch; print(*sorted(sys.modules))"
    extra = set(fresh(code).split()) - set(fresh(bare).split())
    assert {name for name in extra if any(name == heavy or name.startswith(f"{heavy}.") for heavy in HEAVY)} == set()


def test_importing_leaves_the_commands_and_the_test_tools_alone(seen):
    assert [name for name in seen["modules"] if name.startswith(("loopline.cli", "loopline.testing"))] == []


def test_the_core_needs_no_torch():
    code = """
        import importlib.machinery, sys, types
        package = types.ModuleType("loopline")
        package.__path__ = [sys.argv[1]]
        sys.modules["loopline"] = package
        import importlib, pkgutil
        import loopline.core
        for found in pkgutil.iter_modules(loopline.core.__path__, "loopline.core."):
            importlib.import_module(found.name)
        print(sorted({name.split(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)))
    """
    import loopline

    said = subprocess.run(
        [sys.executable, "-S", "-c", textwrap.dedent(code), str(loopline.__path__[0])],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert said.stdout.strip() == "['__main__', 'loopline']" or said.stdout.strip() == "['loopline']"


def test_importing_gives_no_warning():
    fresh("import torch, warnings; warnings.simplefilter('error'); import loopline")
