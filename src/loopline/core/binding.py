"""What ties a handler to an event, and what counts as a listener."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, cast

from .comm import Comm
from .errors import BadHandler, NotAListener
from .event import Event

if TYPE_CHECKING:
    from .run import Run

__all__ = [
    "Binding",
    "DialectEntry",
    "Handler",
    "Listener",
    "OnError",
    "Ranks",
    "Wrapper",
    "as_listener",
    "check_handler",
    "name_of",
]

Handler: TypeAlias = Callable[..., object]
OnError: TypeAlias = Literal["raise", "warn", "disable"]
Ranks: TypeAlias = Literal["all", "zero", "local_zero"] | Callable[[Comm], bool]


@dataclass(frozen=True, slots=True)
class Binding:
    """One handler at one event.

    Sorted by `then`, then writers before readers, then `order`, then by attachment. Events of loopline's own call
    `handler(run)`; an event of the user's own may carry a payload, which comes by keyword.
    """

    event: Event
    handler: Handler
    owner: object
    order: int = 0
    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    on_error: OnError = "raise"
    then: int = 0
    ranks: Ranks = "all"

    def runs_on(self, comm: Comm) -> bool:
        match self.ranks:
            case "all":
                return True
            case "zero":
                return comm.rank == 0
            case "local_zero":
                return comm.local_rank == 0
            case test if callable(test):
                return bool(test(comm))
            case other:
                raise BadHandler(
                    f"{name_of(self.owner)}.ranks is {other!r}; it can be 'all', 'zero', 'local_zero' "
                    "or a function of the run's comm."
                )


class Listener(Protocol):
    """Anything that can say which handlers it has. Asked when it is attached, and again when others are."""

    def bindings(self, run: Run) -> Iterable[Binding]: ...


class Wrapper(Protocol):
    """A listener that also sees every handler as the plan is made, and may put another in its place."""

    def wrap_handler(self, run: Run, binding: Binding, handler: Handler) -> Handler: ...


class DialectEntry(Protocol):
    """What an entry point of the group `loopline.dialects` names: how to recognise and adapt foreign callbacks."""

    @property
    def name(self) -> str: ...
    @property
    def bases(self) -> Sequence[str]:
        """Exact dotted names of the library's callback classes."""
        ...

    def adapt(self, foreign: Any) -> Listener: ...


def as_listener(given: object) -> Listener:
    """The listener that an object is or stands for: itself, a marked function, or a known library's callback."""
    if isinstance(given, type):
        raise NotAListener(f"{given.__name__} is a class; attach an object of it, for example {given.__name__}(...).")
    # looked up on the class: a foreign callback's own __getattr__ may raise anything
    if hasattr(type(given), "bindings"):
        return cast(Listener, given)
    if isinstance(given, FunctionType | MethodType) and hasattr(given, "__loopline_marks__"):
        return _FunctionListener(given, given.__loopline_marks__)
    names = {f"{cls.__module__}.{cls.__qualname__}" for cls in type(given).__mro__}
    dialects = _dialects()
    for dialect in dialects:
        if names.intersection(dialect.bases):
            return dialect.adapt(given)
    if isinstance(given, FunctionType | MethodType):
        raise NotAListener(
            f"{given.__name__} is a plain function, and nothing says when to call it. "
            f"Mark it with @on, for example @on(at.STEP_END, every=100)."
        )
    known = ", ".join(dialect.name for dialect in dialects) or "none installed"
    raise NotAListener(
        f"An object of the class {type(given).__module__}.{type(given).__qualname__} is not a listener. "
        "A listener is an object with bindings(run): subclass loopline.Callback, or mark a function with @on. "
        f"Dialects whose callbacks are recognised: {known}."
    )


def name_of(owner: object) -> str:
    """How messages and tables call a listener."""
    name = getattr(owner, "__qualname__", None)
    return name if isinstance(name, str) else type(owner).__qualname__


def check_handler(handler: Handler, owner: object) -> None:
    """Refuse, when it is attached, a handler that could not be called as `handler(run)`."""
    said = name_of(owner)
    name = getattr(handler, "__name__", repr(handler))
    title = name if name == said else f"{said}.{name}"
    if inspect.iscoroutinefunction(handler) or inspect.isgeneratorfunction(handler):
        kind = "async" if inspect.iscoroutinefunction(handler) else "a generator"
        raise BadHandler(f"{title} is {kind}: calling it would run nothing. Make it a plain function.")
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError):
        return  # some built-in callables have no signature to look at
    try:
        signature.bind(object())
    except TypeError as error:
        raise BadHandler(
            f"{title}{signature} will be called with the run as its only argument, which it does not accept: {error}."
        ) from error


@dataclass(frozen=True, slots=True)
class Mark:
    """What @on wrote on a function: one event that it hears, and how."""

    event: Event
    every: int = 1
    order: int | None = None
    reads: frozenset[str] | None = None
    writes: frozenset[str] | None = None
    ranks: Ranks | None = None
    on_error: OnError | None = None


@dataclass(frozen=True, slots=True)
class _FunctionListener:
    function: Any
    marks: tuple[Mark, ...]

    def bindings(self, run: Run) -> Iterable[Binding]:
        check_handler(self.function, self.function)
        for mark in self.marks:
            yield bind_mark(mark, self.function, owner=self.function)


def bind_mark(mark: Mark, handler: Handler, owner: object) -> Binding:
    """The binding that a mark asks for; what it leaves open is taken from the owner's own attributes."""

    def given(name: str, default: Any) -> Any:
        own = getattr(mark, name)
        return own if own is not None else getattr(owner, name, default)

    return Binding(
        mark.event,
        handler if mark.every == 1 else _each(mark.every, mark.event, handler),
        owner,
        order=given("order", 0),
        reads=frozenset(given("reads", ())),
        writes=frozenset(given("writes", ())),
        ranks=given("ranks", "all"),
        on_error=given("on_error", "raise"),
    )


_COUNTED_BY = {
    "batches": ("batch_start", "loss_ready", "before_backward", "after_backward", "batch_end"),
    "steps": ("step_start", "before_zero_grad", "before_optimizer_step", "after_optimizer_step", "step_end"),
    "epochs": ("epoch_start", "pass_end", "epoch_end"),
}


def _each(every: int, event: Event, handler: Handler) -> Handler:
    """Every n-th time only. Steps, batches and epochs are counted by the run's progress, so a resume keeps the beat."""
    calls = 0
    counter = next((counter for counter, names in _COUNTED_BY.items() if event.name in names), None)

    def by_progress(run: Run, **payload: object) -> None:
        if (getattr(run.progress, str(counter)) + 1) % every == 0:
            handler(run, **payload)

    def by_calls(run: Run, **payload: object) -> None:
        nonlocal calls
        calls += 1
        if calls % every == 0:
            handler(run, **payload)

    return by_calls if counter is None else by_progress


def _dialects() -> list[DialectEntry]:
    from importlib.metadata import entry_points  # 20 ms, and rarely needed

    return [entry.load() for entry in entry_points(group="loopline.dialects")]
