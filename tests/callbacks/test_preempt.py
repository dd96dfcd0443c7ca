"""Signals at chosen moments, in this process; tests/crash sends them to others, at moments that nobody chose."""

from __future__ import annotations

import logging
import signal
import socket
import sys
import threading
from signal import SIGINT, SIGTERM, SIGUSR1

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from loopline import Binding, Callback, Every, Progress, Run, Scheduled, Trainer, at, loop
from loopline.callbacks import Preempt
from loopline.core.errors import LooplineError, Preempted
from loopline.core.event import SEAMS
from loopline.core.progress import Requests
from loopline.testing import Recorder, TinyTask, run_ranks, tiny_loader

SIGNALS = pytest.mark.parametrize("number", [SIGTERM, SIGUSR1, SIGINT], ids=lambda number: number.name)


def state():
    """What a run must leave as it found it."""
    woken = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(woken)
    return [*map(signal.getsignal, (SIGTERM, SIGUSR1, SIGINT)), woken]


@pytest.fixture(autouse=True)
def heard():
    """The signals that reach handlers which were there before; they are there again afterwards, and nothing else is."""
    came: list[int] = []
    handlers = {number: lambda number, frame: came.append(number) for number in (SIGTERM, SIGUSR1, SIGINT)}
    outside = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    before, threads = state(), set(threading.enumerate())
    try:
        yield came
        assert (state(), set(threading.enumerate()) - threads) == (before, set())
    finally:
        for number, handler in outside.items():
            signal.signal(number, handler)


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Several threads take eight times as long for a task so small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.CRITICAL, "loopline")


class Act(Callback):
    """Does something at the n-th time of an event."""

    def __init__(self, event, act, n=1):
        self.event, self.act, self.n, self.times = event, act, n, 0

    def bindings(self, run):
        yield Binding(self.event, self.come, owner=self, on_error=self.on_error)

    def come(self, run):
        self.times += 1
        if self.times == self.n:
            self.act(run)


class Observe(Act):
    on_error = "disable"


class Saving(Callback):
    """Notes where the run is saved, and asks for it when the run does; sends what a plain fit does not send."""

    def __init__(self):
        self.saved: list[tuple[str, int, int]] = []

    def on_setup(self, run):
        run.saver = self.save

    def save(self, run, reason):
        run.emit(at.SAVING)
        self.saved.append((reason, run.progress.epochs, run.progress.steps))

    def on_train_start(self, run):
        run.emit(at.LOADED)

    def on_batch_end(self, run):
        run.emit(at.METRICS)


def sends(*numbers):
    def act(run):
        for number in numbers:
            signal.raise_signal(number)

    return act


def fit(*callbacks, batches=2, validation=2, epochs=2, sanity=0, resume=None, **trainer):
    """What left a fit, the fit's run, where it was saved, and what it sent."""
    saving, recorder = Saving(), Recorder()
    made = Trainer(
        TinyTask(), callbacks=[Preempt(), saving, recorder, *callbacks], progress=False, sanity=sanity, **trainer
    )
    held_out = None if validation is None else tiny_loader(validation, seed=1)
    more = {} if resume is None else {"resume": resume}
    try:
        made.fit(tiny_loader(batches), held_out, epochs=epochs, **more)
    except BaseException as error:  # noqa: BLE001 - what came out is what is looked at
        return error, made.run, saving.saved, recorder
    return None, made.run, saving.saved, recorder


STEP_1, PASS, EPOCH = [("SIGTERM", 0, 1)], [("SIGTERM", 0, 2)], [("SIGTERM", 1, 2)]
SAVED = {
    **dict.fromkeys(SEAMS, STEP_1),
    "resumed": PASS,
    "sanity_start": [],
    **dict.fromkeys(["pass_end", "eval_start", "eval_epoch_start", "eval_batch_start", "eval_batch_end"], PASS),
    **dict.fromkeys(["eval_epoch_end", "eval_end", "epoch_end"], EPOCH),
    "saving": [("asked for", 0, 1)],
    "stopped": [("enough", 0, 1)],
    **{name: [] for name in ("train_end", "fit_end", "teardown")},
}
STATUS = {"stopped": "stopped", "train_end": "completed", "fit_end": "completed", "teardown": "completed"}


