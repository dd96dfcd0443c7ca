"""A run cut at a safe point goes on as if it had not been cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import ReduceLROnPlateau

from loopline import At, Binding, Every, Never, Progress, Run, Scheduled, Trainer, at, loop
from loopline.testing import Recorder, TinyTask, tiny_loader, tiny_stream

BEFORE = {"setup", "fit_start", "resumed", "sanity_start", "sanity_end", "train_start"}
AFTER = {"stopped", "train_end", "fit_end", "teardown"}


@dataclass
class Cut:
    """Asks for a stop at the k-th STEP_END or EPOCH_END."""

    event: Any
    k: int
    count: int = 0

    def bindings(self, run):
        yield Binding(self.event, self.ask, owner=self)

    def ask(self, run):
        self.count += 1
        if self.count == self.k:
            run.stop("cut")


@dataclass(frozen=True)
class Case:
    batches: int = 5
    epochs: int | None = 2
    steps: int | None = None
    accumulate: int = 1
    sized: bool = True
    unfinished: str = "step"
    evaluate: Any = Every(epochs=1)
    guarded: bool = True

    @property
    def loader(self):
        return tiny_loader(self.batches) if self.sized else tiny_stream(self.batches)


VALIDATION = tiny_loader(1, seed=1)


def by_hand(case: Case, task: TinyTask, callbacks: list[Any], progress: Progress | None) -> Run:
    """The loop of the documentation, with an evaluation after every epoch and at steps."""
    due = case.evaluate.watch()

    def evaluation(run):
        for batch in loop.evaluate(run, VALIDATION):
            run.log({"loss": task.eval_step(batch, run)["loss"]})

    class Ask:
        def bindings(self, run):
            yield Binding(at.STEP_END, self.ask, owner=self)

        def ask(self, run):
            if due("steps", run.step + 1):
                run.evaluate()

    run = Run(
        model=task.model,
        optimizers=[task.optimizer],
        callbacks=[*callbacks, Ask()],
        accumulate=case.accumulate,
        progress=progress or Progress(),
    )
    run.evaluator = evaluation
    with loop.fit(run):
        for epoch in loop.epochs(run, case.epochs, steps=case.steps):
            for batch in loop.batches(run, case.loader, unfinished=case.unfinished):
                loop.backward(run, task.train_step(batch, run)["loss"])
                loop.optimizer_step(run)
            if not (case.guarded and run.ending) and due("epochs", epoch + 1):
                evaluation(run)
    return run


def by_trainer(case: Case, task: TinyTask, callbacks: list[Any], progress: Progress | None) -> Run:
    trainer = Trainer(
        task, accumulate=case.accumulate, evaluate=case.evaluate, callbacks=callbacks, progress=False, sanity=1
    )
    resume = None if progress is None else Run(progress=progress)
    return trainer.fit(case.loader, VALIDATION, epochs=case.epochs, steps=case.steps, resume=resume)


def body(recorder: Recorder) -> list[str]:
    """What lies between TRAIN_START and the end; the sanity check before it goes with it."""
    names = recorder.names
    start = names.index("train_start") + 1
    assert all(name in BEFORE or recorder.stream[i]["stage"] == "sanity" for i, name in enumerate(names[:start]))
    end = next(i for i in range(start, len(names)) if names[i] in AFTER)
    assert set(names[end:]) <= AFTER
    return recorder.lines[start:end]


def uncut(drive: Any, case: Case) -> tuple[Recorder, list[list[float]]]:
    recorder, task = Recorder(), TinyTask(momentum=0.9)
    drive(case, task, [recorder], None)
    return recorder, [p.tolist() for p in task.model.parameters()]


def cut_and_resumed(drive: Any, case: Case, event: Any, k: int) -> tuple[list[str], list[list[float]]]:
    """The lines of both halves together, and the weights at the end."""
    first, second, task = Recorder(), Recorder(), TinyTask(momentum=0.9)
    run = drive(case, task, [first, Cut(event, k)], None)
    drive(case, task, [second], run.progress)
    assert "resumed" in second.names
    return body(first) + body(second), [p.tolist() for p in task.model.parameters()]


def assert_goes_on_as_if_uncut(drive: Any, case: Case, cut: tuple[Any, int], *, without: str = "nothing") -> None:
    """The cut is moved to a place that this case really passes; a case without a safe point has nothing to show."""
    whole, weights = uncut(drive, case)
    event = next((e for e in (cut[0], at.STEP_END, at.EPOCH_END) if e.name in whole.names), None)
    if event is None:
        return
    together, same_weights = cut_and_resumed(drive, case, event, 1 + (cut[1] - 1) % whole.names.count(event.name))
    kept = [[line for line in lines if not line.startswith(without)] for lines in (together, body(whole))]
    assert (kept[0], same_weights) == (kept[1], weights)


policies = st.one_of(
    st.just(Never()),
    st.builds(lambda n: Every(steps=n), st.integers(1, 4)),
    st.builds(lambda n: Every(epochs=n), st.integers(1, 2)),
    st.builds(lambda n, m: Every(steps=n) | Every(epochs=m), st.integers(1, 4), st.integers(1, 2)),
    st.builds(lambda n, m: At(steps=n) | Every(epochs=m), st.integers(1, 4), st.integers(1, 2)),
)


def cases(*, sized: bool, unfinished: str = "step") -> st.SearchStrategy[Case]:
    limits = st.sampled_from([(1, None), (2, None), (3, None), (None, 3), (None, 6), (2, 5), (3, 4)])
    return st.builds(
        lambda batches, limits, accumulate, evaluate: Case(batches, *limits, accumulate, sized, unfinished, evaluate),
        st.integers(1, 7),
        limits,
        st.integers(1, 4),
        policies,
    ).filter(lambda case: case.epochs is not None or case.unfinished == "step" or case.batches >= case.accumulate)


cuts = st.tuples(st.sampled_from([at.STEP_END, at.EPOCH_END]), st.integers(1, 8))
few = settings(max_examples=30)


@few
@given(case=cases(sized=True), cut=cuts)
def test_a_loop_by_hand_cut_at_any_safe_point_goes_on_as_if_uncut(case, cut):
    assert_goes_on_as_if_uncut(by_hand, case, cut)


@few
@given(case=cases(sized=True), cut=cuts)
def test_a_fit_cut_at_any_safe_point_goes_on_as_if_uncut(case, cut):
    assert_goes_on_as_if_uncut(by_trainer, case, cut)


@few
@given(case=cases(sized=True, unfinished="drop"), cut=cuts)
@example(case=Case(batches=3, epochs=2, accumulate=2, unfinished="drop"), cut=(at.EPOCH_END, 1))
def test_a_loop_that_drops_unfinished_windows_goes_on_as_if_uncut(case, cut):
    assert_goes_on_as_if_uncut(by_hand, case, cut)


@few
@given(case=cases(sized=False), cut=cuts)
@example(case=Case(batches=1, epochs=1, accumulate=2, sized=False), cut=(at.STEP_END, 1))
def test_a_loop_over_a_stream_goes_on_as_if_uncut(case, cut):
    assert_goes_on_as_if_uncut(by_hand, case, cut)


@few
@given(case=cases(sized=False), cut=cuts)
@example(case=Case(batches=1, epochs=1, accumulate=2, sized=False), cut=(at.STEP_END, 1))
def test_a_fit_over_a_stream_goes_on_as_if_uncut(case, cut):
    assert_goes_on_as_if_uncut(by_trainer, case, cut)


@few
@given(case=cases(sized=False), cut=cuts)
def test_over_a_stream_a_cut_changes_at_most_how_often_the_loader_is_asked(case, cut):
    assert_goes_on_as_if_uncut(by_hand, case, cut, without="fetch")


def test_an_evaluation_of_the_last_step_is_not_repeated_after_a_cut_there():
    case = Case(batches=3, epochs=None, steps=2, evaluate=Every(steps=2))
    assert_goes_on_as_if_uncut(by_trainer, case, (at.STEP_END, 2))


def test_the_loop_of_the_documentation_stops_inside_an_epoch_without_evaluating():
    assert_goes_on_as_if_uncut(by_hand, Case(batches=3, epochs=1, guarded=False), (at.STEP_END, 1))


@pytest.mark.parametrize("cut", [(at.STEP_END, 3), (at.STEP_END, 5), (at.EPOCH_END, 1)])
def test_progress_and_batches_in_hand_are_those_of_the_uncut_run(cut):
    whole, first, second = Recorder(), Recorder(), Recorder()
    case = Case(batches=5, epochs=2, accumulate=2)
    by_trainer(case, TinyTask(), [whole], None)
    run = by_trainer(case, TinyTask(), [first, Cut(*cut)], None)
    by_trainer(case, TinyTask(), [second], run.progress)
    of_training = [e for e in [*first.stream, *second.stream] if e["event"] in ("batch_end", "step_end", "epoch_end")]
    uncut = [e for e in whole.stream if e["event"] in ("batch_end", "step_end", "epoch_end")]
    assert [(e["progress"], e.get("batch")) for e in of_training] == [(e["progress"], e.get("batch")) for e in uncut]


@pytest.mark.parametrize("drive", [by_hand, by_trainer])
def test_a_cut_at_every_step_in_turn_gives_the_weights_of_one_run(drive):
    case = Case(batches=5, epochs=2, accumulate=2)
    task, progress, pieces = TinyTask(momentum=0.9), None, 0
    while progress is None or progress.epochs < 2:
        progress = drive(case, task, [Cut(at.STEP_END, 1)], progress).progress
        pieces += 1
    weights = [p.tolist() for p in task.model.parameters()]
    assert (weights, pieces) == (uncut(drive, case)[1], 7)  # six steps, and a last piece with no step to do


def test_after_a_resume_inside_an_epoch_its_mean_loss_is_that_of_the_whole_epoch():
    case = Case(batches=4, epochs=1)

    def mean_loss(task, callbacks, resume=None):
        trainer = Trainer(task, callbacks=callbacks, progress=False)
        return trainer.fit(case.loader, epochs=1, resume=resume)

    whole = mean_loss(TinyTask(), [])
    task = TinyTask()
    cut = mean_loss(task, [Cut(at.STEP_END, 2)])
    assert mean_loss(task, [], resume=cut).metrics["train/loss"] == whole.metrics["train/loss"]


def test_a_resumed_plateau_scheduler_does_not_see_an_old_value_again():
    def rates(cuts):
        task = TinyTask(lr=1.0)
        plateau = ReduceLROnPlateau(task.optimizer, patience=0, factor=0.5)
        task.schedulers = lambda: [Scheduled(scheduler=plateau, when=Every(epochs=1), metric="val/loss")]
        task.eval_step = lambda batch, run: {"loss": float(run.epoch)}
        run = None
        for cut in [*cuts, None]:
            trainer = Trainer(
                task, evaluate=Every(epochs=2), callbacks=[] if cut is None else [Cut(*cut)], progress=False
            )
            run = trainer.fit(tiny_loader(2), VALIDATION, epochs=6, resume=run)
        return task.optimizer.param_groups[0]["lr"]

    assert rates([(at.EPOCH_END, 2)]) == rates([])
