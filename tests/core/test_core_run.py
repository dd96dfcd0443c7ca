"""A run before, during and after: events, listeners, requests, what is in hand."""

import pytest
import torch

from loopline import Batch, Callback, Comm, Event, Progress, Run, StopRun, at, loop, on
from loopline.core.comm import ALONE, Alone
from loopline.core.errors import LooplineError, NoBatch
from loopline.core.progress import Requests
from loopline.core.stateful import Stateful, state_key


class Notes(Callback):
    """Writes down which of its moments come."""

    def __init__(self, name="notes", heard=None):
        self.name, self.heard = name, [] if heard is None else heard

    def on_setup(self, run):
        self.heard.append(f"{self.name} setup")

    def on_step_end(self, run):
        self.heard.append(f"{self.name} step_end")

    def on_teardown(self, run):
        self.heard.append(f"{self.name} teardown")


def test_the_barest_use_is_to_emit():
    notes = Notes()
    Run(callbacks=[notes]).emit(at.STEP_END)
    assert notes.heard == ["notes step_end"]


def test_a_payload_is_given_by_keyword():
    heard = []
    own = Event("own")

    @on(own)
    def note(run, **payload):
        heard.append(payload)

    Run(callbacks=[note]).emit(own, a=1, event=2, self=3)
    assert heard == [{"a": 1, "event": 2, "self": 3}]


def test_heard_says_whether_anybody_listens():
    run = Run(callbacks=[Notes()])
    assert (run.heard(at.STEP_END), run.heard(at.EPOCH_END), run.heard(Event("own"))) == (True, False, False)


def test_an_error_gains_a_note_and_keeps_its_type():
    class Fails(Callback):
        def on_step_end(self, run):
            raise KeyError("a")

    Fails.__qualname__ = "Fails"
    with pytest.raises(KeyError) as caught:
        Run(callbacks=[Notes(), Fails()], epoch=0).emit(at.STEP_END)
    assert (type(caught.value), caught.value.args, caught.value.__notes__) == (
        KeyError,
        ("a",),
        ["raised by Fails at step_end, epoch 0, step 0"],
    )


def test_an_error_inside_an_event_inside_an_event_has_a_note_for_each():
    own = Event("own")

    class Inner(Callback):
        @on(own)
        def fail(self, run):
            raise KeyError("a")

    class Outer(Callback):
        def on_step_end(self, run):
            run.emit(own)

    Inner.__qualname__, Outer.__qualname__ = "Inner", "Outer"
    with pytest.raises(KeyError) as caught:
        Run(callbacks=[Outer(), Inner()]).emit(at.STEP_END)
    assert [note.split(",")[0] for note in caught.value.__notes__] == [
        "raised by Inner at own",
        "raised by Outer at step_end",
    ]


def test_the_listeners_after_one_that_raised_are_not_called():
    heard = []

    class Fails(Callback):
        def on_step_end(self, run):
            raise KeyError

    with pytest.raises(KeyError):
        Run(callbacks=[Notes("a", heard), Fails(), Notes("b", heard)]).emit(at.STEP_END)
    assert heard == ["a step_end"]


def test_a_batch_that_is_not_in_hand_is_an_error_that_says_when_it_is():
    with pytest.raises(NoBatch) as caught:
        _ = Run().batch
    assert str(caught.value) == (
        "No batch is in hand: run.batch can be read from batch_start to batch_end, and from eval_batch_start to "
        "eval_batch_end. To keep something of a batch for later, take it at batch_end."
    )


def test_whether_a_batch_is_in_hand_can_be_asked():
    run = Run()
    seen = [run.in_batch]
    with loop.fit(run):
        for _ in loop.epochs(run, 1):
            seen += [run.in_batch for _ in loop.batches(run, [1])]
            seen.append(run.in_batch)
    assert seen == [False, True, False]


