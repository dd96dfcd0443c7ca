"""Seams: identity, documentation, order; and events of the user's own."""

import ast
from pathlib import Path

import pytest

import loopline.core.event as event_module
from loopline import Callback, Event, Run, at, on
from loopline.core.event import SEAMS

LOOP_ORDER = [
    "setup",
    "fit_start",
    "resumed",
    "sanity_start",
    "sanity_end",
    "train_start",
    "epoch_start",
    "fetch_start",
    "fetch_end",
    "step_start",
    "batch_start",
    "before_zero_grad",
    "loss_ready",
    "before_backward",
    "after_backward",
    "before_optimizer_step",
    "after_optimizer_step",
    "batch_end",
    "step_end",
    "pass_end",
    "eval_start",
    "eval_epoch_start",
    "eval_batch_start",
    "eval_batch_end",
    "eval_epoch_end",
    "eval_end",
    "epoch_end",
    "saving",
    "loaded",
    "metrics",
    "stopped",
    "train_end",
    "fit_end",
    "exception",
    "teardown",
]


def test_two_events_of_one_name_are_two_events():
    assert (Event("round") == Event("round"), at.SETUP == at.SETUP) == (False, True)


def test_an_event_can_be_a_key_and_cannot_be_changed():
    table = {at.SETUP: 1}
    with pytest.raises(AttributeError):
        at.SETUP.name = "other"  # type: ignore[misc]
    assert table[at.SETUP] == 1


def test_an_event_shows_its_name():
    assert repr(at.STEP_END) == "<event step_end>"


@pytest.mark.parametrize("seam", SEAMS.values(), ids=SEAMS)
def test_every_seam_has_a_sentence_that_says_when_it_is(seam):
    assert seam.doc[0] in "`ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    assert seam.doc.endswith(".")
    assert len(seam.doc.split()) >= 2


def test_no_two_seams_share_a_sentence():
    assert len({seam.doc for seam in SEAMS.values()}) == len(SEAMS)


def test_the_seams_stand_in_loop_order():
    assert list(SEAMS) == LOOP_ORDER


def test_the_file_names_the_seams_in_the_order_of_the_table_and_once_each():
    tree = ast.parse(Path(event_module.__file__).read_text(encoding="utf-8"))
    written = [
        (target.id, node.value.args[0].value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "_seam"
        for target in node.targets
    ]
    assert written == [(name.upper(), name) for name in SEAMS]


def test_a_seam_is_found_in_the_module_under_its_name():
    assert {name: getattr(at, name.upper()) for name in SEAMS} == SEAMS


def test_an_own_event_brings_its_payload_by_keyword():
    heard = []
    own = Event("generator_step")

    @on(own)
    def listen(run, loss=None):
        heard.append(loss)

    Run(callbacks=[listen]).emit(own, loss=0.5)
    assert heard == [0.5]


def test_a_handler_of_an_own_event_may_insist_on_its_payload():
    heard = []
    own = Event("generator_step")

    @on(own)
    def listen(run, *, loss):
        heard.append(loss)

    Run(callbacks=[listen]).emit(own, loss=0.5)
    assert heard == [0.5]


def test_a_method_marked_with_an_own_event_may_insist_on_its_payload():
    own = Event("generator_step")

    class Listens(Callback):
        heard = 0.0

        @on(own)
        def listen(self, run, *, loss):
            self.heard = loss

    listens = Listens()
    Run(callbacks=[listens]).emit(own, loss=0.5)
    assert listens.heard == 0.5


def test_an_own_event_without_payload_is_called_like_a_seam():
    heard = []
    own = Event("round_end")
    run = Run(callbacks=[_listener(own, heard)])
    run.emit(own)
    assert heard == [run]


def test_an_own_event_that_nobody_hears_is_nothing():
    run = Run()
    own = Event("generator_step")
    before = dict(run.plan)
    assert (run.emit(own, loss=1), run.heard(own), dict(run.plan) == before) == (None, False, True)


def test_an_own_event_with_the_name_of_a_seam_is_not_that_seam():
    heard = []
    own = Event("step_end")
    run = Run(callbacks=[_listener(own, heard)])
    run.emit(at.STEP_END)
    assert heard == []


def test_an_own_event_with_the_name_of_a_seam_is_counted_by_its_calls():
    heard = []
    own = Event("step_end")

    @on(own, every=2)
    def second(run):
        heard.append(run.scratch["calls"])

    run = Run(callbacks=[second])
    for run.scratch["calls"] in range(4):
        run.emit(own)
    assert heard == [1, 3]


def _listener(event, heard):
    @on(event)
    def listen(run):
        heard.append(run)

    return listen
