"""What a checkpoint keeps of a run, and how it is read again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from ..core.errors import Damaged
from ..core.run import Run
from ..core.stateful import keeps_state, state_key
from ..data import state_of
from ..metrics import Mean
from ..randomness import streams
from ..strategies import plain_name, whole_state
from .blocks import tensors_of
from .codec import Codec
from .codecs import codec_named
from .shelf import Stored
from .staging import Stage
from .tree import dumps, flatten, loads, unflatten

__all__ = [
    "BESIDE",
    "GLOBAL",
    "Loaded",
    "Taken",
    "big_sections",
    "forms_of",
    "known_metrics",
    "load",
    "rank_paths",
    "setup_of",
    "take",
    "weights_of",
]

GLOBAL, BESIDE = "global.json", "global.safetensors"


@dataclass(slots=True)
class Taken:
    """A run's state at a safe point, as forms and tensors. The tensors are still the run's own."""

    forms: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, Mapping[str, Tensor]] = field(default_factory=dict)
    small: Mapping[str, Tensor] = field(default_factory=dict)
    mine: dict[str, Any] = field(default_factory=dict)
    mine_small: Mapping[str, Tensor] = field(default_factory=dict)

    def staged(self, stage: Stage) -> Taken:
        """The same with copies in the tensors' places, in the stage's memory."""
        return Taken(
            self.forms,
            {name: stage.take(name, tensors, cut=len(name) + 1) for name, tensors in self.sections.items()},
            stage.take("", self.small),
            self.mine,
            stage.take("here", self.mine_small),
        )

    def on_cpu(self) -> Taken:
        """The same with all tensors on the cpu, and those that are there already as they are."""

        def here(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            return {name: tensor.cpu() for name, tensor in tensors.items()}

        return Taken(
            self.forms,
            {name: here(tensors) for name, tensors in self.sections.items()},
            here(self.small),
            self.mine,
            here(self.mine_small),
        )

    @property
    def nbytes(self) -> int:
        """What all tensors come to."""
        parts = (*self.sections.values(), self.small, self.mine_small)
        return sum(tensor.nbytes for part in parts for tensor in part.values())

    def global_text(self) -> bytes:
        """What all processes share, as text."""
        return dumps({"sections": self.forms, "tensors": list(self.sections)})


@dataclass(slots=True)
class Loaded:
    """A checkpoint's content, verified and in memory; nothing of the run has been touched yet."""

    sections: dict[str, Any]
    mine: dict[str, Any]


def take(run: Run) -> Taken:
    """The state of a run. Without a copy: it must be staged before training goes on."""
    taken = Taken()
    for section, state in big_sections(run).items():
        tensors: dict[str, Tensor] = {}
        taken.forms[section] = flatten(section, state, tensors)
        taken.sections[section] = tensors
    small: dict[str, Tensor] = {}
    for section, state in _shared(run):
        taken.forms[section] = flatten(section, state, small)
    mine: dict[str, Tensor] = {}
    for section, state in _own(run):
        taken.mine[section] = flatten(section, state, mine)
    taken.small, taken.mine_small = small, mine
    return taken


def load(stored: Stored, codec: Codec, rank: int) -> Loaded:
    """Read everything that a rank needs, verified; Damaged if it is not as it was committed."""
    forms, big = forms_of(stored)
    tensors = codec_named(stored.manifest.codec, codec).read(big, stored) | _small(stored, BESIDE)
    text, beside = rank_paths(rank)
    mine = loads(bytes(stored.read(text)), f"{stored.manifest.name}/{text}")
    if not isinstance(mine, dict):
        raise Damaged(f"{stored.manifest.name}/{text} is not as it is written.")
    own = _small(stored, beside)
    return Loaded(
        {section: unflatten(form, tensors) for section, form in forms.items()},
        {section: unflatten(form, own) for section, form in mine.items()},
    )


def forms_of(stored: Stored) -> tuple[dict[str, Any], list[str]]:
    """The form of each section that all processes share, and the names of those whose tensors a codec wrote."""
    said = loads(bytes(stored.read(GLOBAL)), f"{stored.manifest.name}/{GLOBAL}")
    if not isinstance(said, dict) or not isinstance(said.get("sections"), dict) or not _texts(said.get("tensors")):
        raise Damaged(f"{stored.manifest.name}/{GLOBAL} is not as it is written.")
    return said["sections"], said["tensors"]


def known_metrics(run: Run) -> dict[str, float]:
    """The metrics that can be read without asking anybody: means and plain numbers."""
    metrics: Any = run.metrics
    names = [name for name in metrics if isinstance(metrics.entry(name), Mean | float | Tensor)]
    return dict(metrics.read(names))


def weights_of(run: Run) -> frozenset[str]:
    """The names of the tensors in which an infinity is a failure; a buffer, a mask say, may hold one."""
    if run.model is None:
        return frozenset()
    named = run.model.named_parameters(remove_duplicate=False)
    return frozenset(f"model/{plain_name(name)}" for name, _ in named)


def rank_paths(rank: int) -> tuple[str, str]:
    """The two files of one rank."""
    return f"rank-{rank:05d}.json", f"rank-{rank:05d}.safetensors"


def big_sections(run: Run) -> dict[str, Any]:
    """The sections that a codec writes: the model and the optimizers."""
    if run.strategy is not None:
        state: dict[str, Any] = run.strategy.state(run.parts)
        return state
    return whole_state(run.model, run.optimizers)


def _shared(run: Run) -> Iterable[tuple[str, Any]]:
    yield "progress", asdict(run.progress)
    yield "setup", setup_of(run)
    for i, scheduled in enumerate(run.schedulers):
        yield f"scheduler/{i}", scheduled.scheduler.state_dict()
    for name, part in (("scaler", run.scaler), ("metrics", run.metrics), ("task", run.task)):
        if hasattr(part, "state_dict") and (state := part.state_dict()):
            yield name, state
    yield "calls", dict(run._calls)
    yield "requests", {"evaluate": run.requests.evaluate}
    for listener in run.listeners:
        if keeps_state(listener) and (state := listener.state_dict()):  # type: ignore[attr-defined]
            yield f"callbacks/{state_key(listener)}", state


def _own(run: Run) -> Iterable[tuple[str, Any]]:
    """What each process has for itself."""
    yield "rng", streams()
    # a run that goes on and is saved before its first batch passes on what it was given
    state = run._loader_states.get("train") or (state_of(run.loaders["train"]) if "train" in run.loaders else None)
    if state is not None:
        yield "loader/train", state


def setup_of(run: Run) -> dict[str, Any]:
    """What must be the same when the run goes on, beside the shapes of the model."""
    return {
        "seed": run.seed,
        "accumulate": run.accumulate,
        "optimizers": [_optimizer(optimizer) for optimizer in run.optimizers],
        "schedulers": [_class(scheduled.scheduler) for scheduled in run.schedulers],
    }


def _optimizer(optimizer: Any) -> str:
    groups = ", ".join(f"{len(group['params'])}" for group in optimizer.param_groups)
    return f"{_class(optimizer)} over {groups} parameters"


def _class(given: object) -> str:
    return f"{type(given).__module__}.{type(given).__qualname__}"


def _small(stored: Stored, path: str) -> dict[str, Tensor]:
    return tensors_of(stored.read(path), path) if path in stored.paths else {}


def _texts(given: Any) -> bool:
    return isinstance(given, list) and all(isinstance(name, str) for name in given)