@pytest.mark.parametrize("kind", [Act, Observe], ids=["callback", "observer"])
@pytest.mark.parametrize("name", [name for name in SEAMS if name != "exception"])
def test_a_signal_at_any_event_ends_the_run_at_the_next_place_where_it_can_be_saved(name, kind, heard):
    helped = {"saving": lambda run: run.save(), "stopped": lambda run: run.stop("enough")}.get(name)
    more = {"sanity": 1} if name.startswith("sanity") else {}
    if name == "resumed":
        more["resume"] = Run(progress=Progress(steps=1, batches=1, samples=2, batches_in_epoch=1))
    helper = [Act(at.STEP_END, helped)] if helped else []
    error, run, saved, recorder = fit(kind(SEAMS[name], sends(SIGTERM)), *helper, epochs=1, **more)
    assert (type(error), error.code, run.status, run.interrupted, saved, recorder.names[-1], heard) == (
        Preempted,
        143,
        STATUS.get(name, "interrupted"),
        SIGTERM,
        SAVED[name],
        "teardown",
        [SIGTERM],
    )


@SIGNALS
def test_the_process_leaves_with_128_and_the_number_of_the_signal(number, heard):
    error, run, saved, _ = fit(Act(at.BATCH_START, sends(number), n=2))
    assert (error.code, run.reason, saved, heard) == (128 + number, number.name, [(number.name, 0, 2)], [number])


def test_of_several_signals_the_first_one_counts(heard):
    error, run, saved, _ = fit(Act(at.BATCH_START, sends(SIGUSR1, SIGTERM, SIGTERM, SIGINT)))
    assert (error.code, run.reason, saved, heard) == (
        138,
        "SIGUSR1",
        [("SIGUSR1", 0, 1)],
        [SIGUSR1, SIGTERM, SIGTERM, SIGINT],
    )


def test_a_run_that_is_interrupted_inside_an_epoch_leaves_it_unfinished():
    _, run, _, recorder = fit(Act(at.BATCH_START, sends(SIGTERM)), epochs=1)
    assert (recorder.names[-6:], run.progress) == (
        ["step_end", "saving", "stopped", "train_end", "fit_end", "teardown"],
        Progress(steps=1, batches=1, samples=2, batches_in_epoch=1),
    )


def test_an_error_is_raised_as_it_is_though_a_signal_came_as_well():
    def broken(run):
        raise ZeroDivisionError("first")

    error, run, *_ = fit(Act(at.BATCH_END, broken), Act(at.EXCEPTION, sends(SIGTERM)))
    assert (type(error), run.status, run.interrupted) == (ZeroDivisionError, "failed", SIGTERM)


def test_errors_at_teardown_do_not_take_the_place_of_the_signal(caplog):
    def broken(run):
        raise ZeroDivisionError("at the end")

    caplog.set_level(logging.ERROR, "loopline")
    error, *_ = fit(Act(at.BATCH_END, sends(SIGTERM)), Act(at.TEARDOWN, broken))
    assert (type(error), error.code, "ZeroDivisionError: at the end" in [r.getMessage() for r in caplog.records]) == (
        Preempted,
        143,
        True,
    )


def test_how_the_process_leaves_is_said_since_python_does_not(caplog):
    caplog.set_level(logging.WARNING, "loopline")
    fit(Act(at.BATCH_END, sends(SIGUSR1)))
    assert [record.getMessage() for record in caplog.records] == [
        "SIGUSR1 after 1 steps: the run is interrupted, and leaves with the exit code 138."
    ]


def test_a_signal_while_others_are_set_up_is_not_lost():
    class Fails(Callback):
        def on_setup(self, run):
            signal.raise_signal(SIGTERM)
            raise ZeroDivisionError

    error, run, *_ = fit(Fails())
    assert (type(error), run.interrupted) == (ZeroDivisionError, SIGTERM)


def test_an_evaluation_is_given_up_after_its_batch_in_hand_and_leaves_no_metrics():
    _, run, saved, recorder = fit(Act(at.EVAL_BATCH_START, sends(SIGTERM), n=2), validation=5)
    names = recorder.names
    assert (names[names.index("eval_start") :], "val/loss" in run.metrics, run.stage, run.model.training, saved) == (
        [
            *("eval_start", "eval_epoch_start"),
            *2 * ("eval_batch_start", "eval_batch_end"),
            *("saving", "stopped", "train_end", "fit_end", "teardown"),
        ],
        False,
        "train",
        True,
        PASS,
    )


def by_hand(run, batches, held_out=(), reached=None):
    """A hand-written loop of one epoch, and what it comes to after the evaluation."""
    with loop.fit(run):
        for _ in loop.epochs(run, 1):
            for _ in loop.batches(run, batches):
                pass
            if held_out:
                for _ in loop.evaluate(run, held_out):
                    pass
                reached.append(run.progress.steps)


