"""What ties a handler to an event, and what counts as a listener."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, cast

from . import event as at
from .comm import Comm
from .errors import BadHandler, NotAListener
from .event import SEAMS, Event

if TYPE_CHECKING:
    from .run import Run

__all__ = [
    "Binding",
    "DialectEntry",
    "FunctionListener",
    "Handler",
    "Listener",
    "Mark",
    "OnError",
    "Ranks",
    "Wrapper",
    "as_listener",
    "bind_mark",
    "check_handler",
    "check_policy",
    "marks_of",
    "name_of",
    "recognised",
]

Handler: TypeAlias = Callable[..., object]
OnError: TypeAlias = Literal["raise", "warn", "disable"]
Ranks: TypeAlias = Literal["all", "zero", "local_zero"] | Callable[[Comm], bool]


@dataclass(frozen=True, slots=True)
class Binding:
    """One handler at one event.

    Sorted by `then`, then writers before readers, then `order`, then by attachment. Events of loopline's own call
    `handler(run)`; an event of the user's own may carry a payload, which comes by keyword. What `careful` says
    matters where `on_error` is "disable": see Callback.
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
    careful: bool = False

    def __post_init__(self) -> None:
        said = name_of(self.owner)
        check_policy(self.on_error, self.owner)
        if not isinstance(self.careful, bool):
            raise BadHandler(f"{said}.careful is {self.careful!r}; it can be True or False.")
        if not callable(self.ranks) and self.ranks not in ("all", "zero", "local_zero"):
            raise BadHandler(
                f"{said}.ranks is {self.ranks!r}; it can be 'all', 'zero', 'local_zero' or a function of a comm."
            )
        for name in ("order", "then"):
            if not isinstance(number := getattr(self, name), int | float):
                raise BadHandler(f"{said}.{name} is {number!r}; it is a number, and smaller ones come first.")
        for name in ("reads", "writes"):
            object.__setattr__(self, name, _names(getattr(self, name), f"{said}.{name}"))
        check_handler(self.handler, self.owner, self.event)

    def runs_on(self, comm: Comm) -> bool:
        match self.ranks:
            case "all":
                return True
            case "zero":
                return comm.rank == 0
            case "local_zero":
                return comm.local_rank == 0
            case test:
                return bool(test(comm))


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
    return recognised(given)()


def recognised(given: object) -> Callable[[], Listener]:
    """What makes a listener of an object; an error that says what to do where nothing does."""
    if isinstance(given, type):
        raise NotAListener(f"{given.__name__} is a class; attach an object of it, for example {given.__name__}(...).")
    # looked up on the class: a foreign callback's own __getattr__ may raise anything
    if hasattr(type(given), "bindings"):
        return lambda: cast(Listener, given)
    if marks := marks_of(given):
        return lambda: FunctionListener(given, marks)
    names = {f"{cls.__module__}.{cls.__qualname__}" for cls in type(given).__mro__}
    dialects = _dialects()
    for dialect in dialects:
        if names.intersection(dialect.bases):
            return partial(dialect.adapt, given)
    if isinstance(given, FunctionType | MethodType | BuiltinFunctionType):
        raise NotAListener(
            f"{given.__name__} is a plain function, and nothing says when to call it. "
            f"Mark it with @on, for example @on(at.STEP_END, every=100)."
        )
    known = ", ".join(dialect.name for dialect in dialects) or "none installed"
    raise NotAListener(
        f"An object of class {type(given).__module__}.{type(given).__qualname__} is not a listener. "
        "A listener is an object with bindings(run): subclass loopline.Callback, or mark a function with @on. "
        f"Dialects whose callbacks are recognised: {known}."
    )


def marks_of(given: object) -> tuple[Mark, ...]:
    """What @on wrote on a function. Other objects are not asked: their attributes may be anything."""
    if isinstance(given, FunctionType | MethodType | partial):
        return getattr(given, "__loopline_marks__", ())
    return ()


def name_of(owner: object) -> str:
    """How messages and tables call a listener."""
    if isinstance(owner, partial):
        return name_of(owner.func)
    # a foreign callback is not asked for any attribute: it may answer with anything
    return owner.__qualname__ if isinstance(owner, type | FunctionType | MethodType) else type(owner).__qualname__


@dataclass(frozen=True, slots=True)
class Mark:
    """What @on wrote on a function: one event that it hears, and how."""

    event: Event
    every: int = 1
    order: int | None = None
    reads: str | Iterable[str] | None = None
    writes: str | Iterable[str] | None = None
    ranks: Ranks | None = None
    on_error: OnError | None = None
    careful: bool | None = None


