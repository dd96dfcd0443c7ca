"""A callback out of functions, without a class."""

from __future__ import annotations

from collections.abc import Iterable

from ..core.binding import Binding, Handler, OnError, Ranks
from ..core.callback import Callback, _unknown
from ..core.errors import BadHandler, UnknownHook
from ..core.event import SEAMS
from ..core.run import Run

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
        careful: bool = False,
        **handlers: Handler,
    ) -> None:
        self.order = order
        self.reads = frozenset([reads] if isinstance(reads, str) else reads)
        self.writes = frozenset([writes] if isinstance(writes, str) else writes)
        self.ranks = ranks
        self.on_error = on_error
        self.careful = careful
        if not handlers:
            raise ValueError("Lambda() has no functions; give some, for example Lambda(on_epoch_end=lambda run: ...).")
        self._handlers = handlers
        for name in handlers:
            if not name.startswith("on_") or name.removeprefix("on_") not in SEAMS:
                raise UnknownHook(_unknown(type(self), name))
            try:
                self._bind(name)
            except BadHandler as error:
                error.add_note(f"given as {name}")
                raise

    def bindings(self, run: Run) -> Iterable[Binding]:
        """One for each function."""
        return [self._bind(name) for name in self._handlers]

    def _bind(self, name: str) -> Binding:
        return Binding(
            SEAMS[name.removeprefix("on_")],
            self._handlers[name],
            self,
            order=self.order,
            reads=self.reads,
            writes=self.writes,
            ranks=self.ranks,
            on_error=self.on_error,
            careful=self.careful,
        )
