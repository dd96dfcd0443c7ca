"""A13: whatever is raised, at whichever event, by whichever of three callbacks, of either kind: everything is closed.

For every event, and for each kind of exception, three callbacks are tried as the one that raises, as a callback and as
an observer. Whoever was set up is torn down, once and backwards; the bar lets go of the screen; what was raised comes
out as it is.
"""

from __future__ import annotations

import io
import logging
import threading
import traceback
from itertools import product

import pytest
import torch
from rich.console import Console

from loopline import Binding, Callback, Event, Progress, Run, StopRun, Trainer, at, loop
from loopline.callbacks import ProgressBar
from loopline.core.event import SEAMS
from loopline.testing import TinyTask, tiny_loader

POSITIONS = ("first", "middle", "last")
KINDS = ("raise", "disable")
WAYS = (RuntimeError, KeyboardInterrupt, SystemExit, StopRun)
SHOWN, HIDDEN = "\x1b[?25h", "\x1b[?25l"  # what a terminal does with its cursor while something is drawn on it


class Log(Callback):
    """Writes down its own setup and teardown; may raise something the first time that an event comes."""

    def __init__(self, name, log, event=None, error=None, kind="raise"):
        self.name, self.log, self.event, self.error = name, log, event, error
        self.on_error = kind
        self.raised = False

    def bindings(self, run):
        yield from super().bindings(run)
        if self.event is not None:
            yield Binding(self.event, self.come, owner=self, on_error=self.on_error)

    def on_setup(self, run):
        self.log.append(("setup", self.name))

    def on_teardown(self, run):
        self.log.append(("teardown", self.name))

    def come(self, run):
        if not self.raised:
            self.raised = True
            raise_here(self.error)


def raise_here(error):
    raise error


class Sender(Callback):
    """Sends what a plain fit does not: a save, a load, a record for the sinks; fails or stops where that is wanted."""

    def __init__(self, event):
        self.fails, self.stops = event is at.EXCEPTION, event is at.STOPPED

    def on_setup(self, run):
        run.saver = lambda run, reason: run.emit(at.SAVING)

    def on_train_start(self, run):
        run.emit(at.LOADED)

    def on_step_end(self, run):
        run.save()
        run.emit(at.METRICS)
        if self.stops:
            run.stop("to see stopped")

    def on_epoch_end(self, run):
        if self.fails:
            raise ZeroDivisionError("to see exception")


def outcome(event: Event, way, position, kind):
    """How a fit ended in which one callback of three raises at an event."""
    error = way("on purpose") if way is not SystemExit else SystemExit(3)
    log: list[tuple[str, str]] = []
    three = [Log(name, log, *((event, error, kind) if name == position else ())) for name in POSITIONS]
    screen = io.StringIO()
    bar = ProgressBar(console=Console(file=screen, force_terminal=True, width=80))
    callbacks = [bar, Sender(event), *three]
    trainer = Trainer(TinyTask(), callbacks=callbacks, progress=False, sanity=1)
    earlier = Run(progress=Progress(steps=1, batches=1, samples=2, batches_in_epoch=1))
    more = {"resume": earlier} if event is at.RESUMED else {}
    left = None
    try:
        trainer.fit(tiny_loader(2), tiny_loader(1), epochs=1, **more)
    except BaseException as raised:  # noqa: BLE001 - what came out is what is looked at
        left = raised
    assert three[POSITIONS.index(position)].raised, f"the fit did not pass {event.name}"
    found = {
        "set up": [name for what, name in log if what == "setup"],
        "torn down": [name for what, name in log if what == "teardown"],
        "bar": (drawing(), screen.getvalue().count(HIDDEN) - screen.getvalue().count(SHOWN)),
        "out": what_came(left, error),
        "status": trainer.run.status,
    }
    bar.on_teardown(trainer.run)  # where a control has not done it
    return found


def drawing():
    return [thread.name for thread in threading.enumerate() if thread.name == "loopline-progress"]


def what_came(left, error):
    """Nothing, the very error that was raised, from where it was raised, or another one."""
    if left is None:
        return None
    if isinstance(left, BaseExceptionGroup) and left.exceptions == (error,):
        return "a group with it"
    if left is not error:
        return type(left).__name__
    return "itself" if traceback.extract_tb(left.__traceback__)[-1].name == "raise_here" else "without its traceback"


def expected(event, way, position, kind):
    """What the promise says of it."""
    isolated = kind == "disable" and way is RuntimeError
    setups = list(POSITIONS)
    if event is at.SETUP and not isolated:
        setups = setups[: POSITIONS.index(position) + 1]
    out, status = {
        RuntimeError: ("itself", "failed"),
        KeyboardInterrupt: ("itself", "interrupted"),
        SystemExit: ("itself", "interrupted"),
        StopRun: (None, "stopped"),
    }[way]
    if isolated:
        out, status = None, "stopped" if event is at.STOPPED else "completed"
    if event is at.EXCEPTION:
        out, status = "ZeroDivisionError", "failed"
    if event is at.TEARDOWN:
        status = "completed"
        out = "itself" if way in (KeyboardInterrupt, SystemExit) else "a group with it" if kind == "raise" else None
    return {"set up": setups, "torn down": setups[::-1], "bar": ([], 0), "out": out, "status": status}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Several threads take eight times as long for a task so small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("event", SEAMS.values(), ids=SEAMS)
def test_whatever_is_raised_wherever_by_whomever_all_is_closed_and_it_comes_out_as_it_is(event, way, caplog):
    caplog.set_level(logging.CRITICAL, "loopline")
    tried = list(product(POSITIONS, KINDS))
    found = {case: outcome(event, way, *case) for case in tried}
    assert found == {case: expected(event, way, *case) for case in tried}


def forwards(run, event, failure):
    for handler in run.plan[event]:
        try:
            handler(run)
        except Exception:
            logging.getLogger("loopline").exception("hidden")
    return []


def until_the_first_error(run, event, failure):
    for handler in reversed(run.plan[event]):
        handler(run)
    return []


def twice(run, event, failure, *, as_it_is=loop._each_alone):
    as_it_is(run, event, failure)
    return as_it_is(run, event, failure)


@pytest.mark.parametrize("broken", [forwards, until_the_first_error, twice])
def test_the_check_catches_a_way_of_closing_that_is_not_ours(broken, monkeypatch, caplog):
    caplog.set_level(logging.CRITICAL, "loopline")
    monkeypatch.setattr(loop, "_each_alone", broken)
    case = (at.TEARDOWN, RuntimeError, "middle", "raise")
    found, promised = outcome(*case), expected(*case)
    assert found["torn down"] != promised["torn down"]
