"""The codecs that manifests name."""

from __future__ import annotations

from ..core.errors import Mismatch
from .codec import Codec, Whole

__all__ = ["codec_named"]


def codec_named(name: str, given: Codec | None = None) -> Codec:
    """A codec, by the name that manifests have for it: the one that is given, if it is that."""
    if given is not None and given.name == name:
        return given
    if name == Whole.name:
        return Whole()
    from .dcp import Dcp  # torch's DCP takes a second to import

    if name == Dcp.name:
        return Dcp()
    raise Mismatch(
        f"The checkpoint was written by the codec {name!r:.80}, which is none of this version's. If it is one of your "
        "own, give it: Checkpointer(..., codec=...)."
    )
