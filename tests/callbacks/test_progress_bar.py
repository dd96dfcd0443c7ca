import io
import logging
import os
import re
import sys
import threading
import time

import pytest
import torch
from rich.console import Console
from rich.errors import LiveError
from rich.live import Live

from loopline import Every, Run, Trainer, at, loop, on
from loopline.callbacks import ProgressBar
from loopline.callbacks.print_metrics import readable
from loopline.testing import FakeComm, TinyTask, tiny_loader

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def fileno(self):
        raise io.UnsupportedOperation("fileno")


class Gone(io.StringIO):
    """A pipe whose reader has left."""

    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")


def plain(file=None):
    return Console(file=file or io.StringIO(), force_terminal=False)


def terminal(file=None, width=100):
    return Console(file=file or Terminal(), force_terminal=True, width=width, height=30, color_system=None)


def fit(console, *callbacks, epochs=2, validation=True, every_s=30.0, refresh_s=0.02, **given):
    bar = ProgressBar(refresh_s, every_s, console=console)
    trainer = Trainer(TinyTask(), callbacks=[bar, *callbacks], **given)
    return trainer.fit(tiny_loader(), tiny_loader() if validation else None, epochs=epochs)


def said(console):
    """What stands on a plain console, numbers replaced by N."""
    return re.sub(r"\d+\.\d+(e[-+]\d+)?", "N", console.file.getvalue()).splitlines()


def wait_for(test, seconds=10.0):
    """Wait until another thread has done something."""
    end = time.monotonic() + seconds
    while not test() and time.monotonic() < end:
        time.sleep(0.005)
    return test()


def drawing_threads():
    return [thread for thread in threading.enumerate() if thread.name == "loopline-progress"]


def test_nothing_is_bound_to_a_batch_or_a_step():
    run = Run(callbacks=[ProgressBar()])
    assert [event.name for event in run.plan.bindings] == [
        "setup",
        "train_start",
        "epoch_start",
        "eval_start",
        "eval_end",
        "epoch_end",
        "train_end",
        "teardown",
    ]


def test_away_from_a_terminal_each_epoch_leaves_one_line():
    console = plain()
    fit(console)
    assert said(console) == [
        "epoch 1/2  train/loss N  val/loss N  val/accuracy N  N s",
        "epoch 2/2  train/loss N  val/loss N  val/accuracy N  N s",
        "completed after 2 epochs, 10 steps, N s",
    ]


def test_metrics_of_an_evaluation_that_an_epoch_did_not_have_are_left_out():
    console = plain()
    fit(console, epochs=3, evaluate=Every(epochs=2))
    assert said(console)[:3] == [
        "epoch 1/3  train/loss N  N s",
        "epoch 2/3  train/loss N  val/loss N  val/accuracy N  N s",
        "epoch 3/3  train/loss N  N s",
    ]


def test_an_epoch_that_the_run_ends_in_is_told_of_too():
    console = plain()
    bar = ProgressBar(console=console)
    Trainer(TinyTask(), callbacks=[bar]).fit(tiny_loader(), steps=6)
    assert said(console) == [
        "epoch 1  train/loss N  N s",
        "epoch 2 in part  train/loss N  N s",
        "completed after 1 epoch, 6 steps, N s",
    ]


def test_the_last_line_says_why_a_run_was_stopped():
    console = plain()

    @on(at.EPOCH_END)
    def enough(run):
        run.stop("enough is enough")

    fit(console, enough)
    assert said(console)[-1] == "stopped after 1 epoch, 5 steps, N s: enough is enough"


def test_a_long_epoch_says_meanwhile_where_it_is():
    console = plain()

    @on(at.BATCH_END)
    def wait(run):
        if run.batch.index == 2:
            assert wait_for(lambda: "elapsed" in console.file.getvalue())

    fit(console, wait, epochs=1, validation=False, every_s=0.02)
    assert re.fullmatch(r"epoch 1/1  batch \d/5  step \d.*  0:0\d elapsed.*", said(console)[0])


def test_a_reader_that_has_gone_does_not_end_the_run_and_is_not_complained_about(caplog):
    assert (fit(plain(Gone())).status, caplog.records) == ("completed", [])


def test_an_evaluation_by_itself_leaves_one_line():
    console = plain()
    Trainer(TinyTask(), callbacks=[ProgressBar(console=console)]).validate(tiny_loader())
    assert said(console) == ["val/loss N  val/accuracy N  N s"]


