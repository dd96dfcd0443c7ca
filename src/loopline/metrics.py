"""Running means that stay on the device: nothing here reads a tensor's value before somebody asks for it."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from itertools import islice
from numbers import Real
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from .core.errors import BadStep, MissingMetric

if TYPE_CHECKING:
    from .core.run import Run

__all__ = ["Intake", "Mean", "Metrics", "Watched", "missing", "numbers", "ratio"]

_FOLD = 1024
_PLAIN = {int, float, bool}


class Mean:
    """A weighted mean of scalars.

    Values wait in a list and are added up many at a time, so that a step costs an append. Reading changes nothing, and
    may happen on another thread; `fold` is for the thread that adds.
    """

    __slots__ = ("_state",)

    def __init__(self) -> None:
        # one tuple, so that a reader on another thread never sees half of a fold
        self._state: tuple[Any, Any, list[Any], list[Any]] = (0.0, 0.0, [], [])

    def add(self, value: Any, weight: Any = 1) -> None:
        """Add one value: a number, or a tensor of one number."""
        _, _, values, shares = self._state
        shares.append(_number(weight))  # first, so that every value that a reader sees has its weight
        values.append(_number(value))
        if len(values) >= _FOLD:
            self.fold()

    def fold(self) -> None:
        """Add up what waits."""
        if self._state[2]:
            self._state = (*_fold(*self._state), [], [])

    def sums(self) -> tuple[Any, Any]:
        """The weighted sum and the weight, as they stand."""
        total, weights, values, shares = self._state
        values = values[:]
        return _fold(total, weights, values, shares[: len(values)]) if values else (total, weights)

    def compute(self) -> Any:
        """The mean: a tensor where tensors were given."""
        return ratio(*self.sums())

    def __copy__(self) -> Mean:
        twin = Mean()
        twin.load_state_dict(self.state_dict())
        return twin

    def state_dict(self) -> dict[str, Any]:
        """The sums and what waits, so that a resumed mean is the same to the last bit."""
        total, weights, values, shares = self._state
        return {"total": total, "weights": weights, "values": values[:], "shares": shares[:]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` gave."""
        self._state = (state["total"], state["weights"], list(state["values"]), list(state["shares"]))


