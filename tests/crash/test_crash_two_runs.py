"""A21: of two processes that want one run's folder, one writes; the other leaves with 75 and says who is there."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from itertools import cycle
from multiprocessing.connection import wait
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import training  # found through the line above, also by the processes that train
import two_trainings

FULL = os.environ.get("LOOPLINE_FULL") == "1"
RACES = 50 if FULL else 10
KILLS = 20 if FULL else 2
LIVE = {"beat_s": 0.05, "patience_s": 60.0}
ONE_WRITER = (1, [75], True)


class Contender:
    """A process that takes orders."""

    def __init__(self, where, *variants, options=None):
        command = [sys.executable, str(Path(__file__).with_name("contender.py")), str(where), json.dumps(options or {})]
        self.process = subprocess.Popen(
            [*command, *variants], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def tell(self, **order):
        self.process.stdin.write(f"{json.dumps(order)}\n")
        self.process.stdin.flush()

    def answer(self):
        line = self.process.stdout.readline()
        assert line, f"it has ended with {self.process.wait()}"
        return json.loads(line)

    def do(self, **order):
        self.tell(**order)
        return self.answer()

    def kill(self):
        self.process.kill()
        self.process.wait()


@contextmanager
def contenders(*each):
    """Processes with these arguments, ready for orders."""
    started = [Contender(*arguments[:-1], options=arguments[-1]) for arguments in each]
    try:
        assert [contender.answer() for contender in started] == [contender.process.pid for contender in started]
        yield started
    finally:
        for contender in started:
            contender.kill()
            contender.process.stdin.close()
            contender.process.stdout.close()


def race(first, second, late_s=0.0, how=LIVE):
    """How many got the run, with what codes the others were refused, and whether they were told who has it."""
    at = time.monotonic() + 0.02
    first.tell(take=how, at=at)
    second.tell(take=how, at=at + late_s)
    answers = {first: first.answer(), second: second.answer()}
    writers = {contender: said for contender, said in answers.items() if "fencing" in said}
    others = [said for said in answers.values() if "fencing" not in said]
    for contender in writers:
        contender.do(release={})
    named = all(f"process {said['pid']} on " in other["said"] for said in writers.values() for other in others)
    return len(writers), [other.get("code", other["said"]) for other in others], named


def races(pair, count, **how):
    """Races over one folder: at the same instant, and one a little later than the other."""
    delays = cycle([0, 0, 0.001, 0.005, 0.2])
    orders = cycle([pair, pair[::-1]])
    return [race(*next(orders), late_s=next(delays), **how) for _ in range(count)]


def test_of_two_processes_that_want_one_folder_exactly_one_gets_it(tmp_path):
    with contenders((tmp_path / "run", None), (tmp_path / "run", None)) as pair:
        assert races(pair, RACES) == [ONE_WRITER] * RACES


def test_of_two_processes_that_want_a_new_folder_exactly_one_gets_it(tmp_path):
    verdicts = []
    for number in range(max(RACES // 10, 2)):
        where = tmp_path / str(number) / "run"
        with contenders((where, None), (where, None)) as pair:
            verdicts.append(race(*pair))
    assert verdicts == [ONE_WRITER] * len(verdicts)


def test_of_two_processes_exactly_one_gets_a_folder_without_locks(tmp_path):
    with contenders((tmp_path / "run", "no locks", None), (tmp_path / "run", "no locks", None)) as pair:
        assert races(pair, RACES) == [ONE_WRITER] * RACES


def test_of_two_processes_exactly_one_gets_a_run_in_a_bucket(bucket):
    arguments = (f"s3://{bucket.name}/runs/1", {"endpoint_url": bucket.server})
    with contenders(arguments, arguments) as pair:
        assert races(pair, RACES, how={**LIVE, "beat_s": 0.2}) == [ONE_WRITER] * RACES


def test_an_owner_that_takes_no_lock_is_caught_by_the_race(tmp_path):
    """The race can fail."""
    with contenders((tmp_path / "run", "no lock taken", None), (tmp_path / "run", "no lock taken", None)) as pair:
        assert races(pair, 10) != [ONE_WRITER] * 10


def test_a_store_that_looks_first_and_puts_then_is_caught_by_the_race(tmp_path):
    """The race can fail."""
    where = tmp_path / "run"
    variants = [(where, "no locks", "looks first", None), (where, "no locks", "looks first and is slow", None)]
    with contenders(*variants) as pair:
        assert races(pair, 5) != [ONE_WRITER] * 5


def test_who_finds_a_folder_taken_ends_with_75(tmp_path):
    with contenders((tmp_path / "run", None), (tmp_path / "run", None)) as (owner, late):
        owner.do(take=LIVE)
        late.tell(take=LIVE, or_exit=True)
        assert late.process.wait(60) == 75


@pytest.mark.timeout(120 + 10 * KILLS)
def test_a_folder_whose_owner_was_killed_can_be_taken_at_once_though_a_child_of_his_lives(tmp_path):
    where, numbers = tmp_path / "run", []
    for _ in range(KILLS):
        with contenders((where, None), (where, None)) as (owner, heir):
            numbers.append(owner.do(take=LIVE)["fencing"])
            child = owner.do(fork={})["child"]
            try:
                owner.kill()
                numbers.append(heir.do(take={"patience_s": 3600})["fencing"])
                heir.do(release={})
            finally:
                os.kill(child, signal.SIGKILL)
    assert numbers == [*range(1, 2 * KILLS + 1)]


def test_a_lock_that_children_inherit_is_caught_by_them(tmp_path):
    """The test above can fail."""
    where = tmp_path / "run"
    with contenders((where, "inherited lock", None), (where, None)) as (owner, heir):
        owner.do(take=LIVE)
        child = owner.do(fork={})["child"]
        try:
            owner.kill()
            assert heir.do(take={"patience_s": 3600}).get("code") == 75
        finally:
            os.kill(child, signal.SIGKILL)


def test_after_a_kill_the_loser_of_a_race_is_told_of_the_new_owner_and_not_of_the_dead_one(tmp_path):
    verdicts = []
    with contenders((tmp_path / "run", None), (tmp_path / "run", None)) as pair:
        for _ in range(KILLS):
            with contenders((tmp_path / "run", None)) as (owner,):
                owner.do(take=LIVE)
            verdicts.append(race(*pair))
    assert verdicts == [ONE_WRITER] * KILLS


def test_a_folder_without_locks_is_taken_from_a_killed_owner_when_no_sign_of_life_comes(tmp_path):
    arguments = (tmp_path / "run", "no locks", None)
    with contenders(arguments, arguments) as (owner, heir):
        owner.do(take=LIVE)
        owner.kill()
        assert heir.do(take={"beat_s": 0.05, "patience_s": 0.5})["fencing"] == 2


def test_a_run_in_a_bucket_is_taken_from_a_killed_owner_when_no_sign_of_life_comes(bucket):
    arguments = (f"s3://{bucket.name}/runs/1", {"endpoint_url": bucket.server})
    with contenders(arguments, arguments) as (owner, heir):
        owner.do(take=LIVE)
        owner.kill()
        assert heir.do(take={"beat_s": 0.05, "patience_s": 0.5})["fencing"] == 2


def test_a_suspended_owner_keeps_its_folder(tmp_path):
    with contenders((tmp_path / "run", None), (tmp_path / "run", None)) as (owner, late):
        owner.do(take=LIVE)
        owner.process.send_signal(signal.SIGSTOP)
        refused = late.do(take={"patience_s": 0.0})["code"]
        owner.process.send_signal(signal.SIGCONT)
        assert (refused, owner.do(check={})["fencing"]) == (75, 1)


@pytest.mark.parametrize("came", [False, True])
def test_one_who_was_suspended_where_no_lock_holds_goes_on_unless_another_came_meanwhile(tmp_path, came):
    arguments = (tmp_path / "run", "no locks", None)
    with contenders(arguments, arguments) as (owner, heir):
        owner.do(take={**LIVE, "stale_s": 0.25})
        owner.process.send_signal(signal.SIGSTOP)
        if came:
            heir.do(take={"beat_s": 0.05, "patience_s": 0.5})
        else:
            time.sleep(0.6)
        owner.process.send_signal(signal.SIGCONT)
        said = owner.do(check={})
        assert said.get("code") == (75 if came else None)


def test_of_two_trainings_in_one_folder_one_is_done_as_if_it_were_alone_and_the_other_ends_with_75(tmp_path):
    alone = tmp_path / "alone"
    training.in_a_process(training.train, alone, training.Config()).join()
    found = []
    for number in range(5 if FULL else 1):
        folder = tmp_path / str(number)
        at = time.monotonic() + 0.5
        pair = [training.in_a_process(two_trainings.train, folder, at) for _ in range(2)]
        wait([process.sentinel for process in pair], 120)  # one has found the folder taken
        (folder / "go").touch()
        for process in pair:
            process.join()
        manifests = [json.loads(path.read_text()) for path in folder.glob("run/checkpoints/*/MANIFEST.json")]
        written_by = {manifest["fencing"] for manifest in manifests}
        found.append((sorted(process.exitcode for process in pair), written_by, (folder / "done").read_text()))
    assert found == [([0, 75], {1}, (alone / "done").read_text())] * len(found)
