"""Keeping numbers that are not finite out of the weights."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from ..core.callback import Callback
from ..core.errors import NotFinite, StopRun
from ..core.run import Run
from ._gradients import names, norms, with_gradients
from ._watching import from_scratch

__all__ = ["NaNGuard"]

logger = logging.getLogger("loopline")

_Action: TypeAlias = Literal["raise", "stop", "skip"]
_Checked: TypeAlias = Literal["loss", "gradients"]

_ADVICE = (
    "The weights are as they were before this step. Usual causes: a learning rate that is too high, a logarithm or a "
    "division of 0, a NaN in the data; torch.autograd.set_detect_anomaly(True) names the operation."
)
_NAMED = 5


class NaNGuard(Callback):
    """Looks for NaN and infinity in the loss and the gradients before they can reach the weights.

    What it does on finding one:

    - "raise": the run fails with NotFinite, which names what was found, where, and in which parameters;
    - "stop": the run ends as stopped;
    - "skip": the step is left out; once more than `max_skips` steps in a row would have to be, NotFinite.

    Weights and optimizer state stay finite in all three. Buffers that the forward pass itself writes, such as the
    running means of batch norm, are beyond its reach. Under a gradient scaler, gradients that overflow are the
    scaler's to handle, and only the loss is looked at.

    It looks at gradients before anybody edits them, since clipping spreads one NaN over all of them. On the cpu
    looking is free. On another device it waits for the device once per step, loss and gradients together, because the
    step cannot be held back any later; on several ranks it also takes one exchange, so that all do the same.

    >>> import torch
    >>> from loopline import Run, loop
    >>> model = torch.nn.Linear(1, 1)
    >>> guard = NaNGuard("skip")
    >>> run = Run(model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)], callbacks=[guard])
    >>> with loop.fit(run):
    ...     for _ in loop.epochs(run, 1):
    ...         for x in loop.batches(run, [torch.ones(2, 1), torch.full((2, 1), torch.nan), torch.ones(2, 1)]):
    ...             loop.backward(run, model(x).mean())
    ...             changed = loop.optimizer_step(run)
    >>> guard.skipped, bool(model.weight.isfinite())
    (1, True)
    """

    order = -100
    reads = frozenset({"loss"})  # and not "grads": a reader would come after those who clip

    def __init__(
        self, action: _Action = "raise", *, max_skips: int = 10, check: Collection[_Checked] = ("loss", "gradients")
    ) -> None:
        if action not in get_args(_Action):
            raise ValueError(f"NaNGuard({action!r}): the action is one of 'raise', 'stop' and 'skip'.")
        if not isinstance(max_skips, int) or isinstance(max_skips, bool) or max_skips < 1:
            raise ValueError(
                f"NaNGuard(max_skips={max_skips!r}): give how many steps in a row may be skipped, 1 or more. To skip "
                "none, take the action 'raise'."
            )
        checked = {check} if isinstance(check, str) else set(check)
        if not checked or not checked <= set(get_args(_Checked)):
            raise ValueError(f"NaNGuard(check={check!r}): check 'loss', 'gradients', or both.")
        self.action: _Action = action
        self.max_skips = max_skips
        self.check = frozenset(checked)
        self._held: list[Tensor] = []
        self._held_in = 0
        self.skipped = 0
        self.in_a_row = 0
        self._last = -2  # the step that was skipped last

    def on_train_start(self, run: Run) -> None:
        """Forget an earlier run's skips, unless this one goes on from it."""
        self._held.clear()
        if from_scratch(run):
            self.skipped, self.in_a_row, self._last = 0, 0, -2

    def on_loss_ready(self, run: Run) -> None:
        """Look at the loss here if that is free; otherwise it is looked at together with the gradients."""
        loss = run.batch.loss
        if "loss" not in self.check or not isinstance(loss, Tensor) or loss.numel() != 1:
            return
        if loss.device.type != "cpu" or run.comm.world_size > 1:
            if run.step != self._held_in:
                self._held.clear()  # the last window may have ended without an optimizer step
                self._held_in = run.step
            self._held.append(loss.detach().reshape(1))
        elif not math.isfinite(value := loss.item()):
            self._act(run, f"The loss is {value}")

    def on_before_optimizer_step(self, run: Run) -> None:
        """Look at everything that has not been looked at in this window."""
        found = self._look(run) if run.skipped is None else None
        self._held.clear()
        if run.comm.world_size > 1 and run.comm.any(found is not None)[0]:
            found = found or "Another rank's loss or gradients are not finite"
        if found is not None:
            self._act(run, found)

    @property
    def state_key(self) -> str:
        """One for each set of things checked."""
        return f"NaNGuard({', '.join(sorted(self.check))})"

    def state_dict(self) -> dict[str, Any]:
        """How many steps were skipped, and where the last row of them ended."""
        return {"skipped": self.skipped, "in_a_row": self.in_a_row, "last": self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from there."""
        self.skipped, self.in_a_row, self._last = state["skipped"], state["in_a_row"], state["last"]

    def _look(self, run: Run) -> str | None:
        looking_at = list(self._held)
        changing: list[Tensor] = []
        if "gradients" in self.check and run.scaler is None:
            changing, gradients = with_gradients(run)
            if gradients:
                looking_at.append(norms(gradients, math.inf))
        # one read, and for the finite no further one
        if not looking_at or bool(torch.cat([t.to(looking_at[-1].device) for t in looking_at]).isfinite().all()):
            return None
        for loss in self._held:
            if not math.isfinite(value := loss.item()):
                return f"The loss is {value}"
        return _said(names(run, changing), looking_at[-1].tolist())

    def _act(self, run: Run, found: str) -> None:
        where = f"{found} in epoch {run.epoch}, step {run.step}."
        match self.action:
            case "raise":
                raise NotFinite(f"{where} {_ADVICE}")
            case "stop":
                raise StopRun(where.rstrip("."))
            case "skip":
                self._skip(run, where)

    def _skip(self, run: Run, where: str) -> None:
        if run.step != self._last:
            self.in_a_row = self.in_a_row + 1 if run.step == self._last + 1 else 1
            self._last = run.step
            if self.in_a_row > self.max_skips:
                raise NotFinite(f"{where} The {self.max_skips} steps before it were skipped for the like. {_ADVICE}")
            self.skipped += 1
            logger.warning("%s The step is skipped.", where)
        run.skip_step(where.rstrip("."))


def _said(named: list[str], largest: list[float]) -> str:
    bad = [f"{name} ({value})" for name, value in zip(named, largest, strict=True) if not math.isfinite(value)]
    more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
    return f"The gradients of {len(bad)} of {len(named)} parameters are not finite, {', '.join(bad[:_NAMED])}{more},"