class Metrics(MutableMapping[str, Any]):
    """The latest value of every metric, by name. Reading one makes it a number; until then it costs nothing.

    An object with `compute` (a torchmetrics metric, say) may stand in a mean's place: it is asked when it is read.
    """

    def __init__(self, values: Any = ()) -> None:
        self._entries: dict[str, Any] = dict(values)
        # of the epochs in progress; a mean that is given goes on
        self._means = {name: entry for name, entry in self._entries.items() if type(entry) is Mean}
        self._stale: set[str] = set()

    def add(self, name: str, value: Any, weight: Any = 1) -> None:
        """Add to the mean of a name; begin a new one if the last one's epoch is over."""
        if not isinstance(value, Tensor) and hasattr(value, "compute"):
            self._stand_in(name, value)
            return
        value, weight = _named(name, value), _named(f"{name}, as weight", weight)
        mean = self._means.get(name)
        if mean is None:
            mean = self._means[name] = self._entries[name] = Mean()
            self._stale.discard(name)
        mean.add(value, weight)

    def _stand_in(self, name: str, computing: Any) -> None:
        entry = self._entries.get(name)
        if name in self._stale or not isinstance(entry, _Computing) or entry.of is not computing:
            self[name] = _Computing(computing)

    def begin(self, prefix: str | None = None) -> None:
        """Say that a new epoch begins, of one stage or of all: its means are kept until the first new value comes."""
        names = list(self._entries) if prefix is None else self._of(prefix)
        self._stale.update(names)
        for name in names:
            self._means.pop(name, None)

    def forget(self, prefix: str) -> None:
        """Drop every metric of a stage."""
        for name in self._of(prefix):
            del self[name]

    def finish(self, prefix: str) -> None:
        """Say that a stage's epoch is over: objects with `compute` are asked now, since they will be reset."""
        for name in self._of(prefix):
            entry = self._entries[name]
            if type(entry) is not Mean and hasattr(entry, "compute"):
                value = self.value(name)
                self._entries[name] = value if isinstance(value, Tensor) else _Known(value)

    def gone_on(self) -> Metrics:
        """A copy for a run that goes on: means in progress go on, and all else waits for a new value."""
        further = Metrics({name: copy.copy(entry) for name, entry in self._entries.items()})
        waiting = [name for name in self._entries if name not in self._means or not name.startswith("train/")]
        for name in waiting:
            further._means.pop(name, None)
        further._stale.update(waiting)
        return further

    def state_dict(self) -> dict[str, Any]:
        """Means as they stand, to the last bit, and the values of all else that is known without asking anybody."""
        means = {name: _packed(entry.state_dict()) for name, entry in self._entries.items() if type(entry) is Mean}
        known = {name: entry for name, entry in self._entries.items() if isinstance(entry, float | Tensor)}
        values = {name: entry if isinstance(entry, Tensor) else float(entry) for name, entry in known.items()}
        return {"means": means, "going_on": [name for name in self._means if name in means], "values": values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` gave, as `gone_on` does: only means of training in progress go on."""
        entries: dict[str, Any] = dict(state["values"])
        for name, packed in state["means"].items():
            entries[name] = Mean()
            entries[name].load_state_dict(_unpacked(packed))
        earlier = Metrics(
            {name: e if hasattr(e, "compute") or isinstance(e, Tensor) else _Known(e) for name, e in entries.items()}
        )
        earlier._means = {name: entries[name] for name in state["going_on"]}
        further = earlier.gone_on()
        self._entries, self._means, self._stale = further._entries, further._means, further._stale

    def is_fresh(self, name: str) -> bool:
        """Whether a metric has a value of the epoch in progress, or of the one just done."""
        return name in self._entries and name not in self._stale

    def entry(self, name: str) -> Any:
        """What stands behind a name: a Mean, a number, or an object with `compute`."""
        return self._entries[name]

    def fresh(self, prefix: str) -> list[str]:
        """The names of a stage that have a value of the epoch in progress, or of the one just done."""
        return [name for name in self._of(prefix) if name not in self._stale]

    def read(self, names: Any) -> dict[str, float]:
        """Several metrics as numbers, with one wait for the device where there are several tensors."""
        return numbers({name: self._entries[name] for name in names})

    def value(self, name: str) -> Any:
        """The latest value as a number or a tensor of one, not read yet; an object that computes is asked."""
        entry = self._entries[name]
        return _named(name, entry.compute() if hasattr(entry, "compute") else entry)

    def settle(self, names: Iterable[str], others: Mapping[str, Any]) -> dict[str, float]:
        """Read what waits in some means, and some other numbers, at once; give the latter.

        From then on the means are plain sums. For the thread that adds, where it may wait for the device.
        """
        means = [self._entries[name] for name in names]
        states = [mean._state for mean in means]
        flat = [value for total, weights, values, shares in states for value in (total, weights, *values, *shares)]
        read = iter(_plain([*flat, *others.values()]))
        for mean, (_, _, values, _) in zip(means, states, strict=True):
            total, weights = next(read), next(read)
            plain, shares = list(islice(read, len(values))), list(islice(read, len(values)))
            mean._state = (total + sum(map(operator.mul, plain, shares)), weights + sum(shares), [], [])
        return dict(zip(others, map(float, read), strict=True))

    def __getitem__(self, name: str) -> float:
        if name not in self._entries:
            raise MissingMetric(missing(name, self))
        return next(iter(self.read([name]).values()))

    def __setitem__(self, name: str, value: Any) -> None:
        self._entries[name] = _Known(value) if isinstance(value, int | float) else value
        self._means.pop(name, None)
        self._stale.discard(name)

    def __delitem__(self, name: str) -> None:
        del self._entries[name]
        self._means.pop(name, None)
        self._stale.discard(name)

    def _of(self, prefix: str) -> list[str]:
        # a list first, in one step: another thread may be adding names
        return [name for name in list(self._entries) if name.startswith(f"{prefix}/")]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"Metrics({dict(self)!r})"


class Intake:
    """Takes into a run's metrics what is one number of what a step returned; what is more is for callbacks to read.

    Which values are numbers is asked once, and again when there are more or fewer of them, or one of them is None.
    """

    __slots__ = ("_names", "_size", "run", "stage")

    def __init__(self, run: Run, stage: str) -> None:
        self.run = run
        self.stage = stage
        self._names: list[tuple[str, str]] = []
        self._size = -1

    def take(self, said: Mapping[str, Any], weight: Any = None) -> None:
        """Add each number to its mean, by the weight given, or else by the batch's size."""
        if len(said) != self._size:
            self._look(said)
        run = self.run
        metrics: Any = run.metrics
        if weight is None:
            weight = run._batch.size  # type: ignore[union-attr]  # run.batch, without a call
        for name, full in self._names:
            value, mean = said[name], metrics._means.get(full)
            if mean is None or type(value) is not Tensor or value.ndim or type(weight) is not int:
                metrics.add(full, value, weight)
                continue
            # as Mean.add does, without its questions: this is passed in every step
            state = mean._state
            state[3].append(weight)
            values = state[2]
            values.append(value.data)  # like detach(), at half its price
            if len(values) >= _FOLD:
                mean.fold()

    def _look(self, said: Mapping[str, Any]) -> None:
        numbers = [name for name, value in said.items() if name != "weight" and _is_number(name, value)]
        self._names = [(name, f"{self.stage}/{name}") for name in numbers]
        self._size = len(said) if all(value is not None for value in said.values()) else -1


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
            never = stage == "train" or (stage == "val" and run.task is not None and run.evaluator is None)
            if not never and not metrics.fresh(stage):
                return None  # what measures it may come at a later epoch
            raise MissingMetric(missing(self.name, metrics))
        entry = metrics.entry(self.name)
        if entry is self._last or not metrics.is_fresh(self.name):
            return None
        self._last = entry
        return metrics[self.name]

    def measured(self, run: Run) -> float | None:
        """At EVAL_END in the middle of a pass: the value, if this evaluation brought one.

        None for metrics of training, and after the pass: then EPOCH_END follows, where everything has its final value.
        """
        in_between = run.training and run.in_pass and run.stage == "val" and not self.name.startswith("train/")
        return self.new(run) if in_between and cast(Metrics, run.metrics).is_fresh(self.name) else None

    def must_have_come(self, run: Run) -> None:
        """At the end of training: an error if the metric never had a value."""
        if run.progress.epochs and self.name not in run.metrics:
            raise MissingMetric(missing(self.name, run.metrics))


def numbers(entries: dict[str, Any]) -> dict[str, float]:
    """Numbers for what stands behind names. Tensors of one device are read together."""
    values = [value.compute() if hasattr(value, "compute") else value for value in entries.values()]
    return dict(zip(entries, map(float, _plain(values)), strict=True))


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


def _fold(total: Any, weights: Any, values: Sequence[Any], shares: Sequence[Any]) -> tuple[Any, Any]:
    kinds, weighed_by = set(map(type, values)), set(map(type, shares))
    plain = weighed_by <= _PLAIN
    if plain and kinds <= _PLAIN:
        return total + sum(map(operator.mul, values, shares)), weights + sum(shares)
    device = next(x.device for x in (*values, *shares) if isinstance(x, Tensor))
    stacked = _stack(values, kinds, device)
    if plain and len(set(shares)) == 1:
        return total + stacked.sum() * shares[0], weights + sum(shares)
    weighing = _stack(shares, weighed_by, device)
    return total + (stacked * weighing).sum(), weights + (sum(shares) if plain else weighing.sum())


def _stack(values: Sequence[Any], kinds: set[type], device: torch.device) -> Tensor:
    """Scalars, plain or tensors, as one wide vector on one device."""
    wide = _wide(device)
    if kinds == {Tensor}:
        with suppress(RuntimeError):  # several devices in one mean: rare, and done one by one below
            return torch.stack(list(values)).to(device, wide)
    if kinds <= _PLAIN:
        return torch.tensor(values, dtype=wide, device=device)
    return torch.stack([torch.as_tensor(v, dtype=wide, device=device).reshape(()) for v in values])


def _packed(state: dict[str, Any]) -> dict[str, Any]:
    """A mean's state with the tensors that wait in it as one, where they are of a kind."""
    values = state["values"]
    kinds = {(value.dtype, value.device) if type(value) is Tensor else None for value in values}
    return {**state, "values": torch.stack(values)} if len(kinds) == 1 and None not in kinds else state


def _unpacked(state: Mapping[str, Any]) -> dict[str, Any]:
    values = state["values"]
    return {**state, "values": list(values.unbind()) if isinstance(values, Tensor) else values}


def _plain(mixed: Sequence[Any]) -> list[Any]:
    """Numbers for tensors and numbers alike, with one read for each device."""
    plain = list(mixed)
    places = [i for i, value in enumerate(mixed) if isinstance(value, Tensor)]
    for device in {mixed[i].device for i in places}:
        here = [i for i in places if mixed[i].device == device]
        tensors = [mixed[i].detach().reshape(()) if mixed[i].ndim else mixed[i].detach() for i in here]
        if len({tensor.dtype for tensor in tensors}) > 1:
            tensors = [tensor.to(_wide(device)) for tensor in tensors]  # else whole numbers would be rounded
        for i, number in zip(here, torch.stack(tensors).tolist(), strict=True):
            plain[i] = number
    return plain


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # mps has no float64


class _Computing:
    """An object that computes a metric, for the length of one epoch."""

    __slots__ = ("of",)

    def __init__(self, of: Any) -> None:
        self.of = of

    def compute(self) -> Any:
        return self.of.compute()


class _Known(float):
    """A number given as it is; an object of its own, so that two equal values can be told apart in time."""

    __slots__ = ()


def _is_number(name: str, value: object) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 or (name == "loss" and value.numel() == 1)
    return isinstance(value, Real) or hasattr(value, "compute")


def _number(value: Any) -> Any:
    """What can be added up: a plain number, or a tensor of no dimensions, cut off from its graph."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise BadStep(
                f"a metric is one number, and this tensor has the shape {tuple(value.shape)}; log its mean() or sum()"
            )
        return value.detach().reshape(())
    if type(value) in _PLAIN:
        return value
    if isinstance(value, str):
        raise BadStep(f"{value!r} is text, and a metric is one number")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise BadStep(f"{value!r} is not a number") from error


def _named(name: str, value: Any) -> Any:
    try:
        return _number(value)
    except BadStep as error:
        raise BadStep(f"log({name!r}): {error}.") from error.__cause__
