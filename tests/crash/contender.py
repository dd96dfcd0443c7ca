"""A process that wants to write into a run's folder, for tests that let several of them race.

Reads one order per line and answers each with a line: `{"take": {...}, "at": t}` takes the run when the monotonic
clock, which all processes share, says `t`; `{"check": {}}` and `{"release": {}}` do so to what was taken, and
`{"fork": {}}` leaves a child behind that sleeps. torch is not loaded: a process is there in a fraction of a second.
"""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import io
import json
import os
import sys
import time
import types
from pathlib import Path

PACKAGE = Path(importlib.util.find_spec("loopline").origin).parent
for name, place in (("loopline", PACKAGE), ("loopline.checkpoint", PACKAGE / "checkpoint")):
    room = types.ModuleType(name)  # without what its __init__ would load
    room.__path__ = [str(place)]
    sys.modules[name] = room

from loopline.checkpoint.folder_lock import FolderLock  # noqa: E402 - see above
from loopline.checkpoint.owner import Owner  # noqa: E402
from loopline.core.errors import LooplineError, RunLocked  # noqa: E402
from loopline.stores import LocalStore, RemoteStore  # noqa: E402


def main(where, options, *variants):
    for variant in variants:
        VARIANTS[variant]()
    store = RemoteStore(where, **json.loads(options)) if "://" in where else LocalStore(where)
    owner = None
    say(os.getpid())
    for line in sys.stdin:
        order = json.loads(line)
        while time.monotonic() < order.get("at", 0):
            pass
        try:
            match order:
                case {"take": how}:
                    owner = Owner.take(store, **how)
                    said = {"fencing": owner.fencing}
                case {"check": _}:
                    owner.check()
                    said = {"fencing": owner.fencing}
                case {"release": _}:
                    owner.release()
                    said = {}
                case {"fork": _}:
                    child = os.fork()
                    if child == 0:
                        time.sleep(120)
                        os._exit(0)
                    said = {"child": child}
        except RunLocked as error:
            if order.get("or_exit"):
                raise
            said = {"code": error.code, "said": str(error)}
        except LooplineError as error:
            said = {"said": f"{type(error).__name__}: {error}"}
        say({"pid": os.getpid(), **said})


def say(what):
    sys.stdout.write(f"{json.dumps(what)}\n")
    sys.stdout.flush()


def no_locks():
    """As on a network file system that has none."""

    def flock(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    fcntl.flock = flock


def no_lock_taken():
    """An owner that believes it holds the lock of a folder, and does not."""

    class Nothing:
        def release(self):
            pass

    FolderLock.take = lambda folder, card: Nothing()


def inherited_lock():
    """An owner whose forked children hold its lock, too, as flock has it."""

    class Flock:
        def __init__(self, folder):
            self.file = os.open(folder / "LOCK", os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)

        def release(self):
            os.close(self.file)

    FolderLock.take = lambda folder, card: Flock(folder)


def looks_first(pause_s=0.0):
    """A store that looks whether something is there, and then puts."""

    def put_new(self, key, data):
        if key in self.keys(key):
            return False
        time.sleep(pause_s)
        self.put(key, io.BytesIO(data))
        return True

    LocalStore.put_new = put_new


VARIANTS = {
    "no locks": no_locks,
    "no lock taken": no_lock_taken,
    "inherited lock": inherited_lock,
    "looks first": looks_first,
    "looks first and is slow": lambda: looks_first(0.3),
}

if __name__ == "__main__":
    main(*sys.argv[1:])
