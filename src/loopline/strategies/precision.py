"""In which numbers the forward pass runs, and what that asks of the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch.amp import GradScaler

__all__ = ["Bf16", "Fp16", "Fp32", "Precision", "precision_of"]

F = TypeVar("F", bound=Callable[..., Any])


class Precision(Protocol):
    """The numbers of the forward pass."""

    def forward(self, function: F, device: torch.device) -> F:
        """The same function, run in this precision. Full precision gives it back as it is."""
        ...

    def scaler(self, device: torch.device) -> GradScaler | None:
        """What keeps small gradients from vanishing, where the numbers need it."""
        ...


class Fp32:
    """Full precision: nothing is touched."""

    def forward(self, function: F, device: torch.device) -> F:
        return function

    def scaler(self, device: torch.device) -> GradScaler | None:
        return None


class Bf16:
    """Autocast to bfloat16. Its range is that of float32, so gradients need no scaling."""

    def forward(self, function: F, device: torch.device) -> F:
        return _autocast(function, device, torch.bfloat16)

    def scaler(self, device: torch.device) -> GradScaler | None:
        return None


class Fp16:
    """Autocast to float16, with a gradient scaler.

    A step whose gradients overflow is left out, and the scale halved; after `growth_interval` good steps it doubles.
    """

    def __init__(self, *, init_scale: float = 2.0**16, growth_interval: int = 2000, scale: bool = True) -> None:
        self.init_scale = init_scale
        self.growth_interval = growth_interval
        self.scale = scale

    def forward(self, function: F, device: torch.device) -> F:
        return _autocast(function, device, torch.float16)

    def scaler(self, device: torch.device) -> GradScaler | None:
        if not self.scale:
            return None
        return GradScaler(device.type, init_scale=self.init_scale, growth_interval=self.growth_interval)


def precision_of(given: Precision | str) -> Precision:
    """The precision that a name stands for."""
    names: dict[str, Callable[[], Precision]] = {"fp32": Fp32, "bf16": Bf16, "fp16": Fp16}
    if not isinstance(given, str):
        if not hasattr(given, "scaler"):
            raise TypeError(f"precision={given!r}: give 'fp32', 'bf16', 'fp16', or a precision object.")
        return given
    if given not in names:
        raise ValueError(f"precision={given!r} is not known; it can be 'fp32', 'bf16', 'fp16' or an object of yours.")
    return names[given]()


def _autocast(function: F, device: torch.device, dtype: torch.dtype) -> F:
    @functools.wraps(function)
    def under_autocast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, dtype=dtype):
            return function(*args, **kwargs)

    return under_autocast  # type: ignore[return-value]
