"""Running means that stay on the device: nothing here reads a tensor's value before somebody asks for it."""

from __future__ import annotations

import math
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from .core.errors import BadStep, MissingMetric

if TYPE_CHECKING:
    from .core.run import Run

__all__ = ["Mean", "Metrics", "Watched", "missing", "numbers", "ratio"]

FOLD = 64


class Mean:
    """A weighted mean of scalars.

    Values wait in a list and are added up 64 at a time, so that a step costs an append. Reading changes nothing, and
    may happen on another thread.
    """

    __slots__ = ("_state",)

    def __init__(self) -> None:
        # one tuple, so that a reader on another thread never sees half of a fold
        self._state: tuple[Any, Any, list[tuple[Any, Any]]] = (0.0, 0.0, [])

    def add(self, value: Any, weight: Any = 1) -> None:
        total, weights, waiting = self._state
        waiting.append((value, weight))
        if len(waiting) >= FOLD:
            self._state = (*_fold(total, weights, waiting), [])

    def sums(self) -> tuple[Any, Any]:
        """The weighted sum and the weight, as they stand."""
        total, weights, waiting = self._state
        return _fold(total, weights, tuple(waiting)) if waiting else (total, weights)

    def compute(self) -> Any:
        """The mean: a tensor where tensors were given."""
        return ratio(*self.sums())

    def state_dict(self) -> dict[str, Any]:
        total, weights, waiting = self._state
        return {"total": total, "weights": weights, "waiting": [list(pair) for pair in waiting]}

    def load_state_dict(self, state: Any) -> None:
        self._state = (state["total"], state["weights"], [(v, w) for v, w in state["waiting"]])


class Metrics(MutableMapping[str, Any]):
    """The latest value of every metric, by name. Reading one makes it a number; until then it costs nothing.

    An object with `compute` (a torchmetrics metric, say) may stand in a mean's place: it is asked when it is read.
    """

    def __init__(self, values: Any = ()) -> None:
        self._entries: dict[str, Any] = dict(values)
        self._stale: set[str] = set()

    def add(self, name: str, value: Any, weight: Any = 1) -> None:
        """Add to the mean of a name; begin a new one if the last one's epoch is over."""
        if isinstance(value, Tensor):
            if value.dim():
                value = _scalar(name, value)
            value = value.detach()
        elif not isinstance(value, int | float):
            if hasattr(value, "compute"):
                self[name] = value
                return
            value = float(value)
        mean = self._entries.get(name)
        if type(mean) is not Mean or name in self._stale:
            mean = self._entries[name] = Mean()
            self._stale.discard(name)
        mean.add(value, weight)

    def begin(self, prefix: str) -> None:
        """Say that a new epoch of a stage begins: its means are kept until the first new value comes."""
        self._stale.update(name for name in self._entries if name.startswith(f"{prefix}/"))

    def forget(self, prefix: str) -> None:
        """Drop every metric of a stage."""
        for name in [name for name in self._entries if name.startswith(f"{prefix}/")]:
            del self[name]

    def finish(self, prefix: str) -> None:
        """Say that a stage's epoch is over: objects with `compute` are asked now, since they will be reset."""
        for name, entry in self._entries.items():
            if name.startswith(f"{prefix}/") and type(entry) is not Mean and hasattr(entry, "compute"):
                self._entries[name] = entry.compute()

    def entry(self, name: str) -> Any:
        """What stands behind a name: a Mean, a number, or an object with `compute`."""
        return self._entries[name]

    def fresh(self, prefix: str) -> list[str]:
        """The names of a stage that have a value of the epoch in progress, or of the one just done."""
        return [n for n in self._entries if n.startswith(f"{prefix}/") and n not in self._stale]

    def read(self, names: Any) -> dict[str, float]:
        """Several metrics as numbers, with one wait for the device where there are several tensors."""
        return numbers({name: self._entries[name] for name in names})

    def __getitem__(self, name: str) -> float:
        if name not in self._entries:
            raise MissingMetric(missing(name, self))
        return next(iter(self.read([name]).values()))

    def __setitem__(self, name: str, value: Any) -> None:
        self._entries[name] = value
        self._stale.discard(name)

    def __delitem__(self, name: str) -> None:
        del self._entries[name]
        self._stale.discard(name)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"Metrics({dict(self)!r})"