def test_a_listener_may_come_before_the_run_opens():
    notes = Notes()
    run = Run()
    run.listen(notes)
    with loop.opened(run):
        run.emit(at.STEP_END)
    assert notes.heard == ["notes setup", "notes step_end", "notes teardown"]


def test_a_listener_that_comes_mid_run_is_set_up_at_once_and_torn_down_at_the_end():
    notes = Notes()
    with loop.opened(Run()) as run:
        run.listen(notes)
        heard = list(notes.heard)
    assert (heard, notes.heard) == (["notes setup"], ["notes setup", "notes teardown"])


def test_those_who_are_there_already_are_not_set_up_again():
    first, second = Notes("first"), Notes("second")
    with loop.opened(Run(callbacks=[first])) as run:
        run.listen(second)
    assert first.heard == ["first setup", "first teardown"]


def test_an_emission_under_way_does_not_reach_who_comes_during_it():
    heard = []

    class Brings(Callback):
        def on_step_end(self, run):
            if len(run.listeners) == 1:
                run.listen(Notes("new", heard))

    run = Run(callbacks=[Brings()])
    run.emit(at.STEP_END)
    before = list(heard)
    run.emit(at.STEP_END)
    assert (before, heard) == ([], ["new step_end"])


def test_a_listener_that_is_brought_by_a_setup_is_set_up_once():
    notes = Notes()

    class Brings(Callback):
        def on_setup(self, run):
            run.listen(notes)

    with loop.opened(Run(callbacks=[Brings(), Notes("other")])):
        pass
    assert notes.heard == ["notes setup", "notes teardown"]


def test_a_listener_that_cannot_be_attached_leaves_the_run_as_it_was():
    class Typo(Callback):
        def on_step_ends(self, run): ...

    run = Run(callbacks=[Notes()])
    plan, listeners = run.plan, list(run.listeners)
    with pytest.raises(LooplineError):
        run.listen(Notes("more"), Typo())
    assert (run.plan is plan, run.listeners == listeners) == (True, True)


def test_a_late_setup_that_may_fail_fails_alone(caplog):
    class MayFail(Callback):
        on_error = "disable"

        def on_setup(self, run):
            raise ValueError("no")

    with loop.opened(Run()) as run:
        run.listen(MayFail())
    assert (run.status, len(caplog.records)) == ("completed", 2)  # when it fails, and in the summary


def test_a_late_setup_is_wrapped_like_any_other():
    wrapped = []

    class Wraps(Callback):
        def wrap_handler(self, run, binding, handler):
            def counted(run):
                wrapped.append(binding.event.name)
                handler(run)

            return counted

    with loop.opened(Run(callbacks=[Wraps()])) as run:
        run.listen(Notes())
    assert wrapped == ["setup", "teardown"]


def test_a_late_setup_that_fails_says_whose_it_was():
    class Fails(Callback):
        def on_setup(self, run):
            raise ValueError("no")

    Fails.__qualname__ = "Fails"
    with pytest.raises(ValueError, match="no") as caught, loop.opened(Run()) as run:
        run.listen(Fails())
    assert any("Fails" in note for note in getattr(caught.value, "__notes__", []))


def test_who_comes_after_the_last_step_and_hears_teardown_has_heard_setup():
    notes = Notes()

    class Brings(Callback):
        def on_train_end(self, run):
            run.listen(notes)

    with loop.fit(Run(callbacks=[Brings()])) as run:
        for _ in loop.epochs(run, 0):
            pass
    assert notes.heard == ["notes setup", "notes teardown"]


def test_logging_before_the_run_is_open_is_an_error_that_says_how_to_open_it():
    with pytest.raises(LooplineError) as caught:
        Run().log({"loss": 1.0})
    assert str(caught.value) == (
        "run.log works in a run that is open: put the loop inside `with loop.fit(run):` or `with loop.opened(run):`."
    )