@dataclass(frozen=True, slots=True)
class FunctionListener:
    """A function marked with @on, as a listener."""

    function: Any
    marks: tuple[Mark, ...]

    def bindings(self, run: Run) -> Iterable[Binding]:
        """One binding for each mark."""
        for mark in self.marks:
            yield bind_mark(mark, self.function, owner=self.function, run=run)


def bind_mark(mark: Mark, handler: Handler, owner: object, *, run: Run) -> Binding:
    """The binding that a mark asks for; what it leaves open is taken from the owner's own attributes."""

    def given(name: str, default: Any) -> Any:
        own = getattr(mark, name)
        return own if own is not None else getattr(owner, name, default)

    binding = Binding(
        mark.event,
        handler,
        owner,
        order=given("order", 0),
        reads=given("reads", frozenset()),
        writes=given("writes", frozenset()),
        ranks=given("ranks", "all"),
        on_error=given("on_error", "raise"),
        careful=given("careful", False),
    )
    return binding if mark.every == 1 else replace(binding, handler=_each(mark.every, binding, run))


_COUNTED_BY = {
    **dict.fromkeys((at.BATCH_START, at.LOSS_READY, at.BEFORE_BACKWARD, at.AFTER_BACKWARD, at.BATCH_END), "batches"),
    **dict.fromkeys((at.STEP_START, at.BEFORE_ZERO_GRAD, at.BEFORE_OPTIMIZER_STEP), "steps"),
    **dict.fromkeys((at.AFTER_OPTIMIZER_STEP, at.STEP_END), "steps"),
    **dict.fromkeys((at.EPOCH_START, at.PASS_END, at.EPOCH_END), "epochs"),
}


def _each(every: int, binding: Binding, run: Run) -> Handler:
    """Every n-th time only. Steps, batches and epochs are counted by the run's progress, so a resume keeps the beat."""
    handler = binding.handler
    counter = _COUNTED_BY.get(binding.event)
    key = run._key(binding.owner, f"{binding.event.name}/{getattr(handler, '__name__', '')}/{every}")

    @wraps(handler)
    def by_progress(run: Run, **payload: object) -> None:
        if (getattr(run.progress, str(counter)) + 1) % every == 0:
            handler(run, **payload)

    @wraps(handler)
    def by_calls(run: Run, **payload: object) -> None:
        calls = run._calls[key] = run._calls.get(key, 0) + 1  # on the run: a new plan goes on counting
        if calls % every == 0:
            handler(run, **payload)

    return by_calls if counter is None else by_progress


def check_handler(handler: Handler, owner: object, event: Event) -> None:
    """Refuse, when it is attached, a handler that could not be called as `handler(run)`."""
    said = name_of(owner)
    name = getattr(handler, "__name__", type(handler).__name__)
    title = name if handler is owner else f"{said}.{name}"
    if not callable(handler):
        raise BadHandler(f"{said} binds {handler!r} to {event.name}, which cannot be called.")
    if inspect.iscoroutinefunction(handler) or inspect.isasyncgenfunction(handler):
        raise BadHandler(f"{title} is async: calling it would run nothing. Make it a plain function.")
    if inspect.isgeneratorfunction(handler):
        raise BadHandler(f"{title} is a generator: calling it would run nothing. Make it a plain function.")
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError):
        return  # some built-in callables have no signature to look at
    ours = SEAMS.get(event.name) is event
    try:
        # an event of the user's own may bring more, by keyword
        signature.bind(object()) if ours else signature.bind_partial(object())
    except TypeError as error:
        raise BadHandler(
            f"{title}{signature} will be called with the run as its only argument, which it does not accept: {error}."
        ) from error


def check_policy(on_error: object, owner: object) -> None:
    """Refuse what is no failure policy; a method of that name is a misunderstanding."""
    if on_error not in ("raise", "warn", "disable"):
        raise BadHandler(
            f"{name_of(owner)}.on_error is {on_error!r}; it says what a failure does and can be 'raise', 'warn' or "
            "'disable'. To hear of errors, override on_exception."
        )


def _names(given: Any, said: str) -> frozenset[str]:
    """Names of data; one name alone is taken for what it is, and not for its letters."""
    names = frozenset([given] if isinstance(given, str) else given)
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise BadHandler(f"{said} has {wrong[0]!r}; it holds names of data, such as 'metrics' or 'grads'.")
    return names


def _dialects() -> list[DialectEntry]:
    from importlib.metadata import entry_points  # 20 ms, and rarely needed

    dialects: list[DialectEntry] = []
    for entry in entry_points(group="loopline.dialects"):
        try:
            dialects.append(entry.load())
        except Exception as error:
            raise NotAListener(
                f"The dialect {entry.name!r} ({entry.value}) cannot be loaded: {type(error).__name__}: {error}. "
                "Mend or uninstall the package that brings it."
            ) from error
    return dialects
