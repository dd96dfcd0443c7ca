"""Real signals to real processes: where a run is saved, with which code it leaves, and that it leaves at all."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from signal import SIGINT, SIGTERM, SIGUSR1

import pytest

FULL = os.environ.get("LOOPLINE_FULL") == "1"
LONG_S = 30  # what takes longer hangs
SIGNALS = pytest.mark.parametrize("number", [SIGTERM, SIGUSR1, SIGINT], ids=lambda number: number.name)


class Nursery:
    """The process that the trainings are forked from."""

    def __init__(self, folder):
        self.folder = folder
        self.count = 0
        self.alive = set()
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("signalled.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **order):
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def run(self, name, **given):
        folder = self.folder / str(self.count)
        folder.mkdir()
        self.count += 1
        child = Child(self, self.ask(run=name, folder=str(folder), **given), folder)
        self.alive.add(child.pid)
        return child

    def close(self):
        for pid in self.alive:  # what a test that failed has left
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self.process.stdin.close()
        self.process.wait(LONG_S)
        self.process.stdout.close()


@dataclass
class Child:
    """A training under way."""

    nursery: Nursery
    pid: int
    folder: Path

    @property
    def notes(self):
        path = self.folder / "notes"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def until(self, *words):
        """Wait for a note that begins with these words."""
        words, end = [str(word) for word in words], time.monotonic() + LONG_S
        while not any(note[: len(words)] == words for note in self.notes):
            assert time.monotonic() < end, f"never came: {words}; stderr: {self.said}"
            time.sleep(0.002)

    def send(self, number):
        os.kill(self.pid, number)

    def send_to_all(self, number):
        os.killpg(self.pid, number)

    def left(self):
        """The exit code, once it is there."""
        return self.left_within(LONG_S)

    def left_within(self, for_s):
        code = self.nursery.ask(wait=self.pid, for_s=for_s)
        if code is not None:
            self.nursery.alive.discard(self.pid)
        return code

    @property
    def saved(self):
        path = self.folder / "saved.json"
        return json.loads(path.read_text()) if path.exists() else None

    @property
    def said(self):
        return (self.folder / "stderr").read_text()

    def after_the_signal(self, kind):
        """The notes of a kind from the first signal on."""
        notes = self.notes
        first = next(i for i, note in enumerate(notes) if note[0] == "signal")
        return [note[1:] for note in notes[first:] if note[0] == kind]


@pytest.fixture(scope="module")
def nursery(tmp_path_factory):
    made = Nursery(tmp_path_factory.mktemp("signals"))
    yield made
    made.close()


def faults(child, number):
    """What is wrong with how a run left after one signal: nothing, where it was saved in the very step it came in."""
    code, found = child.left(), []
    if code != 128 + number:
        found.append(f"the exit code is {code}")
    came = [note for note in child.notes if note[0] == "signal"]
    if not came:
        return [*found, "no signal came"]
    steps, inside = int(came[0][2]), came[0][3] == "1"
    at = None if child.saved is None else child.saved["steps"]
    if at != steps + 1 and (inside or at != steps):  # between two steps it may still be answered before the next
        found.append(f"saved at {at}, and the signal came in step {steps}")
    if child.saved is not None and child.saved["reason"] != number.name:
        found.append(f"saved because of {child.saved['reason']}")
    if len(child.after_the_signal("step")) > 1:
        found.append("it went on for several steps")
    if [note[1] for note in child.notes if note[0] == "teardown"] != ["interrupted"]:
        found.append("not torn down once, as interrupted")
    return found


@SIGNALS
def test_a_signal_at_any_moment_saves_the_step_that_it_came_in_and_says_so_in_the_exit_code(nursery, number):
    chance = random.Random(int(number))
    wrong = {}
    for n in range(20 if FULL else 3):
        child = nursery.run("plain")
        child.until("step", chance.randrange(12))
        time.sleep(chance.uniform(0, 0.02))
        child.send(number)
        if found := faults(child, number):
            wrong[n] = found, child.notes[-5:], child.said
    assert wrong == {}


def started_until_done(nursery, into, interrupted, chance):
    """What was measured and what it came to, in as many processes as it takes; and how often one was interrupted.

    What is measured once more, because nothing was saved since, is told of once.
    """
    told, times = [], 0
    while True:
        child = nursery.run("checkpointed", into=str(into))
        if interrupted:
            child.until("begun")
            wait = chance.randrange(4 if FULL else 9)
            while child.notes[-1][0] != "weights" and sum(note[0] == "step" for note in child.notes) < wait:
                time.sleep(0.002)
            time.sleep(chance.uniform(0, 0.02))
            number = chance.choice([SIGTERM, SIGUSR1, SIGINT])
            child.send(number)
        left = child.left()
        told += [note for note in child.notes if note[0] in ("measured", "weights")]
        if any(note[0] == "weights" for note in child.notes) or not interrupted:
            return [note for note, _ in groupby(told)], times
        assert left == 128 + number, child.said
        times += 1


def test_a_run_that_is_preempted_again_and_again_comes_to_the_same_as_one_that_is_not(nursery, tmp_path):
    chance = random.Random(0)
    whole, _ = started_until_done(nursery, tmp_path / "whole", False, chance)
    times = 0
    for n in range(5 if FULL else 1):
        told, more = started_until_done(nursery, tmp_path / str(n), True, chance)
        assert told == whole
        times += more
    assert times >= (20 if FULL else 2)


def test_the_check_catches_a_run_that_exits_0(nursery):
    child = nursery.run("swallowed")
    child.until("step", 3)
    child.send(SIGTERM)
    assert faults(child, SIGTERM) == ["the exit code is 0"]


def test_the_check_catches_a_handler_that_loses_the_request(nursery):
    child = nursery.run("losing")
    child.until("step", 3)
    child.send(SIGTERM)
    found = faults(child, SIGTERM)
    assert [found[0].split(",")[0], *found[1:]] == [
        "saved at None",
        "it went on for several steps",
        "not torn down once, as interrupted",
    ]


def test_several_signals_of_a_scheduler_are_as_one(nursery):
    child = nursery.run("slow_fetch")
    child.until("step", 0)
    child.send(SIGUSR1)
    child.send(SIGTERM)
    child.send(SIGTERM)
    child.until("teardown")
    assert (child.left() in (138, 143), len(child.after_the_signal("saved"))) == (True, 1)


def test_while_data_is_fetched_the_step_of_that_data_is_the_last(nursery):
    child = nursery.run("slow_fetch")
    child.until("step", 1)
    count = len([note for note in child.notes if note[0] == "fetching"])
    while len([note for note in child.notes if note[0] == "fetching"]) == count:
        time.sleep(0.01)
    child.send(SIGTERM)
    assert (faults(child, SIGTERM), len(child.after_the_signal("fetching"))) == ([], 0)


def test_a_save_under_way_is_finished_and_not_done_twice(nursery):
    child = nursery.run("slow_save")
    child.until("saving", 2)
    child.send(SIGTERM)
    assert (child.left(), child.saved["steps"], child.after_the_signal("saving")) == (143, 2, [])


def test_a_teardown_under_way_is_finished(nursery):
    child = nursery.run("slow_teardown")
    child.until("closing")
    child.send(SIGTERM)
    left = child.left()
    assert (left, [note for note in child.notes if note[0] in ("closed", "teardown")]) == (
        143,
        [["closed"], ["teardown", "completed"]],
    )


def test_a_second_ctrl_c_leaves_at_once_unsaved_and_tears_down(nursery):
    tries = 20 if FULL else 2
    left = []
    for _ in range(tries):
        child = nursery.run("asleep", moment="step_end")
        child.until("stuck")
        child.send(SIGINT)
        child.until("signal")
        child.send(SIGINT)
        left.append([child.left(), *(note for note in child.notes if note[0] in ("saved", "exception", "teardown"))])
    assert left == tries * [[-SIGINT, ["exception", "KeyboardInterrupt"], ["teardown", "interrupted"]]]


@pytest.mark.parametrize("kind", ["asleep", "spinning"])
def test_after_a_second_ctrl_c_a_teardown_that_hangs_is_waited_for_no_longer_than_5_seconds(nursery, kind):
    child = nursery.run(kind, moment="teardown")
    child.until("stuck")
    began = time.monotonic()
    child.send(SIGINT)
    time.sleep(0.2)
    child.send(SIGINT)
    left = child.left()
    assert (left, "after the second SIGINT" in child.said, time.monotonic() - began < 15) == (130, True, True)


@pytest.mark.parametrize(("kind", "moment"), [("asleep", "teardown"), ("spinning", "step_end")])
def test_a_third_ctrl_c_ends_the_process(nursery, kind, moment):
    tries = 20 if FULL else 2
    left, took_s = [], []
    for _ in range(tries):
        child = nursery.run(kind, moment=moment)
        child.until("stuck")
        for _ in range(3):
            time.sleep(0.2)  # signals of one kind that wait are one
            child.send(SIGINT)
        began = time.monotonic()
        left.append(child.left())
        took_s.append(time.monotonic() - began)
    assert (left, max(took_s) < 4) == ([130] * tries, True)


@SIGNALS
@pytest.mark.parametrize("kind", ["asleep", "spinning"])
def test_a_step_that_hangs_is_given_half_of_the_time_and_leaves_the_stacks(nursery, kind, number):
    child = nursery.run(kind, moment="step_end", grace_s=0.6)
    child.until("stuck")
    child.send(number)
    left, stacks = child.left(), (child.folder / "stacks").read_text()
    where = {"asleep": "in asleep", "spinning": "in spin"}[kind]
    assert (left, child.saved, stacks == child.said, where in stacks, stacks.split(";")[0]) == (
        128 + number,
        None,
        True,
        True,
        "loopline: no safe point came within 0.3 s of the signal",
    )


def test_the_check_catches_a_process_that_nobody_ends(nursery):
    child = nursery.run("without_a_clock")
    child.until("stuck")
    child.send(SIGTERM)
    left = child.left_within(2)
    child.send(signal.SIGKILL)
    assert (left, child.left()) == (None, -signal.SIGKILL)


def test_a_save_that_hangs_is_given_the_whole_time(nursery):
    child = nursery.run("stuck_save", grace_s=2.0)
    child.until("step", 2)
    child.send(SIGTERM)
    left = child.left()
    assert (left, child.said.split(";")[0], "in stuck_save" in child.said or "in save" in child.said) == (
        143,
        "loopline: the run was not over 2 s after the signal",
        True,
    )


def test_nobody_reading_stderr_does_not_keep_it_from_ending(nursery):
    child = nursery.run("full_pipe", grace_s=0.4)
    child.until("stuck")
    child.send(SIGTERM)
    assert child.left() == 143


def test_an_interactive_session_outlives_ctrl_c(nursery):
    child = nursery.run("interactive")
    child.until("step", 3)
    child.send(SIGINT)
    child.until("prompt", 130)
    child.until("stuck")
    child.send(SIGINT)
    time.sleep(0.6)  # longer than the time that any other signal would have left it
    child.send(SIGINT)
    child.until("prompt", "again")
    assert child.left() == 0


@SIGNALS
def test_a_signal_to_the_loaders_workers_as_well_leaves_them_at_work(nursery, number):
    wrong = {}
    for n in range(20 if FULL else 2):
        child = nursery.run("with_workers")
        child.until("step", 3 + n)
        child.send_to_all(number)
        if found := faults(child, number):
            wrong[n] = found, child.said
    assert wrong == {}


def test_the_check_catches_workers_that_are_not_protected(nursery):
    found = []
    while not found:
        child = nursery.run("with_workers", protected=False)
        child.until("step", 3)
        child.send_to_all(SIGTERM)
        found = faults(child, SIGTERM)
    assert found[0] == "the exit code is 1"


def test_a_loaders_worker_that_hangs_ends_with_the_run(nursery):
    child = nursery.run("with_a_worker_that_hangs")
    child.until("step", 6)
    child.send_to_all(SIGTERM)
    found = faults(child, SIGTERM)
    with pytest.raises(ProcessLookupError):
        child.send_to_all(0)
    assert found == []


def test_the_check_catches_a_worker_that_does_not_listen_to_its_parent(nursery):
    child = nursery.run("with_a_worker_that_hangs", deaf=True)
    child.until("step", 6)
    child.send_to_all(SIGTERM)
    child.until("teardown")
    left = child.left_within(2)
    child.send_to_all(signal.SIGKILL)
    assert (left, child.left()) == (None, -signal.SIGKILL)


def test_a_forked_process_of_the_users_ends_when_it_is_terminated(nursery):
    child = nursery.run("with_a_child")
    assert (child.left(), [note[1] for note in child.notes if note[0] == "child"]) == (0, [str(-SIGTERM)])


def test_on_another_thread_nothing_is_watched_and_stop_is_the_way(nursery):
    child = nursery.run("in_a_thread")
    left = child.left()
    assert (left, [note for note in child.notes if note[0] in ("untouched", "over")]) == (
        0,
        [["untouched", "True"], ["over", "stopped", "enough"]],
    )