def test_on_a_terminal_finished_epochs_stand_in_a_table():
    console = terminal()
    fit(console)
    rows = re.findall(r"(?:epoch  train/loss.*| +[12]/2 .* \d\.\d s)\n", console.file.getvalue())
    assert [re.sub(r"\d\.\d+", "N", row).split() for row in rows] == [
        ["epoch", "train/loss", "val/loss", "val/accuracy", "time"],
        ["1/2", "N", "N", "N", "N", "s"],
        ["2/2", "N", "N", "N", "N", "s"],
    ]


def test_on_a_narrow_terminal_no_line_is_too_long():
    console = terminal(width=44)

    @on(at.BATCH_END)
    def wait(run):
        assert wait_for(lambda: f"step {run.progress.steps}" in console.file.getvalue())

    fit(console, wait)
    shown = re.sub(r"\x1b\[[\d;?]*\w", "", console.file.getvalue())
    assert max(len(line) for part in shown.split("\n") for line in part.split("\r")) <= 44


def test_the_frame_shows_the_epoch_its_batches_and_the_latest_metrics():
    console = terminal()

    @on(at.BATCH_END)
    def wait(run):
        if run.batch.index == 3 and run.epoch == 1:
            assert wait_for(
                lambda: re.search(r"epoch 2/2  ━+╸?─+  3/5 .*\n +step 8  train  loss \d", console.file.getvalue())
            )
            assert wait_for(lambda: re.search(r"val    loss \d", console.file.getvalue()))

    assert fit(console, wait).status == "completed"


def test_a_pass_of_unknown_length_has_a_bar_without_an_end():
    console = terminal()
    batches = list(tiny_loader())

    class Stream:
        def __iter__(self):
            return iter(batches)

    @on(at.BATCH_END)
    def wait(run):
        if run.batch.index == 3:
            assert wait_for(lambda: re.search(r"epoch 1/1  ─*━+─*  3 ", console.file.getvalue()))

    bar = ProgressBar(0.02, console=console)
    assert Trainer(TinyTask(), callbacks=[bar, wait]).fit(Stream(), epochs=1).status == "completed"


def test_an_evaluation_under_way_has_a_bar_of_its_own():
    console = terminal()

    @on(at.EVAL_BATCH_END)
    def wait(run):
        if run.stage == "val" and run.batch.index == 2:
            assert wait_for(lambda: re.search(r"val    ━+╸?─+  2/5", console.file.getvalue()))

    assert fit(console, wait, epochs=1).status == "completed"


@pytest.mark.parametrize("error", [None, ValueError("bad"), KeyboardInterrupt()], ids=["end", "error", "interrupt"])
def test_the_terminal_is_given_back_however_a_run_ends(error):
    console = terminal()

    @on(at.STEP_END, every=3)
    def end(run):
        if error is not None:
            raise error

    if error is None:
        fit(console, end)
    else:
        with pytest.raises(type(error)):
            fit(console, end)
    shown = console.file.getvalue()
    assert (shown.count(HIDE_CURSOR), shown.count(SHOW_CURSOR), drawing_threads()) == (1, 1, [])


def test_what_is_printed_meanwhile_stands_in_whole_lines_above_the_bar(monkeypatch):
    real = Terminal()
    monkeypatch.setattr(sys, "stdout", real)

    @on(at.EPOCH_END)
    def talk(run):
        sys.stdout.write("half of ")
        sys.stdout.write("a line\n")

    fit(terminal(real), talk, epochs=1)
    assert ("half of a line\n" in real.getvalue(), sys.stdout is real) == (True, True)


def test_a_line_without_its_end_is_not_lost(monkeypatch):
    real = Terminal()
    monkeypatch.setattr(sys, "stdout", real)

    @on(at.EPOCH_END)
    def talk(run):
        sys.stdout.write("no end")

    fit(terminal(real), talk, epochs=1)
    assert "no end\n" in real.getvalue()


def test_a_stream_that_goes_to_a_file_is_left_alone(monkeypatch):
    to_file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", to_file)
    monkeypatch.setattr(sys, "stdout", Terminal())

    @on(at.EPOCH_END)
    def talk(run):
        sys.stderr.write("to the file\n")

    fit(terminal(), talk, epochs=1)
    assert to_file.getvalue() == "to the file\n"


