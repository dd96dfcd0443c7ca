import math

import pytest

from loopline import Run, Trainer, loop
from loopline.callbacks import EarlyStopping, Lambda
from loopline.core.errors import MissingMetric
from loopline.core.progress import Progress
from loopline.testing import TinyTask, tiny_loader


def scripted(values, *callbacks, begin=0, epochs=None, name="loss"):
    """A run whose val metric has these values, one per epoch; None is an epoch without an evaluation."""
    run = Run(callbacks=callbacks, progress=Progress(epochs=begin))
    with loop.fit(run):
        for epoch in loop.epochs(run, epochs or len(values)):
            if values[epoch] is not None:
                for _ in loop.evaluate(run, [epoch]):
                    run.log({name: values[epoch]})
    return run


def ended(run):
    return run.progress.epochs, run.status, run.reason


def test_a_loss_that_does_not_improve_for_patience_evaluations_ends_the_run():
    stopping = EarlyStopping("val/loss", patience=3)
    run = scripted([0.9, 0.5, 0.412, 0.6, 0.412, 0.5, 0.1], stopping)
    assert ended(run) == (6, "stopped", "val/loss has not improved for 3 evaluations (best 0.412 in epoch 3)")


def test_an_improvement_begins_the_count_anew():
    stopping = EarlyStopping("val/loss", patience=2)
    run = scripted([5.0, 6.0, 4.0, 5.0, 3.0, 4.0], stopping)
    assert (ended(run), stopping.best, stopping.best_epoch, stopping.wait) == ((6, "completed", None), 3.0, 4, 1)


def test_with_mode_max_a_larger_value_improves():
    stopping = EarlyStopping("val/accuracy", mode="max", patience=2)
    run = scripted([0.1, 0.3, 0.2, 0.25, 0.9], stopping, name="accuracy")
    assert (run.progress.epochs, stopping.best, stopping.best_epoch) == (4, 0.3, 1)


@pytest.mark.parametrize(("mode", "values"), [("min", [1.0, 0.75, 0.5]), ("max", [0.0, 0.25, 0.5])])
def test_an_improvement_of_no_more_than_min_delta_does_not_count(mode, values):
    exact = EarlyStopping("val/loss", mode=mode, min_delta=0.25, patience=9)
    scripted(values[:2], exact)
    more = EarlyStopping("val/loss", mode=mode, min_delta=0.25, patience=9)
    scripted(values, more)
    assert (exact.best_epoch, exact.wait, more.best_epoch, more.wait) == (0, 1, 2, 0)


@pytest.mark.parametrize("patience", [0, 1])
def test_patience_0_and_1_end_at_the_first_evaluation_that_does_not_improve(patience):
    run = scripted([3.0, 2.0, 2.0, 1.0], EarlyStopping("val/loss", patience=patience))
    assert ended(run) == (3, "stopped", "val/loss has not improved for 1 evaluation (best 2 in epoch 2)")


def test_patience_counts_evaluations_and_not_epochs():
    values = [1.0, None, None, 2.0, None, None, 3.0, 0.5]
    assert scripted(values, EarlyStopping("val/loss", patience=2)).progress.epochs == 7


