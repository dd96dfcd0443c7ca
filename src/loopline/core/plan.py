"""The plan: who is called at each event, in which order, decided once when listeners are attached."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from types import FunctionType
from typing import TYPE_CHECKING, cast

from .binding import Binding, FunctionListener, Handler, Listener, Wrapper, name_of
from .errors import DuplicateState, OrderCycle
from .event import (
    AFTER_BACKWARD,
    AFTER_OPTIMIZER_STEP,
    BATCH_END,
    BATCH_START,
    BEFORE_BACKWARD,
    BEFORE_OPTIMIZER_STEP,
    BEFORE_ZERO_GRAD,
    FETCH_END,
    FETCH_START,
    LOSS_READY,
    SEAMS,
    STEP_END,
    STEP_START,
    Event,
)
from .guard import guarded, kept_apart
from .stateful import keeps_state, state_key

if TYPE_CHECKING:
    from .run import Run

_OF_PASS = (FETCH_START, FETCH_END, STEP_START, BATCH_START, BEFORE_ZERO_GRAD, BATCH_END, STEP_END)

__all__ = ["Plan", "compile_plan", "title_of"]


class Plan(dict[Event, tuple[Handler, ...]]):
    """Who is called at each event, in order. Never changed once made: adding a listener makes a new plan."""

    def __init__(self, table: dict[Event, tuple[Binding, ...]], handlers: dict[Event, tuple[Handler, ...]]) -> None:
        super().__init__(handlers)
        self.bindings = table
        self.everywhere: tuple[str, ...] = ()
        # what the loop asks about in every batch, side by side: twelve look-ups would cost a microsecond
        self.of_pass = tuple(self[event] for event in _OF_PASS)
        self.of_backward = any(self[event] for event in (LOSS_READY, BEFORE_BACKWARD, AFTER_BACKWARD))
        self.of_step = any(self[event] for event in (BEFORE_OPTIMIZER_STEP, AFTER_OPTIMIZER_STEP))

    def __missing__(self, event: Event) -> tuple[Handler, ...]:
        return ()  # an event of the user's own that nobody hears

    def binding(self, event: Event, handler: Handler) -> Binding:
        """The binding behind one of this plan's handlers."""
        return self.bindings[event][self[event].index(handler)]

    def describe(self) -> str:
        """A table for people: for each event, who is called, in order, and why there."""
        rows = [("event", "#", "callback", "order", "ranks", "why")]
        for event, bindings in self.bindings.items():
            for place, binding in enumerate(bindings):
                ranks = binding.ranks if isinstance(binding.ranks, str) else "a test"
                name, why = title_of(binding), _why(binding, bindings[:place])
                rows.append((event.name if place == 0 else "", f"{place + 1}", name, f"{binding.order}", ranks, why))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(line.rstrip() for line in lines)


def compile_plan(listeners: Iterable[Listener], run: Run) -> Plan:
    """Ask every listener for its bindings, keep those of this rank, sort them, and freeze the result."""
    listeners = list(listeners)
    _check_state(listeners)
    found: dict[Event, list[Binding]] = {}
    everywhere: list[str] = []
    for listener in listeners:
        for binding in listener.bindings(run):
            everywhere.append(f"{binding.event.name} {name_of(binding.owner)} {binding.order} {binding.then}")
            if binding.runs_on(run.comm):
                found.setdefault(binding.event, []).append(binding)
    # in loop order first, the user's own events after
    events = [seam for seam in SEAMS.values() if seam in found]
    events += [event for event in found if SEAMS.get(event.name) is not event]
    table = {event: tuple(_sorted(found[event], event)) for event in events}
    wrappers = [cast(Wrapper, listener) for listener in listeners if hasattr(type(listener), "wrap_handler")]
    handlers = {
        event: tuple(_handler(binding, run, wrappers) for binding in bindings) for event, bindings in table.items()
    }
    plan = Plan(table, {**dict.fromkeys(SEAMS.values(), ()), **handlers})
    plan.everywhere = tuple(everywhere)
    return plan


def _handler(binding: Binding, run: Run, wrappers: Sequence[Wrapper]) -> Handler:
    handler = kept_apart(binding)
    for wrapper in wrappers:
        handler = wrapper.wrap_handler(run, binding, handler)
    return guarded(binding, run, handler)


