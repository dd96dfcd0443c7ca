"""A small training with several checkpoints in a folder, which tests damage, and what it must come to all the same."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

from loopline import Callback, Every, Never, Run, Scheduled, SupervisedTask, Trainer, loop
from loopline.callbacks import EarlyStopping
from loopline.checkpoint import Checkpointer, Latest, Whole
from loopline.checkpoint.collect import Loaded, load
from loopline.checkpoint.shelf import Shelf, Stored
from loopline.core.errors import Damaged, LooplineError
from loopline.stores import LocalStore, MemoryStore, Store
from loopline.testing import tiny_loader

SAVED, WHOLE = 8, 12  # steps: of the training that is damaged, and of one that goes on to the end
NEWEST, BEFORE, OLDEST = "000000000008", "000000000006", "000000000004"


class Remembers(Callback):
    """Holds a little of everything that a state may hold."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.seen: dict[Any, Any] = {}

    def on_step_end(self, run: Run) -> None:
        self.losses.extend([float(run.step)] * 20)
        self.seen[run.step, "step"] = torch.tensor([random.random()])

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses, "seen": self.seen, "name": "é", "set": {1, 2}}

    def load_state_dict(self, state: Any) -> None:
        self.losses, self.seen = list(state["losses"]), dict(state["seen"])


def train(store: Store | Path, steps: int, *, save: bool = False, resume: Any = "auto", **given: Any) -> str:
    """Train up to so many steps from the newest intact checkpoint, and give a hash of all that it came to."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.9)
    remembers = Remembers()
    trainer = Trainer(
        SupervisedTask(
            model,
            loss=nn.CrossEntropyLoss(),
            optimizer=optimizer,
            scheduler=Scheduled(scheduler=schedule, when=Every(steps=1)),
        ),
        seed=3,
        progress=False,
        checkpoint=Checkpointer(store, when=Every(steps=2) if save else Never(), keep=Latest(3), **given),
        callbacks=[EarlyStopping("val/loss", patience=99), remembers],
    )
    run = trainer.fit(tiny_loader(5), tiny_loader(2, seed=1), steps=steps, resume=resume)
    found = hashlib.sha256(repr((remembers.losses, sorted(remembers.seen.items()), run.progress)).encode())
    for tensor in [*model.state_dict().values(), *torch.utils._pytree.tree_leaves(optimizer.state_dict())]:
        found.update(tensor.numpy().tobytes() if isinstance(tensor, torch.Tensor) else repr(tensor).encode())
    return found.hexdigest()


def two_saves(store: Store | Path, committed: Callable[[int], object], **given: Any) -> None:
    """Save a model whose weights say the step at steps 1 and 2, keep the newest, and report each that is committed."""
    model = nn.Linear(2, 2)
    checkpointer = Checkpointer(store, when=Never(), keep=Latest(1), **given)
    run = Run(model=model, callbacks=[checkpointer])
    with loop.fit(run):
        for step in (1, 2):
            run.progress.steps = step
            nn.init.constant_(model.weight, step)
            checkpointer.save(run)
            if (ref := checkpointer.wait()) is not None and ref.step == step:
                committed(step)


def checkpoints(folder: Path) -> dict[str, Path]:
    """The folder of each checkpoint, by the step in its name."""
    return {path.name[:12]: path for path in sorted((folder / "checkpoints").iterdir())}


def files(folder: Path) -> list[Path]:
    """Every file below a folder."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def copied(folder: Path, to: Path) -> Path:
    """A copy of a run's folder that may be damaged."""
    return Path(shutil.copytree(folder, to))


def in_memory(folder: Path) -> MemoryStore:
    """A copy of a run's folder in memory."""
    store = MemoryStore()
    for path in files(folder):
        store.put(path.relative_to(folder).as_posix(), io.BytesIO(path.read_bytes()))
    return store


def loaded(store: Store, name: str, *, verify: bool = True) -> Loaded:
    """What a checkpoint holds; Damaged where it is not what was committed."""
    stored = Shelf(store).get(name)
    return load(Stored(store, stored.manifest, verify), Whole(), 0)  # or by the codec that the manifest names


def refused(store: Store, name: str, *, verify: bool = True) -> str | None:
    """Why a checkpoint is not loaded, if it is not."""
    try:
        loaded(store, name, verify=verify)
    except Damaged as error:
        return str(error)
    return None


def damage(store: Store, name: str) -> str | None:
    """What is wrong with a checkpoint, if anything is, as it is found without loading it."""
    try:
        return Shelf(store).get(name).damage()
    except Damaged as error:
        return str(error)


def make(folder: Path, **given: Any) -> Path:
    """The folder of a training that has come to its eighth step, with a checkpoint at every second one."""
    train(LocalStore(folder), SAVED, save=True, **given)
    return folder