@pytest.mark.parametrize(("bad", "said"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_a_value_that_is_not_finite_ends_the_run_at_once(bad, said):
    run = scripted([0.5, bad, 0.4], EarlyStopping("val/loss", patience=100))
    assert ended(run) == (2, "stopped", f"val/loss is {said} in epoch 2 (best 0.5 in epoch 1)")


def test_without_check_finite_such_a_value_only_fails_to_improve():
    stopping = EarlyStopping("val/loss", patience=3, check_finite=False)
    run = scripted([math.nan, 0.5, -math.inf, math.nan, 0.4], stopping)
    assert (ended(run), stopping.best, stopping.wait) == ((5, "completed", None), 0.4, 0)


def test_a_first_value_that_is_not_finite_is_not_the_best():
    stopping = EarlyStopping("val/loss")
    run = scripted([math.nan, 0.5], stopping)
    assert (run.reason, stopping.best) == ("val/loss is nan in epoch 1 (no value before it was finite)", None)


def test_a_metric_that_is_computed_when_the_epoch_ends_is_seen_in_the_same_epoch():
    def measure(run):
        run.metrics["val/f1"] = [0.5, 0.4][run.epoch]

    stopping = EarlyStopping("val/f1", mode="max", patience=1)
    run = Run(callbacks=[stopping, Lambda(on_epoch_end=measure, writes={"metrics/val/f1"})])
    with loop.fit(run):
        for _ in loop.epochs(run, 5):
            pass
    assert (run.progress.epochs, stopping.best, stopping.best_epoch) == (2, 0.5, 0)


def test_a_misspelt_metric_is_an_error_in_the_first_epoch_that_names_the_right_one():
    with pytest.raises(MissingMetric, match=r"No metric 'val/los' has been logged\. Did you mean 'val/loss'"):
        scripted([0.5, 0.4], EarlyStopping("val/los"))


def test_a_metric_that_never_came_is_an_error_at_the_end():
    with pytest.raises(MissingMetric, match="No metric 'val/loss' has been logged"):
        scripted([None, None], EarlyStopping("val/loss"))


def test_a_run_that_was_stopped_may_have_had_no_evaluation_yet():
    run = Run(callbacks=[EarlyStopping("val/loss")])
    with loop.fit(run):
        for epoch in loop.epochs(run, 10):
            if epoch == 1:
                run.stop("enough")
    assert ended(run) == (2, "stopped", "enough")


def test_the_error_of_a_failing_run_is_not_replaced():
    def failing():
        run = Run(callbacks=[EarlyStopping("val/loss")])
        with loop.fit(run):
            for epoch in loop.epochs(run, 10):
                if epoch == 1:
                    raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        failing()


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_a_resumed_run_stops_where_the_uncut_one_does(cut):
    values = [0.9, 0.5, 0.6, 0.7, 0.8, 0.1]
    uncut = EarlyStopping("val/loss", patience=3)
    expected = scripted(values, uncut)
    first = EarlyStopping("val/loss", patience=3)
    scripted(values, first, epochs=cut)
    second = EarlyStopping("val/loss", patience=3)
    second.load_state_dict(first.state_dict())
    resumed = scripted(values, second, begin=cut)
    assert (ended(resumed), second.state_dict()) == (ended(expected), uncut.state_dict())


def test_a_second_run_from_scratch_begins_with_nothing():
    stopping = EarlyStopping("val/loss", patience=2)
    scripted([0.1, 0.2], stopping)
    run = scripted([0.9, 0.8, 0.7], stopping)
    assert (run.status, stopping.best, stopping.best_epoch, stopping.wait) == ("completed", 0.7, 2, 0)


def test_two_metrics_can_be_watched_in_one_run():
    run = Run(callbacks=[EarlyStopping("val/loss"), EarlyStopping("val/accuracy", mode="max")])
    assert [listener.state_key for listener in run.listeners] == [
        "EarlyStopping(val/loss)",
        "EarlyStopping(val/accuracy)",
    ]


def test_it_watches_the_evaluations_of_a_trainer():
    stopping = EarlyStopping("val/loss", min_delta=100.0, patience=2)
    run = Trainer(TinyTask(), callbacks=[stopping], progress=False).fit(tiny_loader(), tiny_loader(seed=1), epochs=9)
    assert (run.progress.epochs, run.status, stopping.best_epoch) == (3, "stopped", 0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"mode": "lowest"}, "mode='lowest'"),
        ({"patience": -1}, "patience=-1"),
        ({"patience": 2.5}, "patience=2.5"),
        ({"patience": True}, "patience=True"),
        ({"min_delta": -0.1}, "min_delta=-0.1"),
        ({"min_delta": math.nan}, "min_delta=nan"),
        ({"metric": "loss"}, "'loss' is not the name of a metric"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_value(arguments, said):
    with pytest.raises(ValueError, match=said):
        EarlyStopping(**{"metric": "val/loss", **arguments})