def _sorted(bindings: Sequence[Binding], event: Event) -> list[Binding]:
    done: list[Binding] = []
    for then in sorted({binding.then for binding in bindings}):
        done += _by_data([binding for binding in bindings if binding.then == then], event)
    return done


def _by_data(group: Sequence[Binding], event: Event) -> list[Binding]:
    """Writers before readers; among those that are free to go, the smallest order, then the first attached."""
    if not any(binding.reads for binding in group):
        return sorted(group, key=lambda binding: binding.order)
    after: list[list[int]] = [[] for _ in group]
    waits = [0] * len(group)
    for w, writer in enumerate(group):
        for r, reader in enumerate(group):
            if w != r and _feeds(writer, reader):
                after[w].append(r)
                waits[r] += 1
    free = [(binding.order, i) for i, binding in enumerate(group) if waits[i] == 0]
    heapq.heapify(free)
    done: list[int] = []
    while free:
        _, i = heapq.heappop(free)
        done.append(i)
        for r in after[i]:
            waits[r] -= 1
            if waits[r] == 0:
                heapq.heappush(free, (group[r].order, r))
    if len(done) < len(group):
        raise OrderCycle(_cycle(group, [i for i in range(len(group)) if waits[i]], after, event))
    return [group[i] for i in done]


def _feeds(writer: Binding, reader: Binding) -> set[str]:
    """The data for which one must come before the other.

    Who reads and writes the same thing edits it: editors come after those that only write and before those that only
    read, and `order` decides among them.
    """
    return {
        written
        for written in writer.writes
        for read in reader.reads
        if _overlap(written, read)
        and not (any(_overlap(written, r) for r in writer.reads) and any(_overlap(read, w) for w in reader.writes))
    }


def _overlap(one: str, other: str) -> bool:
    """`metrics` is all metrics, `metrics/val/loss` one of them."""
    return one == other or one.startswith(f"{other}/") or other.startswith(f"{one}/")


def _cycle(group: Sequence[Binding], stuck: Sequence[int], after: Sequence[Sequence[int]], event: Event) -> str:
    # every stuck one waits for another stuck one: walking backwards must come round
    path = [stuck[0]]
    while path.count(path[-1]) < 2:
        path.append(next(w for w in stuck if path[-1] in after[w]))
    circle = path[path.index(path[-1]) :][::-1]
    steps = [
        f"{name_of(group[w].owner)} writes {', '.join(sorted(_feeds(group[w], group[r])))}, "
        f"which {name_of(group[r].owner)} reads"
        for w, r in pairwise(circle)
    ]
    return (
        f"At {event.name} no order satisfies everybody: {'; '.join(steps)}. "
        "Let one of them act at another event, or drop a read or write that it does not need."
    )


def _why(binding: Binding, before: Sequence[Binding]) -> str:
    fed = [(name_of(other.owner), sorted(data)) for other in before if (data := _feeds(other, binding))]
    if fed:
        return "; ".join(f"reads {', '.join(data)} from {name}" for name, data in fed)
    return f"order {binding.order}" if binding.order else "as attached"


def title_of(binding: Binding) -> str:
    """Whose handler it is, which one where its name does not say so already, and its policy where it is a mild one."""
    owner, method = name_of(binding.owner), getattr(binding.handler, "__name__", "")
    plain = method in ("", f"on_{binding.event.name}") or isinstance(binding.owner, FunctionType | partial)
    title = owner if plain else f"{owner}.{method}"
    return title if binding.on_error == "raise" else f"{title} ({binding.on_error})"


def _check_state(listeners: Sequence[Listener]) -> None:
    seen: dict[str, Listener] = {}
    for i, listener in enumerate(listeners):
        if any(_one(other, listener) for other in listeners[:i]):
            raise DuplicateState(
                f"{_title(listener)} is attached twice: the same object. Make two objects, or drop one."
            )
        if not keeps_state(listener):
            continue
        key = state_key(listener)
        if key in seen:
            raise DuplicateState(
                f"{name_of(seen[key])} and {name_of(listener)} both save state under the key {key!r}; one would "
                "overwrite the other. Give them different keys through their state_key."
            )
        seen[key] = listener


def _title(listener: Listener) -> str:
    return name_of(listener.function if isinstance(listener, FunctionListener) else listener)


def _one(listener: Listener, other: Listener) -> bool:
    if isinstance(listener, FunctionListener) and isinstance(other, FunctionListener):
        return listener.function is other.function
    return listener is other
