import logging
import re

import pytest

from loopline import At, Every, Run, Trainer, loop
from loopline.callbacks import PrintMetrics
from loopline.callbacks.print_metrics import number
from loopline.testing import TinyTask, tiny_loader


def printed(printer, epochs=2, steps=None):
    lines = []
    printer.write = lines.append
    trainer = Trainer(TinyTask(), callbacks=[printer], progress=False)
    trainer.fit(tiny_loader(), tiny_loader(), epochs=epochs, steps=steps)
    return [re.sub(r"\d\.\d+", "N", line) for line in lines]


def logged(values, *callbacks):
    """A run that logs these metrics, one mapping per epoch."""
    run = Run(callbacks=callbacks)
    with loop.fit(run):
        for epoch in loop.epochs(run, len(values)):
            for _ in loop.batches(run, [1]):
                run.log(values[epoch])


def test_a_line_for_each_epoch_has_every_metric():
    assert printed(PrintMetrics()) == [
        "epoch 1/2  step     5  train/loss N  val/loss N  val/accuracy N\n",
        "epoch 2/2  step    10  train/loss N  val/loss N  val/accuracy N\n",
    ]


def test_the_names_choose_the_metrics_and_their_order():
    assert printed(PrintMetrics(names=["val/loss", "train/loss"]), epochs=1) == [
        "epoch 1/1  step     5  val/loss N  train/loss N\n"
    ]


def test_at_a_step_the_count_of_finished_steps_is_told():
    assert printed(PrintMetrics(Every(steps=2), ["train/loss"]), steps=5, epochs=None) == [
        "epoch 1  step 2/5  train/loss N\n",
        "epoch 1  step 4/5  train/loss N\n",
    ]


def test_a_metric_that_has_not_come_yet_leaves_its_place():
    assert printed(PrintMetrics(At(steps=1), ["val/loss", "train/loss"]))[0] == (
        "epoch 1/2  step     1  val/loss      -  train/loss N\n"
    )


def test_numbers_stand_below_each_other():
    lines = []
    logged([{"loss": 123.456}, {"loss": 0.5}, {"loss": -1e-7}, {"loss": 0.25}], PrintMetrics(write=lines.append))
    assert [line.split("train/loss ")[1] for line in lines] == ["123.46\n", "0.5000\n", "-1.00e-07\n", "   0.2500\n"]


def test_the_order_stays_as_metrics_come_and_go():
    lines = []
    logged([{"b": 1.0}, {"a": 1.0, "b": 1.0}, {"a": 1.0}], PrintMetrics(write=lines.append))
    assert [re.findall(r"train/\w", line) for line in lines] == [
        ["train/b"],
        ["train/b", "train/a"],
        ["train/b", "train/a"],
    ]


def test_it_prints_to_standard_output_by_default(capsys):
    logged([{"loss": 2.0}], PrintMetrics())
    assert capsys.readouterr().out == "epoch 1/1  step     1  train/loss 2.0000\n"


def test_without_steps_in_its_policy_it_is_not_bound_to_steps():
    bound = [
        [event.name for event in Run(callbacks=[PrintMetrics(when)]).plan.bindings]
        for when in (Every(epochs=1), Every(steps=1))
    ]
    assert bound == [["setup", "epoch_end", "train_end"], ["setup", "step_end", "epoch_end", "train_end"]]


def test_a_wrong_name_is_told_and_does_not_end_the_run(caplog):
    printed(PrintMetrics(names=["train/los"]), epochs=1)
    assert "No metric 'train/los' has been logged. Did you mean 'train/loss'?" in caplog.text


def test_a_wrong_name_is_told_at_the_first_epoch_already():
    class Stops(logging.Handler):
        def emit(self, record):
            epochs.append(run.progress.epochs)

    epochs = []
    run = Run(callbacks=[PrintMetrics(names=["train/los"])])
    logging.getLogger("loopline").addHandler(handler := Stops())
    try:
        with loop.fit(run):
            for _ in loop.epochs(run, 3):
                for _ in loop.batches(run, [1]):
                    run.log({"loss": 1.0})
    finally:
        logging.getLogger("loopline").removeHandler(handler)
    assert epochs[0] == 0


def test_a_second_run_begins_a_line_of_its_own():
    lines = []
    printer = PrintMetrics(write=lines.append)
    logged([{"first": 1.0}], printer)
    logged([{"second": 1.0}], printer)
    assert lines[1] == "epoch 1/1  step     1  train/second 1.0000\n"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"when": 3}, "say when"),
        ({"names": "val/loss"}, "give a list of names"),
        ({"names": ["loss"]}, "names have a stage"),
    ],
)
def test_what_cannot_be_printed_is_refused_at_once(given, message):
    with pytest.raises((TypeError, ValueError), match=message):
        PrintMetrics(**given)


def test_a_number_is_short_at_every_size():
    given = [0.0, 1.0, -0.5, 99.99999, 123456.0, 0.00012, float("inf")]
    assert [number(value) for value in given] == [
        "0.0000",
        "1.0000",
        "-0.5000",
        "100.000",
        "1.23e+05",
        "1.20e-04",
        "inf",
    ]
