import math

import pytest

from loopline import Run, loop
from loopline.callbacks import Lambda, StopAt
from loopline.core.errors import MissingMetric


def scripted(values, callback, name="loss"):
    run = Run(callbacks=[callback])
    with loop.fit(run):
        for epoch in loop.epochs(run, len(values)):
            for _ in loop.evaluate(run, [epoch]):
                run.log({name: values[epoch]})
    return run.progress.epochs, run.status, run.reason


def test_above_ends_the_run_once_the_metric_is_that_large():
    assert scripted([0.5, 0.89, 0.95, 0.99], StopAt("val/loss", above=0.9)) == (
        3,
        "stopped",
        "val/loss is 0.95 in epoch 3; 0.9 or above was asked for",
    )


def test_below_ends_the_run_once_the_metric_is_that_small():
    assert scripted([0.5, 0.11, 0.05, 0.01], StopAt("val/loss", below=0.1)) == (
        3,
        "stopped",
        "val/loss is 0.05 in epoch 3; 0.1 or below was asked for",
    )


@pytest.mark.parametrize("threshold", [{"above": 1.0}, {"below": 1.0}])
def test_the_threshold_itself_is_enough(threshold):
    assert scripted([1.0, 1.0], StopAt("val/loss", **threshold))[0] == 1


def test_a_threshold_of_zero_is_a_threshold():
    assert scripted([1.0, -1.0, 3.0], StopAt("val/loss", below=0))[0] == 2


def test_a_metric_that_is_computed_when_the_epoch_ends_is_seen_in_the_same_epoch():
    def measure(run):
        run.metrics["val/f1"] = 0.9

    run = Run(callbacks=[StopAt("val/f1", above=0.8), Lambda(on_epoch_end=measure, writes={"metrics/val/f1"})])
    with loop.fit(run):
        for _ in loop.epochs(run, 5):
            pass
    assert run.progress.epochs == 1


def test_nan_reaches_no_threshold():
    assert [scripted([math.nan] * 2, StopAt("val/loss", **t))[1] for t in ({"above": 0.0}, {"below": 0.0})] == [
        "completed",
        "completed",
    ]


def test_a_misspelt_metric_is_an_error_that_names_the_right_one():
    with pytest.raises(MissingMetric, match="Did you mean 'val/accuracy'"):
        scripted([0.5], StopAt("val/acuracy", above=1), name="accuracy")


def test_a_metric_that_never_came_is_an_error_at_the_end():
    run = Run(callbacks=[StopAt("val/loss", below=1)])
    with pytest.raises(MissingMetric), loop.fit(run):
        for _ in loop.epochs(run, 1):
            pass


@pytest.mark.parametrize(
    "thresholds",
    [{}, {"above": 1, "below": 0}, {"above": math.nan}, {"below": math.inf}, {"above": "1"}, {"above": True}],
)
def test_anything_but_one_finite_threshold_is_refused(thresholds):
    with pytest.raises(ValueError, match="StopAt"):
        StopAt("val/loss", **thresholds)
