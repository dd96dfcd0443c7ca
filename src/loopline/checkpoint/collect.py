"""What a checkpoint keeps of a run, and how a run gets it back."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from torch import Tensor

from ..core.errors import Damaged, Mismatch
from ..core.progress import Progress
from ..core.run import Run
from ..core.stateful import keeps_state, state_key
from ..data import state_of
from ..metrics import Mean
from ..randomness import streams
from ..strategies import load_whole, whole_state
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
    "forms_of",
    "known_metrics",
    "load",
    "put_back",
    "rank_paths",
    "take",
    "weights_of",
]

logger = logging.getLogger("loopline")

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
    for section, state in _big(run).items():
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
    if codec.name != stored.manifest.codec:
        codec = codec_named(stored.manifest.codec)
    tensors = codec.read(big, stored) | _small(stored, BESIDE)
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


def put_back(run: Run, loaded: Loaded, *, only: Collection[str] = (), allow: Collection[str] = ()) -> None:
    """Give a run the state of a checkpoint, or some sections of it such as `model`. Nothing is touched on Mismatch."""
    here = loaded.sections
    if unknown := [name for name in only if not any(_within(section, [name]) for section in here)]:
        raise Mismatch(f"The checkpoint has no section {unknown[0]!r}; it has {', '.join(sorted(here))}.")
    wanted = {section: state for section, state in here.items() if not only or _within(section, only)}
    _refuse_differences(run, here, wanted, allow)
    big = {name: wanted[name] for name in _big(run) if name in wanted and _whole(name, allow)}
    strict = "model" not in allow
    if run.strategy is not None:
        run.strategy.load_state(run.parts, big, strict=strict)
    else:
        load_whole(run.model, run.optimizers, big, strict=strict)
    for i, scheduled in enumerate(run.schedulers):
        if f"scheduler/{i}" in wanted and "schedulers" not in allow:
            scheduled.scheduler.load_state_dict(wanted[f"scheduler/{i}"])
    for name, part in (("scaler", run.scaler), ("metrics", run.metrics), ("task", run.task)):
        if name in wanted and hasattr(part, "load_state_dict"):
            part.load_state_dict(wanted[name])
    _put_back_listeners(run, wanted, everything=not only)
    if only:
        return
    run._calls.update(here.get("calls", {}))
    run.requests.evaluate |= bool(here.get("requests", {}).get("evaluate"))  # an evaluation that was given up
    for entry in fields(Progress):
        setattr(run.progress, entry.name, here["progress"][entry.name])
    run.epoch, run.step = run.progress.epochs, max(0, run.progress.steps - 1)
    run._streams = loaded.mine.get("rng")
    run._loader_states = {
        section.removeprefix("loader/"): state
        for section, state in loaded.mine.items()
        if section.startswith("loader/")
    }


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
    return frozenset(f"model/{name.replace('_orig_mod.', '')}" for name, _ in named)


def rank_paths(rank: int) -> tuple[str, str]:
    """The two files of one rank."""
    return f"rank-{rank:05d}.json", f"rank-{rank:05d}.safetensors"


def _big(run: Run) -> dict[str, Any]:
    """The sections that a codec writes: the model and the optimizers."""
    if run.strategy is not None:
        state: dict[str, Any] = run.strategy.state(run.parts)
        return state
    return whole_state(run.model, run.optimizers)


def _shared(run: Run) -> Iterable[tuple[str, Any]]:
    yield "progress", asdict(run.progress)
    yield "setup", _setup(run)
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


def _setup(run: Run) -> dict[str, Any]:
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


def _refuse_differences(run: Run, here: Mapping[str, Any], wanted: Mapping[str, Any], allow: Collection[str]) -> None:
    found = dict(_differences(run, here, wanted))
    for name in list(found):
        if name in allow:
            logger.warning("Going on although the %s differs, as allowed: %s", name, found.pop(name))
    if found:
        said = "; ".join(f"{name}: {difference}" for name, difference in found.items())
        raise Mismatch(
            f"The checkpoint does not belong to what is being trained. {said}. Restore what it was, use another "
            f"folder, or allow it by name: Checkpointer(..., allow={sorted(found)!r})."
        )


def _differences(run: Run, here: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    if "model" in wanted and (difference := _in_shapes(wanted["model"], _big(run)["model"])):
        yield "model", difference
    then, now = here.get("setup", {}), _setup(run)
    if any(section.startswith("optimizer/") for section in wanted) and then.get("optimizers") != now["optimizers"]:
        yield "optimizer", f"it had {then.get('optimizers')}, and now there is {now['optimizers']}"
    if any(section.startswith("scheduler/") for section in wanted) or "progress" in wanted:
        if then.get("schedulers") != now["schedulers"]:
            yield "schedulers", f"it had {then.get('schedulers')}, and now there is {now['schedulers']}"
        for name in ("seed", "accumulate"):
            if then.get(name) != now[name] and then.get(name) is not None and now[name] is not None:
                yield name, f"it had {then.get(name)!r}, and now it is {now[name]!r}"


def _in_shapes(then: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first tensors that differ."""
    shapes = [{k: _shape(v) for k, v in state.items() if isinstance(v, Tensor)} for state in (then, now)]
    names = [name for name in dict.fromkeys([*shapes[0], *shapes[1]]) if shapes[0].get(name) != shapes[1].get(name)]
    if not names:
        return None
    first = [f"{n} was {shapes[0].get(n, 'not there')} and is {shapes[1].get(n, 'not there')}" for n in names[:3]]
    more = f", and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(first) + more


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _put_back_listeners(run: Run, wanted: Mapping[str, Any], *, everything: bool) -> None:
    left = {section for section in wanted if section.startswith("callbacks/")}
    for listener in run.listeners:
        section = f"callbacks/{state_key(listener)}"
        if keeps_state(listener) and section in left:
            listener.load_state_dict(wanted[section])  # type: ignore[attr-defined]
            left.discard(section)
        elif keeps_state(listener) and everything and type(listener).__module__.split(".")[0] != "loopline":
            logger.info("The checkpoint has no state of %s; it begins anew.", section.removeprefix("callbacks/"))
    for section in sorted(left):
        logger.warning("The checkpoint has state of %s, which is not attached.", section.removeprefix("callbacks/"))


def _small(stored: Stored, path: str) -> dict[str, Tensor]:
    return tensors_of(stored.read(path), path) if path in stored.paths else {}


def _within(section: str, names: Collection[str]) -> bool:
    return any(section == name or section.startswith(f"{name}/") for name in names)


def _whole(section: str, allow: Collection[str]) -> bool:
    return "optimizer" not in allow or not section.startswith("optimizer/")


def _texts(given: Any) -> bool:
    return isinstance(given, list) and all(isinstance(name, str) for name in given)