def test_a_name_without_a_slash_belongs_to_the_stage():
    with loop.opened(Run()) as run:
        run.log({"loss": 1.0, "probe/loss": 2.0})
        run.stage = "val"
        run.log({"loss": 3.0})
    assert dict(run.metrics) == {"train/loss": 1.0, "probe/loss": 2.0, "val/loss": 3.0}


@pytest.mark.parametrize("wrong", ["high", None, [1.0], {"a": 1}])
def test_a_value_that_is_no_number_is_an_error_that_names_it(wrong):
    with loop.opened(Run()) as run, pytest.raises((LooplineError, TypeError), match="loss"):
        run.log({"loss": wrong})


def test_saving_without_a_saver_is_an_error():
    with pytest.raises(LooplineError, match=r"^run\.save\(\) needs somewhere to save to, and this run has no check"):
        Run().save()


def test_evaluating_without_an_evaluator_is_an_error():
    with pytest.raises(
        LooplineError, match=r"^run\.evaluate\(\) needs validation data; give it to Trainer\.fit, or se"
    ):
        Run().evaluate()


def test_requests_wait_to_be_answered():
    run = Run(saver=print, evaluator=print)
    run.stop("enough")
    run.save("often")
    run.evaluate()
    assert run.requests == Requests(stop="enough", save="often", evaluate=True)


def test_the_first_reason_to_stop_is_kept():
    run = Run()
    run.stop("first")
    run.stop("second")
    assert run.requests.stop == "first"


def test_a_stop_asked_for_while_an_evaluation_is_answered_is_not_lost():
    class StopsAfterEvaluation(Callback):
        def on_step_end(self, run):
            run.evaluate()

        def on_eval_end(self, run):
            run.stop("good enough")

    def evaluator(run):
        for _ in loop.evaluate(run, [1]):
            pass

    run = Run(callbacks=[StopsAfterEvaluation()], evaluator=evaluator)
    with loop.fit(run):
        for _ in loop.epochs(run, 1):
            for _ in loop.batches(run, [1, 2, 3]):
                pass
    assert (run.status, run.reason, run.progress.steps < 3) == ("stopped", "good enough", True)


def test_a_save_asked_for_while_an_evaluation_is_answered_is_not_lost():
    saved = []

    class SavesAfterEvaluation(Callback):
        def on_step_end(self, run):
            if run.step == 0:
                run.evaluate()

        def on_eval_end(self, run):
            run.save("a new best")

    def evaluator(run):
        for _ in loop.evaluate(run, [1]):
            pass

    run = Run(callbacks=[SavesAfterEvaluation()], evaluator=evaluator, saver=lambda run, reason: saved.append(reason))
    with loop.fit(run):
        for _ in loop.epochs(run, 1):
            for _ in loop.batches(run, [1, 2, 3]):
                pass
    assert saved == ["a new best"]


def test_a_stop_without_a_reason_is_still_a_stop():
    class Stops(Callback):
        def on_step_end(self, run):
            run.stop("")

    run = Run(callbacks=[Stops()])
    train(run)
    assert (run.status, run.progress.steps) == ("stopped", 1)


@pytest.mark.parametrize(
    ("event", "next_event"),
    [(at.STEP_START, at.BATCH_START), (at.BATCH_START, at.BATCH_END), (at.BATCH_END, at.STEP_END)],
)
def test_who_comes_at_one_event_hears_the_next(event, next_event):
    steps = []

    @on(next_event)
    def note(run):
        steps.append(run.step)

    @on(event)
    def bring(run):
        if run.step == 1:
            run.listen(note)

    train(Run(callbacks=[bring]))
    assert steps == [1, 2]


@pytest.mark.parametrize("event", [at.SETUP, at.FIT_START, at.TRAIN_START, at.STEP_START, at.STEP_END, at.EPOCH_END])
def test_a_stop_that_is_raised_anywhere_ends_the_run_as_stopped(event):
    torn_down = []

    @on(event)
    def stops(run):
        raise StopRun("now")

    @on(at.TEARDOWN)
    def note(run):
        torn_down.append(run.status)

    run = Run(callbacks=[stops, note])
    train(run)
    assert (run.status, run.reason, torn_down) == ("stopped", "now", ["stopped"])