def test_code_that_follows_an_evaluation_does_not_see_the_half_of_it():
    reached = []
    run = Run(callbacks=[Preempt(), Act(at.EVAL_BATCH_END, sends(SIGTERM))])
    with pytest.raises(Preempted):
        by_hand(run, range(3), range(5), reached)
    assert reached == []


@pytest.mark.parametrize("asked", ["validate", "test", "predict"])
def test_an_evaluation_by_itself_gives_nothing_rather_than_a_half(asked):
    given = []
    trainer = Trainer(TinyTask(), callbacks=[Preempt(), Act(at.EVAL_BATCH_END, sends(SIGTERM))], progress=False)
    with pytest.raises(Preempted) as left:
        given.append(getattr(trainer, asked)(tiny_loader(3)))
    assert (left.value.code, given, trainer.run.status) == (143, [], "interrupted")


def test_an_evaluation_inside_a_handler_goes_through_so_that_the_step_can():
    class Looks(Callback):
        def on_batch_start(self, run):
            self.seen = list(loop.evaluate(run, range(4)))

    looks = Looks()
    _, _, saved, _ = fit(looks, Act(at.EVAL_BATCH_START, sends(SIGTERM)))
    assert (looks.seen, saved) == ([0, 1, 2, 3], STEP_1)


LOADER, HELD_OUT = tiny_loader(6), tiny_loader(2, seed=1)


def trained(task, moved, *callbacks, progress=None, owes=False):
    """A fit that is evaluated every two steps, and whose learning rate follows what is measured."""
    measured = []

    def measure(run):
        measured.append((run.progress.steps, run.metrics["val/loss"]))

    def evaluation(run):
        for batch in loop.evaluate(run, HELD_OUT):
            run.log({"loss": task.eval_step(batch, run)["loss"]})

    def ask(run):
        if run.step % 2:
            run.evaluate()

    run = Run(
        model=task.model,
        optimizers=[task.optimizer],
        schedulers=[Scheduled(scheduler=moved, when=Every(steps=2), metric="val/loss")],
        callbacks=[Preempt(), *callbacks, Each(at.STEP_END, ask), Each(at.EVAL_END, measure)],
        progress=progress or Progress(),
        requests=Requests(evaluate=owes),
    )
    run.evaluator = evaluation
    try:
        with loop.fit(run):
            for _ in loop.epochs(run, 2):
                for batch in loop.batches(run, LOADER):
                    loop.backward(run, task.train_step(batch, run)["loss"])
                    loop.optimizer_step(run)
    except Preempted:
        assert run.status == "interrupted"
    return run, measured


class Each(Act):
    def come(self, run):
        self.act(run)


def parts():
    task = TinyTask(momentum=0.9, lr=0.8)
    return task, ReduceLROnPlateau(task.optimizer, patience=0, threshold=0.5)


def told(task, moved, measured):
    return measured, task.optimizer.param_groups[0]["lr"], [p.tolist() for p in task.model.parameters()]


def uncut():
    task, moved = parts()
    _, measured = trained(task, moved)
    return told(task, moved, measured)


def cut(n, *, passed_on=True):
    """Interrupted in the n-th batch of all evaluations, and gone on with."""
    task, moved = parts()
    run, first = trained(task, moved, Act(at.EVAL_BATCH_START, sends(SIGTERM), n=n))
    owes = passed_on and run.requests.evaluate
    _, second = trained(task, moved, progress=run.progress, owes=owes)
    return told(task, moved, first + second)


def test_a_run_that_is_interrupted_in_an_evaluation_at_a_step_goes_on_as_if_it_had_not_been():
    assert [cut(n) for n in range(1, 13)] == [uncut()] * 12


def test_an_evaluation_that_is_owed_and_not_made_up_for_is_missed():
    whole = uncut()
    assert [n for n in range(1, 13) if cut(n, passed_on=False) != whole] == list(range(1, 13))


def test_a_trainer_that_goes_on_makes_up_for_it_before_the_first_step():
    policy = {"evaluate": Every(steps=1), "validation": 1}
    _, run, *_ = fit(Act(at.EVAL_START, sends(SIGTERM)), **policy)
    _, _, _, recorder = fit(resume=run, **policy)
    names = recorder.names
    begin = names.index("train_start")
    assert names[begin : begin + 9] == [
        *("train_start", "loaded", "eval_start", "eval_epoch_start", "eval_batch_start", "eval_batch_end"),
        *("eval_epoch_end", "eval_end", "fetch_start"),
    ]


