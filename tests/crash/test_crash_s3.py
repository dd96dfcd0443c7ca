"""A23: every request of a training that saves into a bucket is spoiled in turn: a commit or a failure, never both."""

from __future__ import annotations

import itertools
import os
from contextlib import suppress

import pytest
import torch
import whole
from tests.stores.fault_proxy import FAULTS

from loopline import Run, loop
from loopline.checkpoint import Checkpointer
from loopline.core.errors import LooplineError

FULL = bool(os.environ.get("LOOPLINE_FULL"))
SHARE = 1 if FULL else 12
QUICK = {name: fault for name, fault in FAULTS.items() if not name.startswith("hang")}


def two_saves(store) -> list[int]:
    """The steps whose checkpoints were reported as committed, up to the error that ends the run."""
    committed: list[int] = []
    with suppress(LooplineError):  # a clean failure
        whole.two_saves(store, committed.append, max_failed_saves=2)
    return committed


def wrong(straight, committed: list[int]) -> str | None:
    """What is wrong with what is in the bucket, if anything is."""
    checkpointer = Checkpointer(straight)
    newest = checkpointer.latest()
    step = newest.step if newest else 0
    if step < max(committed, default=0):
        return f"{committed} were committed, and {step} is the newest that can be loaded"
    if newest is None:
        return None
    model = torch.nn.Linear(2, 2)
    run = Run(model=model)
    with loop.opened(run):
        checkpointer.restore(run, newest)
    return None if torch.equal(model.weight, torch.full((2, 2), float(step))) else f"step {step} has other weights"


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "for ever"])
def test_whatever_request_is_spoiled_what_was_committed_is_there_and_nothing_else_is_loaded(
    lasting, bucket, s3_proxy, caplog
):
    caplog.set_level("CRITICAL", logger="loopline")
    assert two_saves(bucket.spoiled_store("plain")) == [1, 2]
    requests = len(s3_proxy.seen)
    cases = list(itertools.product(range(1, requests + 1), QUICK))[:: SHARE * (4 if lasting else 1)]
    found = []
    for i, (nth, name) in enumerate(cases):
        folder = f"{'ever' if lasting else 'once'}-{i}"
        s3_proxy.spoil(QUICK[name], nth=nth, forever=lasting)
        committed = two_saves(bucket.spoiled_store(folder, deadline_s=0.05 if lasting else 20.0))
        s3_proxy.heal()
        if not lasting and committed != [1, 2]:
            found.append((nth, name, f"one spoiled request, and only {committed} were committed"))
        if said := wrong(bucket.store(folder), committed):
            found.append((nth, name, said))
    print(f"{requests} requests, {len(cases)} spoiled {'for ever' if lasting else 'once'}")
    assert found == []
