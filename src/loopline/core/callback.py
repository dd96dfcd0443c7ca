"""The base class of callbacks, and `@on` for plain functions."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from .binding import Binding, Mark, OnError, Ranks, bind_mark, check_policy, marks_of
from .errors import BadHandler, UnknownHook
from .event import SEAMS, Event

if TYPE_CHECKING:
    from .run import Run

__all__ = ["Callback", "on"]

F = TypeVar("F", bound=Callable[..., object])


class Callback:
    """Override the moments you need. A moment you leave alone costs nothing: it never enters the plan.

    `reads` and `writes` name data ("metrics", "metrics/val/loss", "grads", "weights", "lr", "batch", "loss"): at each
    event writers are called before readers. `order` decides between the others, small numbers first.

    With `on_error = "disable"` a callback is an observer: it may fail, but it may not change the training. `careful`
    promises that it draws no random numbers, leaves the modules in the mode they are in, and returns soon. Without
    that promise an observer is called on a fork of the random streams, modes are put back after it, and it is cut off
    after 1 second (10 at TEARDOWN); that takes 0.1 milliseconds a call.
    """

    order: int = 0
    ranks: Ranks = "all"
    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    on_error: OnError = "raise"
    careful: bool = False

    def on_setup(self, run: Run) -> None: ...
    def on_fit_start(self, run: Run) -> None: ...
    def on_resumed(self, run: Run) -> None: ...
    def on_sanity_start(self, run: Run) -> None: ...
    def on_sanity_end(self, run: Run) -> None: ...
    def on_train_start(self, run: Run) -> None: ...
    def on_epoch_start(self, run: Run) -> None: ...
    def on_fetch_start(self, run: Run) -> None: ...
    def on_fetch_end(self, run: Run) -> None: ...
    def on_step_start(self, run: Run) -> None: ...
    def on_batch_start(self, run: Run) -> None: ...
    def on_before_zero_grad(self, run: Run) -> None: ...
    def on_loss_ready(self, run: Run) -> None: ...
    def on_before_backward(self, run: Run) -> None: ...
    def on_after_backward(self, run: Run) -> None: ...
    def on_before_optimizer_step(self, run: Run) -> None: ...
    def on_after_optimizer_step(self, run: Run) -> None: ...
    def on_batch_end(self, run: Run) -> None: ...
    def on_step_end(self, run: Run) -> None: ...
    def on_pass_end(self, run: Run) -> None: ...
    def on_eval_start(self, run: Run) -> None: ...
    def on_eval_epoch_start(self, run: Run) -> None: ...
    def on_eval_batch_start(self, run: Run) -> None: ...
    def on_eval_batch_end(self, run: Run) -> None: ...
    def on_eval_epoch_end(self, run: Run) -> None: ...
    def on_eval_end(self, run: Run) -> None: ...
    def on_epoch_end(self, run: Run) -> None: ...
    def on_saving(self, run: Run) -> None: ...
    def on_loaded(self, run: Run) -> None: ...
    def on_metrics(self, run: Run) -> None: ...
    def on_stopped(self, run: Run) -> None: ...
    def on_train_end(self, run: Run) -> None: ...
    def on_fit_end(self, run: Run) -> None: ...
    def on_exception(self, run: Run) -> None: ...
    def on_teardown(self, run: Run) -> None: ...

    @property
    def state_key(self) -> str:
        """The name its state is saved under. Two of one class that keep state need two keys."""
        return type(self).__name__

    def state_dict(self) -> dict[str, Any]:
        """What must survive a resume: numbers, text, tensors, and lists and dicts of these."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` gave."""

    def bindings(self, run: Run) -> Iterable[Binding]:
        """One binding for each overridden moment and each method marked with @on."""
        check_policy(self.on_error, self)
        own = getattr(self, "__dict__", {})  # a function may also be set on the object
        for name in dict.fromkeys([*_as_written(type(self)), *own]):
            method = own[name] if name in own else getattr(type(self), name, None)
            if not callable(method):
                continue
            marks: tuple[Mark, ...] = marks_of(method)
            if not marks and name.startswith("on_") and name != "on_error":
                seam = SEAMS.get(name.removeprefix("on_"))
                if seam is None:
                    raise UnknownHook(_unknown(type(self), name))
                if method is not getattr(Callback, name):
                    marks = (Mark(seam),)
            for mark in marks:
                yield bind_mark(mark, getattr(self, name), owner=self, run=run)


def on(
    event: Event,
    *,
    every: int = 1,
    order: int | None = None,
    reads: str | Iterable[str] | None = None,
    writes: str | Iterable[str] | None = None,
    ranks: Ranks | None = None,
    on_error: OnError | None = None,
    careful: bool | None = None,
) -> Callable[[F], F]:
    """Make a function a listener, or mark a callback's method, so that it is called at `event`.

    `every=100` calls it each hundredth time: of steps, batches or epochs as the run's progress counts them, so that a
    resumed run keeps the beat.

    >>> from loopline import at
    >>> @on(at.STEP_END, every=100)
    ... def report(run):
    ...     print(run.step)
    """
    if not isinstance(event, Event):
        raise BadHandler(f"@on({event!r}): an event is an object such as at.STEP_END, not a {type(event).__name__}.")
    if not isinstance(every, int) or every < 1:
        raise BadHandler(f"@on({event.name}, every={every!r}): every is a whole number, 1 or more.")
    mark = Mark(
        event,
        every,
        order,
        reads,
        writes,
        ranks,
        on_error,
        careful,
    )

    def marked(function: F) -> F:
        wrapped: Any = function.__func__ if isinstance(function, staticmethod | classmethod) else function
        try:
            wrapped.__loopline_marks__ = (*getattr(wrapped, "__loopline_marks__", ()), mark)
        except AttributeError as error:
            raise BadHandler(
                f"@on cannot mark {function!r}; mark a function, or the method where its class is written."
            ) from error
        return function

    return marked


def _as_written(cls: type) -> Iterable[str]:
    """The names of a class, those of its bases first, each in the order of the source."""
    return dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base))


def _unknown(cls: type, name: str) -> str:
    near = difflib.get_close_matches(name, [f"on_{seam}" for seam in SEAMS], n=1, cutoff=0.5)
    guess = f" Did you mean {near[0]}?" if near else " The events are listed in loopline/core/event.py."
    return f"{cls.__qualname__}.{name} matches no event and would never be called.{guess}"