def test_a_second_ctrl_c_leaves_at_once_and_what_hears_teardown_hears_it():
    error, run, saved, recorder = fit(Act(at.BATCH_END, sends(SIGINT, SIGINT)))
    assert (type(error), run.status, saved, recorder.names[-3:]) == (
        KeyboardInterrupt,
        "interrupted",
        [],
        ["metrics", "exception", "teardown"],  # what Saving sends at the batch's end
    )


def test_a_second_ctrl_c_does_not_cut_off_a_teardown():
    over = []

    def close(run):
        sends(SIGINT, SIGINT)(run)
        over.append("closed")

    error, *_ = fit(Act(at.TEARDOWN, close), Act(at.TEARDOWN, lambda run: over.append("the other")))
    assert (type(error), error.code, over) == (Preempted, 130, ["the other", "closed"])


def test_pythons_own_handler_of_ctrl_c_is_not_called():
    before = signal.signal(SIGINT, signal.default_int_handler)
    error, *_ = fit(Act(at.BATCH_END, sends(SIGINT)))
    there = signal.signal(SIGINT, before)
    assert (error.code, there) == (130, signal.default_int_handler)


def test_a_handler_that_came_later_stays():
    def theirs(number, frame):
        pass

    before = signal.getsignal(SIGTERM)
    fit(Act(at.FIT_START, lambda run: signal.signal(SIGTERM, theirs)))
    assert signal.signal(SIGTERM, before) is theirs


def test_whom_signals_woke_before_they_wake_still():
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    ours.settimeout(10)
    signal.set_wakeup_fd(theirs.fileno())
    fit(Act(at.BATCH_END, sends(SIGTERM)))
    there, woken = signal.set_wakeup_fd(-1), ours.recv(1)
    assert (there, woken) == (theirs.fileno(), bytes([SIGTERM]))
    ours.close()
    theirs.close()


def test_on_another_thread_nothing_is_watched_and_it_says_what_to_do_instead(caplog):
    caplog.set_level(logging.INFO, "loopline")
    seen = []
    thread = threading.Thread(target=lambda: seen.append(fit(Act(at.BATCH_END, lambda run: run.stop("enough")))))
    thread.start()
    thread.join(60)
    said = [record.getMessage() for record in caplog.records]
    assert (seen[0][1].status, said) == (
        "stopped",
        ["Preempt watches no signals: only the main thread gets any. run.stop(reason) ends this run."],
    )


def test_the_check_catches_what_is_left_behind():
    class Forgets(Preempt):
        def on_teardown(self, run):
            pass

    before, threads, forgets, run = state(), set(threading.enumerate()), Forgets(), Run()
    forgets.on_setup(run)
    forgets.on_teardown(run)
    after, left = state(), set(threading.enumerate()) - threads
    Preempt.on_teardown(forgets, run)
    same = [now == then for now, then in zip(after, before, strict=True)]
    assert (same, [thread.name for thread in left]) == ([False] * 4, ["loopline-preempt"])


def test_it_costs_a_step_nothing():
    assert [binding.event for binding in Preempt().bindings(Run())] == [at.SETUP, at.TEARDOWN]


def test_a_run_inside_a_run_has_one_of_its_own_and_both_are_ended():
    inner = []

    def inside(run):
        inner.append(fit(Act(at.BATCH_END, sends(SIGTERM)))[:3])

    error, _, saved, _ = fit(Act(at.BATCH_START, inside))
    assert (error.code, saved, inner[0][0].code, inner[0][2]) == (143, STEP_1, 143, STEP_1)


def test_one_object_watches_one_run_at_a_time():
    preempt = Preempt()
    with loop.fit(Run(callbacks=[preempt])), pytest.raises(LooplineError, match="already watches a run"):
        by_hand(Run(callbacks=[preempt]), range(1))


def test_one_object_serves_one_run_after_another():
    preempt, left = Preempt(), []
    for _ in range(2):
        with pytest.raises(Preempted) as error, loop.fit(Run(callbacks=[preempt])):
            signal.raise_signal(SIGTERM)
        left.append(error.value.code)
    assert left == [143, 143]


def ranked(size, come, evaluate=()):
    """What each of several ranks came to, where `come(run)` plays the signals of some."""

    def rank(comm):
        saved = []
        run = Run(callbacks=[Each(at.STEP_END, come)], comm=comm)
        run.saver = lambda run, reason: saved.append(run.progress.steps)
        evaluated = 0
        try:
            with loop.fit(run):
                for _ in loop.epochs(run, 2):
                    for _ in loop.batches(run, range(4)):
                        pass
                    for _ in loop.evaluate(run, evaluate):
                        evaluated += 1
                        come(run)
        except Preempted as left:
            return left.code, run.status, run.reason, saved, evaluated
        return None

    return run_ranks(rank, size)