def test_a_closed_run_lets_go_of_its_plan_and_of_what_was_kept_on_it():
    run = Run(callbacks=[Notes()])
    run.scratch["view"] = object()
    run.close()
    assert (run.heard(at.STEP_END), run.scratch, run.in_batch) == (False, {}, False)


def test_a_closed_run_can_be_closed_again_and_asked_what_it_came_to():
    with loop.opened(Run(progress=Progress(steps=3))) as run:
        pass
    run.close()
    assert (run.status, run.progress.steps) == ("completed", 3)


def test_a_resumed_run_begins_at_the_index_after_what_is_done():
    run = Run(progress=Progress(epochs=2, steps=10, batches=10))
    assert (run.epoch, run.step) == (2, 9)


def test_runs_are_equal_only_to_themselves():
    run = Run()
    assert (run == run, run == Run(), len({run, run})) == (True, False, 1)


def test_a_callback_not_in_a_list_is_told_to_be_in_one():
    with pytest.raises(TypeError, match="callbacks"):
        Run(callbacks=Notes())


def test_an_optimizer_not_in_a_list_is_told_to_be_in_one():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(TypeError, match="optimizers"):
        Run(optimizers=optimizer)


def test_nothing_is_done_at_first():
    assert Progress() == Progress(epochs=0, steps=0, batches=0, samples=0, batches_in_epoch=0)


@pytest.mark.parametrize("wrong", [-1, 1.0, "2", None])
def test_a_count_is_a_whole_number(wrong):
    with pytest.raises(ValueError, match=rf"^Progress\(steps={wrong!r}\): a count is a whole number, 0 or more\.$"):
        Progress(steps=wrong)


def test_a_batch_is_a_window_of_its_own_unless_told_otherwise():
    assert Batch([1], 0) == Batch(
        data=[1], index=0, first_of_window=True, last_of_window=True, size=1, output=None, loss=None
    )


def test_alone_is_a_comm():
    assert isinstance(ALONE, Comm)


def test_alone_every_answer_is_known():
    assert (
        ALONE.rank,
        ALONE.local_rank,
        ALONE.world_size,
        ALONE.any(True, False),
        ALONE.any(),
        ALONE.gather("a"),
        ALONE.broadcast("b"),
        ALONE.barrier("why"),
    ) == (0, 0, 1, (True, False), (), ["a"], "b", None)


def test_alone_can_be_compared():
    assert Alone() == ALONE


def test_a_callback_is_stateful_and_its_key_is_its_class():
    assert (isinstance(Callback(), Stateful), state_key(Notes())) == (True, "Notes")


def test_a_listener_may_have_a_key_of_its_own():
    class Own:
        state_key = "mine"

    assert state_key(Own()) == "mine"


def test_a_listener_without_a_key_goes_by_its_class():
    class Keyless: ...

    assert state_key(Keyless()) == "Keyless"


def train(run):
    with loop.fit(run):
        for _ in loop.epochs(run, 1):
            for _ in loop.batches(run, [1, 2, 3]):
                pass


def test_gradients_that_did_not_come_from_loop_backward_are_not_silently_thrown_away():
    weight = torch.nn.Parameter(torch.zeros(1))
    run = Run(optimizers=[torch.optim.SGD([weight], lr=1.0)])
    try:
        with loop.fit(run):
            for _ in loop.epochs(run, 1):
                for x in loop.batches(run, [torch.ones(1)] * 2, accumulate=2):
                    (weight * x).sum().backward()
                    loop.optimizer_step(run)
    except LooplineError as error:
        assert "loop.backward" in str(error)  # noqa: PT017 - refusing it is as good as stepping
    else:
        assert weight.item() != 0.0
