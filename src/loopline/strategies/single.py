"""One process, one device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from ..core.comm import ALONE, Comm
from .base import Parts, Strategy, Traits, load_whole, whole_state

__all__ = ["Single", "strategy_of"]


class Single:
    """The whole model on one device: "auto" takes cuda, else mps, else the cpu."""

    comm: Comm = ALONE
    traits = Traits()

    def __init__(self, device: str | torch.device = "auto") -> None:
        self.device = _device(device)

    def place(self, parts: Parts) -> Parts:
        parts.model.to(self.device)
        for optimizer in parts.optimizers:
            if any(v.device != self.device for s in optimizer.state.values() for v in s.values() if _travels(v)):
                optimizer.load_state_dict(optimizer.state_dict())  # this moves state to its parameters' device
        return parts

    def unfinished_window(self, parts: Parts) -> AbstractContextManager[None]:
        return nullcontext()

    def clip(self, parts: Parts, max_norm: float) -> Tensor:
        groups = [group["params"] for optimizer in parts.optimizers for group in optimizer.param_groups]
        moving = [p for group in groups for p in group] or parts.model.parameters()
        norm: Tensor = clip_grad_norm_(moving, max_norm)
        return norm

    def state(self, parts: Parts) -> dict[str, Any]:
        return whole_state(parts.model, parts.optimizers)

    def load_state(self, parts: Parts, state: dict[str, Any], *, strict: bool = True) -> None:
        load_whole(parts.model, parts.optimizers, state, strict=strict)

    def close(self) -> None:
        return None


def strategy_of(given: Strategy | str | torch.device) -> Strategy:
    """The strategy that a name stands for: "auto", "single", or a device such as "cpu" or "cuda:1"."""
    if isinstance(given, str) and given in ("auto", "single"):
        return Single("auto")
    if isinstance(given, str | torch.device):
        return Single(given)
    if not hasattr(given, "place"):
        raise TypeError(f"strategy={given!r}: give 'auto', 'single', a device such as 'cpu', or a strategy object.")
    return given


def _device(given: str | torch.device) -> torch.device:
    if given == "auto":
        best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        given = best
    try:
        device = torch.device(given)
    except RuntimeError as error:
        raise ValueError(
            f"{given!r} is neither a strategy (auto, single) nor a device (auto, cpu, cuda, cuda:1, mps)."
        ) from error
    absent = device.type == "cuda" and not torch.cuda.is_available()
    if absent or (device.type == "mps" and not torch.backends.mps.is_available()):
        raise ValueError(f"The device {str(device)!r} was asked for, but torch finds none here; use 'auto' or 'cpu'.")
    if device == torch.device("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _travels(value: object) -> bool:
    # a step counter may stay on the cpu by design
    return isinstance(value, Tensor) and value.dim() > 0