def content(checkpoint: Path) -> dict[str, bytes]:
    """Every file of a checkpoint by its path, but for the manifest."""
    found = {path.relative_to(checkpoint).as_posix(): path.read_bytes() for path in files(checkpoint)}
    del found["MANIFEST.json"]
    return found


def forged(manifest: bytes, given: dict[str, bytes], **changes: Any) -> bytes:
    """A manifest whose hashes fit whatever files there are, and whose own hash fits whatever it says."""
    body = json.loads(manifest)
    body["files"] = {path: {"size": len(data), "hash": hash_of(data)} for path, data in given.items()}
    return signed(body | changes)


def hash_of(data: bytes) -> str:
    """The hash that a manifest has for a file."""
    return str(xxhash.xxh3_128(data).hexdigest())


def signed(body: dict[str, Any]) -> bytes:
    """A manifest with its own hash."""
    body.pop("self", None)
    canonical = json.dumps({name: body[name] for name in sorted(body)}, separators=(",", ":")).encode()
    return json.dumps({**body, "self": hashlib.sha256(canonical).hexdigest()}, separators=(",", ":")).encode()


def forge(checkpoint: Path, changed: dict[str, bytes] | None = None, **changes: Any) -> None:
    """Change files of a checkpoint, or what its manifest says, so that every hash fits."""
    for path, data in (changed or {}).items():
        (checkpoint / path).write_bytes(data)
    manifest = checkpoint / "MANIFEST.json"
    manifest.write_bytes(forged(manifest.read_bytes(), content(checkpoint), **changes))


def changed(checkpoint: Path, path: str, change: Callable[[Any], None]) -> None:
    """Change what a file of JSON says, so that every hash fits."""
    said = json.loads((checkpoint / path).read_bytes())
    change(said)
    forge(checkpoint, {path: json.dumps(said).encode()})


def in_a_child(target: Callable[..., Any], *given: Any, timeout_s: float = 120) -> Any:
    """What a function gives in a process of its own that has everything imported; its exit code if it dies of it."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["whole", "training", "torch", "loopline.checkpoint", "loopline.callbacks"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(theirs, target, given), daemon=True)
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(timeout_s) else "nothing in all the time that it was given"
    except EOFError:
        process.join()
        return f"exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()


def _tell(pipe: Any, target: Callable[..., Any], given: tuple[Any, ...]) -> None:
    pipe.send(target(*given))


def ended(folder: Path, steps: int = WHOLE) -> str:
    """How a training ends: by its hash, or with an error's name and text."""
    try:
        return train(folder, steps)
    except BaseException as error:  # noqa: BLE001 - which it is, is what is asked
        return f"{type(error).__name__}: {error}"


def weighed(folder: Path, name: str) -> tuple[str, float]:
    """How loading a checkpoint ends, and how many MB of memory it took at most."""
    before = _peak()
    try:
        said = f"loaded {len(loaded(LocalStore(folder), name).sections)} sections"
    except LooplineError as error:
        said = f"{type(error).__name__}: {error}"
    return said[:1000], (_peak() - before) / 1024


def watched(folder: Path, name: str) -> tuple[str, set[str], set[str]]:
    """How loading a checkpoint ends, every path that was opened, and whatever else was asked of the interpreter."""
    paths: set[str] = set()
    asked: set[str] = set()

    def hook(event: str, given: tuple[Any, ...]) -> None:
        if event in ("open", "os.listdir", "os.scandir") and given and isinstance(given[0], str | bytes | os.PathLike):
            paths.add(os.fsdecode(given[0]))
        elif event not in ("open", "os.scandir", "object.__getattr__", "sys._getframe"):
            asked.add(event)

    sys.addaudithook(hook)
    try:
        said = f"loaded {len(loaded(LocalStore(folder), name).sections)} sections"
    except LooplineError as error:
        said = f"{type(error).__name__}: {error}"
    return said, set(paths), set(asked)


def strayed(outside: Path) -> set[str]:
    """What is seen of a program that opens a file outside, runs code from a text and starts a process."""
    seen: set[str] = set()

    def hook(event: str, given: tuple[Any, ...]) -> None:
        if event in ("compile", "exec", "subprocess.Popen"):
            seen.add(event)
        elif event == "open" and str(given[0]).startswith(str(outside)):
            seen.add(str(given[0]))

    sys.addaudithook(hook)
    (outside / "x").write_text("x")
    exec("1")
    subprocess.run(["true"], check=True)
    return set(seen)


def _peak() -> int:
    """The most memory that this process has had, in kB.

    Not ru_maxrss: in that a process begins with the peak of the one that started it.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])