class Watched:
    """One metric as those see it who wait for its next value: early stopping, plateaus, the best checkpoint."""

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or "/" not in name:
            raise ValueError(f"{name!r} is not the name of a metric; names have a stage, such as 'val/loss'.")
        self.name = name
        self._last: Any = None

    def new(self, run: Run) -> float | None:
        """The value, if it is a new one; None while none has come since the last call."""
        metrics = cast(Metrics, run.metrics)
        if self.name not in metrics:
            stage = self.name.split("/")[0]
            yet_to_come = stage == "val" and not (run.task is not None and run.evaluator is None)
            if yet_to_come and not metrics.fresh(stage):
                return None
            raise MissingMetric(missing(self.name, metrics))
        entry = metrics.entry(self.name)
        if entry is self._last and not isinstance(entry, int | float):
            return None
        self._last = entry
        return metrics[self.name]

    def must_have_come(self, run: Run) -> None:
        """At the end of training: an error if the metric never had a value."""
        if run.progress.epochs and self.name not in run.metrics:
            raise MissingMetric(missing(self.name, run.metrics))


def numbers(entries: dict[str, Any]) -> dict[str, float]:
    """Numbers for what stands behind names. Tensors of one device are read together."""
    values = {name: value.compute() if hasattr(value, "compute") else value for name, value in entries.items()}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    read: dict[str, float] = {}
    for device in {tensor.device for tensor in tensors.values()}:
        here = {name: tensor for name, tensor in tensors.items() if tensor.device == device}
        together = torch.stack([tensor.detach().reshape(()).to(_wide(device)) for tensor in here.values()])
        read.update(zip(here, together.tolist(), strict=True))
    return {name: read[name] if name in read else float(value) for name, value in values.items()}


def missing(name: str, known: Any) -> str:
    """The sentence for a metric that nobody logged."""
    import difflib

    near = difflib.get_close_matches(name, list(known), n=1)
    guess = f" Did you mean {near[0]!r}?" if near else ""
    names = ", ".join(sorted(known)) or "none yet"
    return f"No metric {name!r} has been logged.{guess} Known: {names}."


def ratio(total: Any, weights: Any) -> Any:
    """A sum over its weight; not a number where nothing was weighed."""
    if isinstance(total, Tensor) or isinstance(weights, Tensor):
        return total / weights
    return total / weights if weights else math.nan


def _fold(total: Any, weights: Any, waiting: Any) -> tuple[Any, Any]:
    values = [value for value, _ in waiting]
    shares = [weight for _, weight in waiting]
    plain = not any(isinstance(share, Tensor) for share in shares)
    if not any(isinstance(value, Tensor) for value in values) and plain:
        return total + math.fsum(v * w for v, w in zip(values, shares, strict=True)), weights + sum(shares)
    device = next(x.device for pair in waiting for x in pair if isinstance(x, Tensor))
    stacked = _stack(values, device)
    if plain and all(share == shares[0] for share in shares):
        return total + stacked.sum() * shares[0], weights + sum(shares)
    weighing = _stack(shares, device)
    return total + (stacked * weighing).sum(), weights + (sum(shares) if plain else weighing.sum())


def _stack(values: list[Any], device: torch.device) -> Tensor:
    """Scalars, plain or tensors, as one wide vector on one device."""
    wide = _wide(device)
    first = values[0]
    if all(isinstance(v, Tensor) and v.dtype == first.dtype and v.device == device for v in values):
        return torch.stack(values).to(wide)
    if not any(isinstance(v, Tensor) for v in values):
        return torch.tensor(values, dtype=wide, device=device)
    return torch.stack([torch.as_tensor(v, dtype=wide, device=device).reshape(()) for v in values])


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # mps has no float64


def _scalar(name: str, value: Tensor) -> Tensor:
    if value.numel() == 1:
        return value.reshape(())
    raise BadStep(
        f"log({name!r}): a metric is one number, and this tensor has the shape {tuple(value.shape)}; "
        "log its mean() or sum()."
    )
