"""The best weights of a run, as one file that anything can load."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.weights import apart, write_weights
from ..core import event as at
from ..core.callback import Callback, on
from ..core.errors import LooplineError
from ..core.run import Run
from ..metrics import Watched
from ..strategies import plain_name
from ._watching import Mode, check_mode, from_scratch, improves

__all__ = ["SaveBest"]

logger = logging.getLogger("loopline")


class SaveBest(Callback):
    """Keeps the model's weights of the best epoch in `best.safetensors`, and of the last in `last.safetensors`.

    Written when an epoch ends in which the metric has a new value (`last` in every epoch), whole or not at all: a
    crash leaves the file that was there. The file's metadata say `metric`, `value`, `epoch` and `step`, the latter two
    as indices. It holds the tensors of the model's `state_dict()`, under the names that the model has without
    `torch.compile`; tied weights are written once under each name, so that `load_state_dict(load_file(path))` works.
    These are weights to use; to go on training take a checkpoint.

    A value that is NaN or infinite is never the best, and neither is a model with such weights. With `restore=True`
    training ends with the best weights in the model; the optimizer keeps its state of the last step.

    `best_value` and `best_epoch` are None until something has been saved as best.

    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from safetensors.torch import load_file
    >>> from loopline import Run, loop
    >>> model = torch.nn.Linear(1, 1)
    >>> folder = Path(tempfile.mkdtemp())
    >>> best = SaveBest(folder, "val/accuracy", mode="max")
    >>> run = Run(model=model, callbacks=[best])
    >>> with loop.fit(run):
    ...     for epoch in loop.epochs(run, 3):
    ...         _ = torch.nn.init.constant_(model.weight, epoch)
    ...         for _ in loop.evaluate(run, [epoch]):
    ...             run.log({"accuracy": [0.5, 0.9, 0.8][epoch]})
    >>> best.best_value, best.best_epoch, load_file(folder / "best.safetensors")["weight"].item()
    (0.9, 1, 1.0)
    """

    ranks = "zero"

    def __init__(
        self,
        folder: str | os.PathLike[str],
        metric: str = "val/loss",
        *,
        mode: Mode = "min",
        last: bool = True,
        restore: bool = False,
    ) -> None:
        self._watched = Watched(metric)
        check_mode(self, mode)
        self.folder = Path(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise NotADirectoryError(f"SaveBest({str(folder)!r}): this is a file; give a folder to write into.")
        self.metric = metric
        self.mode: Mode = mode
        self.last = last
        self.restore = restore
        self.reads = frozenset({f"metrics/{metric}", "weights"})
        self.best_value: float | None = None
        self.best_epoch: int | None = None

    @on(at.SETUP, ranks="all", reads=())
    def on_setup(self, run: Run) -> None:
        """Refuse at once what could not be written at the end of the first epoch."""
        if run.strategy is not None and run.strategy.traits.shards_parameters:
            raise LooplineError(
                "SaveBest writes from one process, and this run's strategy spreads the weights over all of them. "
                "Keep the best checkpoint instead, and export its weights."
            )

    def on_train_start(self, run: Run) -> None:
        """Forget an earlier run, unless this one goes on from it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._watched = Watched(self.metric)
        if from_scratch(run):
            self.best_value, self.best_epoch = None, None

    def on_eval_end(self, run: Run) -> None:
        """Keep the weights if an evaluation, perhaps in the middle of an epoch, found them the best."""
        self._keep(run, self._watched.measured(run), last=False)

    def on_epoch_end(self, run: Run) -> None:
        """Write what this epoch has earned."""
        self._keep(run, self._watched.new(run), last=self.last)

    def _keep(self, run: Run, value: float | None, *, last: bool) -> None:
        better = value is not None and improves(value, self.best_value, mode=self.mode)
        if not better and not last:
            return
        weights = _plain(run)
        if better and not _finite(weights.values()):
            logger.warning(
                "%s is %s in epoch %d, the best so far, but the model's weights are not finite: not saved as best.",
                self.metric,
                value,
                run.epoch,
            )
            better = False
        about = {"metric": self.metric, "epoch": str(run.epoch), "step": str(run.step), "format": "pt"}
        if value is not None:
            about["value"] = repr(value)
        if better:
            write_weights(self.folder / "best.safetensors", weights, about)
            self.best_value, self.best_epoch = value, run.epoch
        if last:
            write_weights(self.folder / "last.safetensors", weights, about)

    @on(at.TRAIN_END, ranks="all", reads=(), writes={"weights"})
    def on_train_end(self, run: Run) -> None:
        """Give the best weights back to the model, on every rank, if that was asked for."""
        if run.status == "completed":
            self._watched.must_have_come(run)
        if not self.restore:
            return
        # only rank zero knows what was saved, and perhaps only it has the folder
        best = run.comm.broadcast(self._read() if run.comm.rank == 0 else None)
        if best is not None:
            _load(run, best)

    @property
    def state_key(self) -> str:
        """One for each metric."""
        return f"SaveBest({self.metric})"

    def state_dict(self) -> dict[str, Any]:
        """Which epoch is in the file; the file itself stays in the folder."""
        return {} if self.best_value is None else {"best_value": self.best_value, "best_epoch": self.best_epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on comparing with that value."""
        self.best_value, self.best_epoch = state.get("best_value"), state.get("best_epoch")

    def _read(self) -> dict[str, Tensor] | None:
        if self.best_value is None:
            return None
        path = self.folder / "best.safetensors"
        if not path.exists():
            raise LooplineError(
                f"SaveBest(restore=True): {path} is gone; it held the weights of epoch {self.best_epoch}, with "
                f"{self.metric} {self.best_value:.4g}. The model keeps its last weights."
            )
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a dict


def _model(run: Run) -> Any:
    """The model as its author knows it: a strategy may have wrapped the one that runs."""
    return getattr(run.task, "model", run.model)


def _plain(run: Run) -> dict[str, Tensor]:
    """The model's tensors on the cpu, none of which shares memory with another."""
    state = _model(run).state_dict()
    # what a module keeps beside its tensors has no place in this format
    return apart({plain_name(key): value for key, value in state.items() if isinstance(value, Tensor)})


def _load(run: Run, weights: Mapping[str, Tensor]) -> None:
    model = _model(run)
    state = model.state_dict()
    model.load_state_dict({k: weights[plain_name(k)] if isinstance(v, Tensor) else v for k, v in state.items()})


def _finite(tensors: Any) -> bool:
    floating = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    # isfinite does not know the 8-bit formats
    return all(bool(torch.isfinite(t.float() if t.dtype.itemsize == 1 else t).all()) for t in floating)
