"""A5, A6: whatever the system refuses, what was committed can be loaded, and the error says what to do."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path

import pytest
import torch
import whole

from loopline import Never, Run, loop
from loopline.checkpoint import Checkpointer
from loopline.core.errors import LooplineError

FULL = bool(os.environ.get("LOOPLINE_FULL"))
CALLS = ("open", "write", "fsync", "replace", "rename", "link", "mkdir", "unlink", "rmdir", "ftruncate")
ERRORS = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EROFS)


class Faults:
    """The k-th call that could change the disk fails, or every one from the k-th on."""

    def __init__(self, patch: pytest.MonkeyPatch, k: int, code: int, *, for_ever: bool) -> None:
        self.count = 0
        for name in CALLS:
            patch.setattr(os, name, self.failing(getattr(os, name), k, code, for_ever=for_ever))

    def failing(self, call, k, code, *, for_ever):
        def asked(*given, **named):
            self.count += 1
            if self.count == k or (for_ever and self.count > k):
                raise OSError(code, os.strerror(code))
            return call(*given, **named)

        return asked


def two_saves(folder: Path) -> list[int]:
    """The steps whose checkpoints were reported as committed, up to the error that ends the run."""
    committed: list[int] = []
    whole.two_saves(folder, committed.append, max_failed_saves=2)
    return committed


def under_faults(folder: Path, k: int, code: int, *, for_ever: bool) -> tuple[int, str | None]:
    """How many calls were made, and what is wrong afterwards, if anything is."""
    committed: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(patch, k, code, for_ever=for_ever)
        try:
            committed = two_saves(folder)
        except (LooplineError, OSError) as error:
            if not str(error):
                return faults.count, f"{error!r} says nothing"
        except BaseExceptionGroup as error:
            return faults.count, repr(error)
    newest = Checkpointer(folder).latest() if folder.exists() else None
    step = newest.step if newest else 0
    if step < max(committed, default=0):
        return faults.count, f"{committed} were committed, and {step} is the newest that can be loaded"
    try:  # and the run goes on from there
        model = torch.nn.Linear(2, 2)
        with loop.fit(Run(model=model, callbacks=[Checkpointer(folder, when=Never())])):
            pass
    except LooplineError as error:
        return faults.count, f"going on: {error!r}"
    right = step == 0 or torch.equal(model.weight, torch.full((2, 2), float(step)))
    return faults.count, None if right else f"step {step} came back with other weights"


def test_every_call_that_fails_leaves_the_last_commit_loadable(tmp_path, caplog):
    caplog.set_level("CRITICAL", logger="loopline")
    calls, _ = under_faults(tmp_path / "none", 10**9, errno.EIO, for_ever=False)
    cases = list(itertools.product(range(1, calls + 1), ERRORS, (False, True)))
    wrong = []
    for i, (k, code, for_ever) in enumerate(cases if FULL else cases[::7]):
        _, said = under_faults(tmp_path / f"{i}", k, code, for_ever=for_ever)
        if said:
            wrong.append((k, errno.errorcode[code], for_ever, said))
    print(f"{calls} call sites, {len(cases if FULL else cases[::7])} failures")
    assert wrong == []


def test_the_check_finds_a_checkpointer_that_forgets_to_look_at_errors(tmp_path, monkeypatch, caplog):
    from loopline.checkpoint.shelf import Attempt
    from loopline.core.errors import StoreError

    def put(attempt, path, blocks):
        try:
            real(attempt, path, blocks)
        except StoreError:
            attempt.files.pop(path, None)

    real = Attempt.put
    monkeypatch.setattr(Attempt, "put", put)
    caplog.set_level("CRITICAL", logger="loopline")
    calls, _ = under_faults(tmp_path / "none", 10**9, errno.EIO, for_ever=False)
    assert any(under_faults(tmp_path / f"{k}", k, errno.EIO, for_ever=False)[1] for k in range(1, calls + 1))


@pytest.mark.parametrize("room", range(2000, 22000, 2000 if FULL else 10000))
def test_a_full_disk_is_named_and_after_it_was_freed_the_run_goes_on(room, tmp_path, monkeypatch, caplog):
    left = {"bytes": room}

    def write(file, data):
        if len(data) > left["bytes"]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left["bytes"] -= len(data)
        return real(file, data)

    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        try:
            for _ in range(20):
                two_saves(tmp_path / "run")
        except LooplineError as error:
            said = f"{error}"
    step = newest.step if (newest := Checkpointer(tmp_path / "run").latest()) else 0
    assert ("disk full" in said, str(tmp_path) in said) == (True, True), said
    assert two_saves(tmp_path / "run")[-1:] == [2]
    assert step in (0, 1, 2)
