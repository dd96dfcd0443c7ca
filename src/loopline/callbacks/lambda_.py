"""A callback out of functions, without a class."""

from __future__ import annotations

from collections.abc import Iterable

from ..core.binding import Handler, OnError, Ranks, check_handler
from ..core.callback import Callback, _unknown
from ..core.errors import BadHandler, UnknownHook
from ..core.event import SEAMS

__all__ = ["Lambda"]


class Lambda(Callback):
    """Functions at the moments that their names say: `Lambda(on_epoch_end=lambda run: ...)`.

    For one function with a name of its own, `@on` reads better.

    >>> from loopline import Run, loop
    >>> done = []
    >>> run = Run(callbacks=[Lambda(on_epoch_end=lambda run: done.append(run.epoch))])
    >>> with loop.fit(run):
    ...     for _ in loop.epochs(run, 3):
    ...         pass
    >>> done
    [0, 1, 2]
    """

    def __init__(
        self,
        *,
        order: int = 0,
        reads: Iterable[str] = (),
        writes: Iterable[str] = (),
        ranks: Ranks = "all",
        on_error: OnError = "raise",
        **handlers: Handler,
    ) -> None:
        self.order = order
        self.reads = frozenset([reads] if isinstance(reads, str) else reads)
        self.writes = frozenset([writes] if isinstance(writes, str) else writes)
        self.ranks = ranks
        self.on_error = on_error
        if not handlers:
            raise ValueError("Lambda() has no functions; give some, for example Lambda(on_epoch_end=lambda run: ...).")
        for name, handler in handlers.items():
            if not name.startswith("on_") or name.removeprefix("on_") not in SEAMS:
                raise UnknownHook(_unknown(type(self), name))
            if not callable(handler):
                raise BadHandler(f"Lambda({name}={handler!r}): give a function of the run.")
            try:
                check_handler(handler, self)
            except BadHandler as error:
                error.add_note(f"given as {name}")
                raise
            setattr(self, name, handler)  # an object's own function counts as its method