def test_all_ranks_leave_at_one_step_with_one_code_whichever_of_them_a_signal_comes_to():
    def come(run):
        if run.step == 2 and run.comm.rank in (0, 2):
            run.interrupted = SIGUSR1 if run.comm.rank == 0 else SIGTERM
            run.requests.stop = signal.Signals(run.interrupted).name

    assert ranked(3, come) == [(143, "interrupted", "SIGTERM", [3], 0)] * 3


def test_on_several_ranks_an_evaluation_goes_through_for_one_would_wait_for_the_other():
    def come(run):
        if run.stage == "val" and run.comm.rank == 1:
            run.interrupted, run.requests.stop = SIGTERM, "SIGTERM"

    assert ranked(2, come, evaluate=range(5)) == [(143, "interrupted", "SIGTERM", [4], 5)] * 2


def test_all_ranks_leave_after_a_save_in_which_a_signal_came_to_one_of_them():
    def rank(comm):
        saved = []

        def save(run, reason):
            saved.append((reason, run.progress.steps))
            if comm.rank == 1:
                run.interrupted, run.requests.stop = SIGTERM, "SIGTERM"

        run = Run(callbacks=[Each(at.STEP_END, lambda run: run.save("each"))], comm=comm)
        run.saver = save
        with pytest.raises(Preempted) as left:
            by_hand(run, range(4))
        return left.value.code, saved

    assert run_ranks(rank, 2) == [(143, [("each", 1)])] * 2


class AtInstruction:
    """Sends a signal before the k-th instruction that the loop's own functions execute in the third and fourth step."""

    def __init__(self, k):
        self.k, self.passed, self.steps = k, 0, None
        names = ("epochs", "batches", "evaluate", "safe_point", "_agree", "_agreed_stop", "_evaluated", "_first")
        functions = [getattr(loop, name) for name in names]
        self.codes = {function.__code__ for function in functions}
        self.run = None

    def __call__(self, frame, event, arg):
        if frame.f_code in self.codes:
            frame.f_trace_opcodes = True
            return self.local
        return None

    def local(self, frame, event, arg):
        if event == "opcode" and self.run is not None and self.run.progress.steps in (2, 3):
            self.passed += 1
            if self.passed == self.k:
                self.steps = self.run.progress.steps
                signal.raise_signal(SIGTERM)
        return self.local


def lost_before(k):
    """Whether a request that comes before the k-th instruction is lost; None where there are not so many."""
    saved = []

    def ask(run):
        run.save()
        if run.step % 2:
            run.evaluate()

    def evaluation(run):
        for _ in loop.evaluate(run, range(2)):
            pass

    run = Run(callbacks=[Preempt(), Each(at.STEP_END, ask)])
    run.saver = lambda run, reason: saved.append(run.progress.steps)
    run.evaluator = evaluation
    sender = AtInstruction(k)
    sender.run = run
    outside = sys.gettrace()
    sys.settrace(sender)
    try:
        by_hand(run, range(8))
    except Preempted:
        pass
    finally:
        sys.settrace(outside)
    if sender.steps is None:
        return None
    last = run.progress.steps
    return not (run.status == "interrupted" and last - sender.steps <= 1 and saved == list(range(1, last + 1)))


def losses():
    found, k = [], 1
    while (lost := lost_before(k)) is not None:
        found += [k] if lost else []
        k += 1
    assert k > 300, "it hardly looked anywhere"
    return found


def test_no_request_is_lost_at_whichever_instruction_of_the_loop_the_signal_comes():
    assert losses() == []


def test_the_search_finds_a_request_that_is_overwritten(monkeypatch):
    def agree(run):
        asked = run.requests.stop, run.requests.save, run.requests.evaluate
        run.requests = Requests()
        return asked

    monkeypatch.setattr(loop, "_agree", agree)
    assert losses() != []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"signals": ()}, "watches nothing"),
        ({"signals": [0]}, "0 is no signal"),
        ({"signals": [SIGTERM, signal.SIGKILL]}, "nobody is told of SIGKILL"),
        ({"grace_s": 0}, "grace_s=0"),
        ({"grace_s": True}, "grace_s=True"),
    ],
)
def test_what_cannot_be_watched_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        Preempt(**given)


def test_a_single_signal_may_be_given_as_it_is():
    assert Preempt(SIGTERM).signals == (SIGTERM,)
