"""Checkpoints: what is kept of a run, how it is committed, and how it is found again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .checkpointer import Checkpointer
from .codec import Codec, Whole
from .convert import convert_weights
from .export import export_weights
from .keep import All, Best, Each, Keep, Latest
from .listing import Listed, list_checkpoints
from .manifest import Manifest, Ref
from .tree import register_codec
from .weights import Written

if TYPE_CHECKING:
    from .dcp import Dcp as Dcp

__all__ = [
    "All",
    "Best",
    "Checkpointer",
    "Codec",
    "Dcp",
    "Each",
    "Keep",
    "Latest",
    "Listed",
    "Manifest",
    "Ref",
    "Whole",
    "Written",
    "convert_weights",
    "export_weights",
    "list_checkpoints",
    "register_codec",
]


def __getattr__(name: str) -> Any:
    if name != "Dcp":
        raise AttributeError(f"loopline.checkpoint has no {name!r}; it has {', '.join(__all__)}.")
    from .dcp import Dcp  # torch's DCP takes a second to import

    globals()[name] = Dcp
    return Dcp
