"""The weights of a checkpoint, as one file that any program can load."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from ..core.errors import Damaged, Mismatch, NewerFormat, NoIntactCheckpoint, NoSuchKey
from ..stores import Store, store_of
from .checkpointer import Checkpointer
from .codec import Codec
from .codecs import codec_named
from .collect import GLOBAL, forms_of
from .listing import find, is_there, list_checkpoints
from .manifest import Ref
from .shelf import Stored
from .tree import unflatten
from .weights import Written, apart, check_target, write_weights

__all__ = ["export_weights"]

logger = logging.getLogger("loopline")

_TRIES = 10


def export_weights(
    checkpoints: Checkpointer | Store | str | os.PathLike[str],
    ref: Ref | str = "latest",
    path: str | os.PathLike[str] = "weights.safetensors",
    *,
    force: bool = False,
) -> Written:
    """Write the model's weights of a checkpoint as one safetensors file, for `load_state_dict(load_file(path))`.

    `ref` is a checkpoint, its name, its step, the label of a pin such as "best", or "latest": the newest that is
    intact. What is read is verified. Tied weights are written under each of their names. The file appears whole or not
    at all, and only its owner may read it; one that is there is replaced only with `force`. What a module keeps beside
    its tensors is left out. Nothing is written into the run's folder, which may be in use.
    """
    path = Path(path)
    check_target(path, force=force)
    if isinstance(checkpoints, Checkpointer):
        store, codec = checkpoints.store, checkpoints.codec
    else:
        store, codec = store_of(checkpoints), None
    stored, state = _latest(store, codec) if ref == "latest" else _one(find(store, ref), codec)
    manifest = stored.manifest
    weights = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    counts = {"steps": manifest.step, "epochs": manifest.epochs, "samples": manifest.samples}
    about = {"checkpoint": manifest.name, "run": manifest.run_id, **{k: str(v) for k, v in counts.items()}}
    write_weights(path, apart(weights), about | {"format": "pt"})
    left_out = {name: f"{type(value).__qualname__}, no tensor" for name, value in state.items() if name not in weights}
    return Written(path, manifest.name, tuple(weights), path.stat().st_size, left_out)


def _latest(store: Store, codec: Codec | None) -> tuple[Stored, dict[str, Any]]:
    """The newest checkpoint whose weights are intact. Meanwhile a run may remove some and add others."""
    for _ in range(_TRIES):
        found = list_checkpoints(store)
        if newer := [one.why for one in found if one.state == "of a newer format"]:
            raise NewerFormat(str(newer[-1]))
        listed = [one for one in found if one.state in ("committed", "damaged")]
        damaged = [f"{one.name}: {one.why}" for one in listed if one.state == "damaged"]
        candidates = [Stored(store, one.manifest) for one in listed if one.state == "committed" and one.manifest]
        candidates.sort(key=lambda stored: stored.manifest.ref().age, reverse=True)
        for stored in candidates:
            try:
                return _one(stored, codec)
            except Damaged as error:
                logger.warning("Checkpoint %s is damaged, and not taken: %s", stored.manifest.name, error)
                damaged.append(str(error))
            except NoSuchKey:
                continue  # removed meanwhile
        if not listed:
            raise NoSuchKey(f"There is no committed checkpoint in {store.name}.")
        if len(damaged) == len(listed):
            raise NoIntactCheckpoint(
                f"None of the {len(damaged)} checkpoints in {store.name} is intact: {'; '.join(damaged)}"
            )
    raise NoSuchKey(f"Checkpoints in {store.name} were removed faster than they could be read.")


def _one(stored: Stored, codec: Codec | None) -> tuple[Stored, dict[str, Any]]:
    """A checkpoint and its model's state, verified."""
    name = stored.manifest.name
    try:
        forms, big = forms_of(stored)
        if "model" not in big or "model" not in forms:
            raise Mismatch(f"Checkpoint {name} holds no model; it has {', '.join(sorted(forms))}.")
        tensors = codec_named(stored.manifest.codec, codec).read(["model"], stored)
        state = unflatten(forms["model"], tensors)
        if not isinstance(state, dict):
            raise Damaged(f"{name}/{GLOBAL} keeps the model as something else than a dict.")
    except Damaged:
        if not is_there(stored):
            raise NoSuchKey(f"Checkpoint {name} was removed while it was read.") from None
        raise
    return stored, state
