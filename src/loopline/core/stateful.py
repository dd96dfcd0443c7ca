"""Things with a state that a checkpoint keeps, and the names it is kept under."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

__all__ = ["Stateful", "keeps_state", "state_key"]


@runtime_checkable
class Stateful(Protocol):
    """Anything whose state can be taken and put back."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any], /) -> object: ...


def state_key(listener: object) -> str:
    """The name a listener's state is saved under: its own `state_key`, or else the name of its class."""
    own = getattr(listener, "state_key", None)
    return own if isinstance(own, str) else type(listener).__name__


def keeps_state(listener: object) -> bool:
    """Whether a listener has a state of its own: the empty one of Callback is none."""
    from .callback import Callback

    method = getattr(type(listener), "state_dict", None)
    return method is not None and method is not Callback.state_dict
