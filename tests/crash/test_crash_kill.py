"""A1: a run that is killed at any instant goes on bit for bit."""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import training

FULL = bool(os.environ.get("LOOPLINE_FULL"))
KILLS = 50 if FULL else 5  # for each configuration


@pytest.fixture(scope="module")
def uncut(tmp_path_factory):
    """What each training comes to if nobody disturbs it, and how long it takes once it has begun."""
    found = {}
    for config in training.CONFIGS:
        folder = tmp_path_factory.mktemp(config.name)
        process = training.in_a_process(training.train, folder, config)
        began = begun(folder, process)
        process.join(120)
        found[config] = (*training.read(folder), time.monotonic() - began)
    return found


def begun(folder: Path, process) -> float:
    """Wait until a training has begun to train, or has ended; the time."""
    while process.is_alive() and not (folder / "began").exists():
        time.sleep(0.001)
    return time.monotonic()


def survive(folder: Path, config: training.Config, kills: int, lasts_s: float, source: random.Random) -> int:
    """Kill a training again and again, until that was done often enough; then let it finish."""
    done = 0
    while done < kills:
        (folder / "began").unlink(missing_ok=True)
        process = training.in_a_process(training.train, folder, config)
        if source.random() < 0.8:  # the others are killed while they start, and perhaps restore
            begun(folder, process)
        time.sleep(source.uniform(0, lasts_s))
        if process.is_alive():
            training.kill(process)
            done += 1
        if (folder / "done").exists():
            break
    else:
        process = training.in_a_process(training.train, folder, config)
        process.join(120)
    return done


@pytest.mark.parametrize("config", training.CONFIGS, ids=lambda config: config.name)
def test_a_run_killed_again_and_again_goes_on_bit_for_bit(config, uncut, tmp_path):
    weights, losses, batches, lasts_s = uncut[config]
    source = random.Random(0)
    survived = runs = redone = 0
    while survived < KILLS:
        folder = tmp_path / f"{runs}"
        kills = survive(folder, config, min(5, KILLS - survived), lasts_s, source)
        same_weights, same_losses, computed = training.read(folder)
        assert (same_weights, same_losses) == (weights, losses)
        # what one kill can cost: the steps since the last checkpoint, and the one that was being written
        most = 2 * training.STEPS_BETWEEN * config.accumulate * kills
        assert computed - batches <= most
        survived, runs, redone = survived + kills, runs + 1, redone + computed - batches
    print(f"{survived} kills in {runs} runs survived, {redone} batches computed again")


@pytest.mark.parametrize(
    ("broken", "same"),
    [(None, True), (training.streams_are_not_put_back, False), (training.the_position_is_off_by_one, False)],
    ids=["whole", "streams", "position"],
)
def test_a_restore_that_is_broken_is_found_out_by_the_same_comparison(broken, same, uncut, tmp_path):
    config = training.CONFIGS[1]
    for given in ({"dies_at": 7}, {"broken": broken}):
        training.in_a_process(training.train, tmp_path, config, **given).join(120)
    weights, losses, _ = training.read(tmp_path)
    assert ((weights, losses) == uncut[config][:2]) is same
