"""Sinks go on from the checkpoint: what a lost stretch had written is cut off, and written again."""

from __future__ import annotations

import csv
import json

import pytest

from loopline import Every, Trainer, at, on
from loopline.checkpoint import Checkpointer
from loopline.sinks import CsvSink, JsonlSink
from loopline.testing import TinyTask, tiny_loader


def fit(folder, *, fails_at=None):
    @on(at.STEP_END)
    def fail(run):
        if run.step == fails_at:
            raise RuntimeError("as a kill would")

    trainer = Trainer(
        TinyTask(),
        seed=1,
        progress=False,
        sinks=[JsonlSink(folder / "log.jsonl", Every(steps=1)), CsvSink(folder / "log.csv", Every(steps=2))],
        checkpoint=Checkpointer(folder / "run", when=Every(steps=3)),
        callbacks=[fail],
    )
    trainer.fit(tiny_loader(7), tiny_loader(2, seed=1), epochs=3)


def recorded(folder):
    """Both files without the times."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    with (folder / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [[{k: v for k, v in record.items() if k != "time"} for record in records] for records in (lines, rows)]


@pytest.mark.parametrize("fails_at", [1, 4, 5, 7, 8, 13, 20])
def test_the_files_of_a_run_that_went_on_equal_those_of_one_that_was_never_cut(fails_at, tmp_path):
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    fit(tmp_path / "whole")
    with pytest.raises(RuntimeError):
        fit(tmp_path / "cut", fails_at=fails_at)
    fit(tmp_path / "cut")
    assert recorded(tmp_path / "cut") == recorded(tmp_path / "whole")
