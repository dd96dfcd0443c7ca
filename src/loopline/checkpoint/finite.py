"""Whether a state is fit to be gone on from."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["not_finite"]


def not_finite(tensors: Iterable[tuple[str, Tensor, bool]]) -> str | None:
    """The first name whose tensor holds a NaN, or an infinity where none is allowed; None where all is well."""
    return next((name for name, tensor, inf_allowed in tensors if _broken(tensor, inf_allowed)), None)


def _broken(tensor: Tensor, inf_allowed: bool) -> bool:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point():
        return False
    if not tensor.numel():
        return False
    low, high = torch.aminmax(tensor.float() if tensor.dtype.itemsize == 1 else tensor)
    if bool(low.isnan()):
        return True
    return not inf_allowed and bool(low.isinf() or high.isinf())
