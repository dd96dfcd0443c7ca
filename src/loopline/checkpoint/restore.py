"""How a run gets back what a checkpoint kept of it. Every state is looked at before anything is touched."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor

from .. import randomness
from ..core.errors import Damaged, LooplineError, Mismatch
from ..core.progress import Progress
from ..core.run import Run
from ..core.stateful import keeps_state, state_key
from ..strategies import load_whole
from .collect import Loaded, big_sections, setup_of

__all__ = ["put_back"]

logger = logging.getLogger("loopline")


def put_back(run: Run, loaded: Loaded, *, only: Collection[str] = (), allow: Collection[str] = ()) -> None:
    """Give a run the state of a checkpoint, or some sections of it such as `model`. Nothing is touched on Mismatch."""
    here = loaded.sections
    if unknown := [name for name in only if not any(_within(section, [name]) for section in here)]:
        raise Mismatch(f"The checkpoint has no section {unknown[0]!r}; it has {', '.join(sorted(here))}.")
    wanted = {section: state for section, state in here.items() if not only or _within(section, only)}
    if not only:
        _check_sections(run, loaded)
    _refuse_differences(run, here, wanted, allow)
    big = {name: wanted[name] for name in big_sections(run) if name in wanted and _whole(name, allow)}
    for i, optimizer in enumerate(run.optimizers):
        if f"optimizer/{i}" in big:
            _check_optimizer(f"optimizer/{i}", big[f"optimizer/{i}"], optimizer)
    strict = "model" not in allow
    if run.strategy is not None:
        strategy, parts = run.strategy, run.parts
        _given("model and optimizers", lambda state: strategy.load_state(parts, state, strict=strict), big)
    else:
        model, optimizers = run.model, run.optimizers
        _given("model and optimizers", lambda state: load_whole(model, optimizers, state, strict=strict), big)
    for i, scheduled in enumerate(run.schedulers):
        if f"scheduler/{i}" in wanted and "schedulers" not in allow:
            _check_scheduler(f"scheduler/{i}", wanted[f"scheduler/{i}"], scheduled.scheduler)
            _given(f"scheduler/{i}", scheduled.scheduler.load_state_dict, wanted[f"scheduler/{i}"])
    for name, part in (("scaler", run.scaler), ("metrics", run.metrics), ("task", run.task)):
        if name in wanted and hasattr(part, "load_state_dict"):
            _given(name, part.load_state_dict, wanted[name])
    _put_back_listeners(run, wanted, everything=not only)
    if only:
        return
    run._calls.update(here["calls"])
    run.requests.evaluate |= bool(here["requests"].get("evaluate"))  # an evaluation that was given up
    for entry in fields(Progress):
        setattr(run.progress, entry.name, here["progress"][entry.name])
    run.epoch, run.step = run.progress.epochs, max(0, run.progress.steps - 1)
    run._streams = loaded.mine["rng"]
    run._loader_states = {
        section.removeprefix("loader/"): state
        for section, state in loaded.mine.items()
        if section.startswith("loader/")
    }


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
    if "model" in wanted and (difference := _in_shapes(wanted["model"], big_sections(run)["model"])):
        yield "model", difference
    then, now = here.get("setup", {}), setup_of(run)
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
            _given(section, listener.load_state_dict, wanted[section])  # type: ignore[attr-defined]
            left.discard(section)
        elif keeps_state(listener) and everything and type(listener).__module__.split(".")[0] != "loopline":
            logger.info("The checkpoint has no state of %s; it begins anew.", section.removeprefix("callbacks/"))
    for section in sorted(left):
        logger.warning("The checkpoint has state of %r, which is not attached.", section.removeprefix("callbacks/"))


def _within(section: str, names: Collection[str]) -> bool:
    return any(section == name or section.startswith(f"{name}/") for name in names)


def _whole(section: str, allow: Collection[str]) -> bool:
    return "optimizer" not in allow or not section.startswith("optimizer/")


def _given(name: str, take: Callable[[Any], object], state: Any) -> None:
    """Have somebody take his state; Mismatch, with the error behind it, if he cannot."""
    try:
        take(state)
    except LooplineError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise Mismatch(
            f"The checkpoint's state of {name!r} cannot be taken back: {type(error).__name__}: {error}"
        ) from error


def _check_sections(run: Run, loaded: Loaded) -> None:
    """Refuse a checkpoint that lacks what every one has; its hashes may fit all the same."""
    here = loaded.sections
    kept = here["setup"].get("optimizers") if isinstance(here.get("setup"), dict) else None
    needed = ["progress", "setup", "calls", "requests", "model", *(f"optimizer/{i}" for i in range(len(kept or ())))]
    if odd := [name for name in needed if not isinstance(here.get(name), dict)]:
        raise Damaged(f"The checkpoint has no state of {odd[0]!r}, which every one has.")
    for entry in fields(Progress):
        count = here["progress"].get(entry.name)
        if type(count) is not int or count < 0:
            raise Damaged(f"The checkpoint's progress has {count!r:.80} for {entry.name}.")
    if not all(type(count) is int for count in here["calls"].values()):
        raise Damaged("The checkpoint's counts of calls are not numbers.")
    try:
        with randomness.untouched():
            randomness.put_back(loaded.mine["rng"])
    except Exception as error:
        raise Damaged(f"The checkpoint's random streams cannot be put back: {error!r:.200}") from error


def _check_optimizer(name: str, state: Any, optimizer: Any) -> None:
    """Refuse what torch would take and then compute with, or write beyond."""
    groups: Any = state.get("param_groups") if isinstance(state, dict) else None
    if not _dicts(groups) or len(groups) != len(optimizer.param_groups):
        raise Mismatch(f"The checkpoint's state of {name!r} has not the groups of the optimizer.")
    kept = state.get("state")
    numbers = [number for group in groups for number in group.get("params") or ()]
    if not isinstance(kept, dict) or len(set(numbers)) < len(numbers):
        raise Mismatch(f"The checkpoint's state of {name!r} does not say of which parameters it is.")
    for then, now in zip(groups, optimizer.param_groups, strict=True):
        for option, value in now.items():
            if option != "params" and option in then and not _alike(then[option], value):
                raise Mismatch(f"The checkpoint's state of {name!r} has {then[option]!r:.80} for {option}.")
        if then.get("fused"):
            # these kernels write as many numbers as the parameter has, whatever lies there
            for number, parameter in zip(then.get("params") or (), now["params"], strict=False):
                for part, tensor in kept.get(number, {}).items():
                    if part != "step" and getattr(tensor, "shape", parameter.shape) != parameter.shape:
                        raise Mismatch(f"The checkpoint's state of {name!r} has a {part} of another shape: {number}.")


def _check_scheduler(name: str, state: Any, scheduler: Any) -> None:
    """Refuse a state that would take the place of a method: torch's schedulers take whatever name there is."""
    names = state if isinstance(state, dict) else {"": state}
    if odd := [
        key
        for key in names
        if not isinstance(key, str) or callable(getattr(type(scheduler), key, None)) or key == "optimizer"
    ]:
        raise Mismatch(f"The checkpoint's state of {name!r} has {odd[0]!r:.80}, which is no state of a scheduler.")


def _alike(then: object, now: object) -> bool:
    numbers = (bool, int, float, Tensor)
    return (
        then is None
        or now is None
        or type(then) is type(now)
        or (isinstance(then, numbers) and isinstance(now, numbers))
    )


def _dicts(given: Any) -> bool:
    return isinstance(given, Sequence) and all(isinstance(item, dict) for item in given)