def test_log_messages_go_above_the_bar_and_their_handler_is_given_back(monkeypatch):
    real = Terminal()
    monkeypatch.setattr(sys, "stderr", real)
    handler = logging.StreamHandler(real)
    logger = logging.getLogger("loopline.tests.bar")
    logger.addHandler(handler)
    streams = []

    @on(at.EPOCH_END)
    def talk(run):
        streams.append(handler.stream is sys.stderr is not real)

    try:
        fit(terminal(real), talk, epochs=1)
    finally:
        logger.removeHandler(handler)
    assert (streams, handler.stream is real) == ([True], True)


def test_a_forked_process_writes_to_the_stream_itself(monkeypatch):
    real = Terminal()
    monkeypatch.setattr(sys, "stdout", real)

    @on(at.EPOCH_END)
    def talk(run):
        with monkeypatch.context() as forked:
            forked.setattr(os, "getpid", lambda: -1)
            sys.stdout.write("from a worker")
        assert real.getvalue().endswith("from a worker")

    assert fit(terminal(real), talk, epochs=1, refresh_s=60).status == "completed"


def test_where_another_display_is_live_there_are_plain_lines_and_one_warning(caplog):
    class Taken(Console):
        def set_live(self, live):
            raise LiveError("Only one live display may be active at once")

    console = Taken(file=Terminal(), force_terminal=True)
    fit(console)
    assert ([record.levelname for record in caplog.records], said(console)[-1]) == (
        ["WARNING"],
        "completed after 2 epochs, 10 steps, N s",
    )


def test_a_run_inside_another_live_display_of_the_same_console_goes_on(monkeypatch):
    real = Terminal()
    monkeypatch.setattr(sys, "stdout", real)
    console = Console(force_terminal=True, width=100, height=30)  # writes to whatever sys.stdout is
    with Live("outer", console=console, auto_refresh=False):
        run = fit(console)
    assert (run.status, sys.stdout is real, "completed after 2 epochs" in real.getvalue()) == ("completed", True, True)


def test_a_terminal_that_cannot_be_drawn_on_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    console = terminal()
    fit(console)
    assert said(console)[0] == "epoch 1/2  train/loss N  val/loss N  val/accuracy N  N s"


def test_only_rank_zero_shows_anything():
    console = plain()
    run = Run(model=torch.nn.Linear(1, 1), callbacks=[ProgressBar(console=console)], comm=FakeComm(1, 2))
    with loop.fit(run):
        for _ in loop.epochs(run, 1):
            for _ in loop.batches(run, [1]):
                run.log({"loss": 1.0})
    assert console.file.getvalue() == ""


def test_a_metric_that_computes_itself_is_not_asked_from_another_thread():
    class Own:
        def compute(self):
            return 1.0

    run = Run()
    with loop.opened(run):
        run.metrics["val/own"] = Own()
        run.metrics["val/loss"] = 2.0
        read = readable(run, elsewhere=True), readable(run)
    assert read == ({"val/loss": 2.0}, {"val/own": 1.0, "val/loss": 2.0})


def test_a_metric_that_computes_itself_is_not_asked_by_one_of_several_ranks():
    class Own:
        def compute(self):
            raise AssertionError("the other ranks will not come")

    run = Run(comm=FakeComm(0, 2))
    with loop.opened(run):
        run.metrics["val/own"] = Own()
        assert readable(run) == {}


def test_a_display_that_fails_says_so_and_the_run_goes_on(caplog):
    console = terminal()
    fails = threading.Event()

    class Failing(io.StringIO):
        def write(self, text):
            if fails.is_set() and threading.current_thread().name == "loopline-progress":
                raise OSError(5, "Input/output error")
            return super().write(text)

    console.file = Failing()

    @on(at.EPOCH_END)
    def fail(run):
        fails.set()
        assert wait_for(lambda: not drawing_threads())

    status = fit(console, fail, epochs=1).status
    assert (status, [record.getMessage() for record in caplog.records]) == (
        "completed",
        ["ProgressBar stops drawing: OSError: [Errno 5] Input/output error"],
    )


@pytest.mark.parametrize("given", [{"refresh_s": 0}, {"every_s": -1.0}, {"refresh_s": "fast"}])
def test_times_that_make_no_sense_are_refused(given):
    with pytest.raises(ValueError, match="give a number of seconds above 0"):
        ProgressBar(**given)
