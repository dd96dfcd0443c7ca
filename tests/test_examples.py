"""Every example runs as it stands."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(example), run_name="__main__")


def test_the_plain_loop_learns_and_its_callbacks_act(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = runpy.run_path(str(EXAMPLES[[path.stem for path in EXAMPLES].index("plain_loop")]))["main"]()
    said = capsys.readouterr().out.splitlines()
    assert (run.status, len(said), run.metrics["val/loss"] < 0.2) == ("completed", 21, True)
