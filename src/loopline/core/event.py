"""Every place in a run where listeners may act, in the order in which a run passes them.

This file is the reference: what is not here is not an event of loopline's. A user's own event is one line,
`GENERATOR_STEP = Event("generator_step")`, and is sent with `run.emit(GENERATOR_STEP)`.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Event", "SEAMS"]  # and the seams below, by name


@dataclass(frozen=True, eq=False, slots=True)
class Event:
    """A place in a run where listeners may act. Two events are the same only if they are one object."""

    name: str
    doc: str = ""

    def __repr__(self) -> str:
        return f"<event {self.name}>"


SEAMS: dict[str, Event] = {}


def _seam(name: str, doc: str) -> Event:
    event = SEAMS[name] = Event(name, doc)
    return event


SETUP = _seam("setup", "The parts are in place; nothing has run. Whoever hears this also hears TEARDOWN.")
FIT_START = _seam("fit_start", "A fit begins.")
RESUMED = _seam("resumed", "The run goes on where an earlier one stopped; the counters already say where.")
SANITY_START = _seam("sanity_start", "A few validation batches are tried before training.")
SANITY_END = _seam("sanity_end", "The sanity batches went through; their metrics are forgotten.")
TRAIN_START = _seam("train_start", "Training begins.")
EPOCH_START = _seam("epoch_start", "An epoch begins; not repeated when a run resumes inside one.")
FETCH_START = _seam("fetch_start", "The training loader is about to be asked for a batch.")
FETCH_END = _seam("fetch_end", "The training loader has answered, with a batch or with its end.")
STEP_START = _seam("step_start", "A window of one or more batches begins.")
BATCH_START = _seam("batch_start", "A batch is in hand.")
BEFORE_ZERO_GRAD = _seam("before_zero_grad", "The last window's gradients are about to be cleared.")
LOSS_READY = _seam("loss_ready", "The forward pass is done and the loss is known.")
BEFORE_BACKWARD = _seam("before_backward", "The gradients of this batch are about to be computed.")
AFTER_BACKWARD = _seam("after_backward", "This batch's gradients are added; the window may be unfinished.")
BEFORE_OPTIMIZER_STEP = _seam(
    "before_optimizer_step", "The window's gradients are complete and unscaled; they may be edited."
)
AFTER_OPTIMIZER_STEP = _seam("after_optimizer_step", "The weights have changed; schedulers follow.")
BATCH_END = _seam("batch_end", "A batch is done.")
STEP_END = _seam("step_end", "A window is done; a safe point follows.")
PASS_END = _seam("pass_end", "The training batches of an epoch are done; evaluation follows.")
EVAL_START = _seam("eval_start", "An evaluation begins; `run.stage` says of what kind.")
EVAL_EPOCH_START = _seam("eval_epoch_start", "The pass over the evaluation loader begins.")
EVAL_BATCH_START = _seam("eval_batch_start", "An evaluation batch is in hand.")
EVAL_BATCH_END = _seam("eval_batch_end", "An evaluation batch is done; its outputs can be read.")
EVAL_EPOCH_END = _seam("eval_epoch_end", "The pass over the evaluation loader is done.")
EVAL_END = _seam("eval_end", "An evaluation is done and its metrics are final.")
EPOCH_END = _seam("epoch_end", "An epoch is done, its evaluation included; a safe point follows.")
SAVING = _seam("saving", "A checkpoint is about to be taken.")
LOADED = _seam("loaded", "A checkpoint has been loaded into the parts.")
METRICS = _seam("metrics", "`run.record` is about to go to the sinks; its metrics may be edited.")
STOPPED = _seam("stopped", "The run ends before its limits; `run.reason` says why.")
TRAIN_END = _seam("train_end", "Training is over.")
FIT_END = _seam("fit_end", "The fit ended in good order.")
EXCEPTION = _seam("exception", "An error is leaving the run; `run.error` holds it.")
TEARDOWN = _seam("teardown", "The run is over, however it ended; release what SETUP took.")
