"""How callbacks look at gradients: which there are, what they are called, how large they are. Nothing is read here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from ..core.run import Run
from ..loop import parameters

__all__ = ["names", "norms", "with_gradients"]

_NARROW = (torch.float16, torch.bfloat16)


def with_gradients(run: Run) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters that the optimizers are about to change, and the numbers of their gradients.

    Of a sparse gradient these are the ones that are stored.
    """
    changing: list[Tensor] = []
    gradients: list[Tensor] = []
    for parameter in parameters(run):
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.is_sparse:
            gradient = gradient.coalesce().values()
        if gradient.numel():
            changing.append(parameter)
            gradients.append(gradient)
    return changing, gradients


def norms(gradients: Sequence[Tensor], order: float) -> Tensor:
    """One vector with the norm of each; half precision is added up in float32, where it cannot overflow."""
    found: list[Tensor | None] = [None] * len(gradients)
    for narrow in (False, True):
        places = [i for i, gradient in enumerate(gradients) if (gradient.dtype in _NARROW) is narrow]
        if places:
            these = [gradients[i] for i in places]
            for i, norm in zip(
                places, torch._foreach_norm(these, order, torch.float32 if narrow else None), strict=True
            ):
                found[i] = norm
    device = gradients[0].device
    return torch.stack([norm.to(device) for norm in found if norm is not None])


def names(run: Run, wanted: Iterable[Tensor]) -> list[str]:
    """What the model calls these parameters; a number where it does not know them."""
    known = {id(parameter): name for name, parameter in run.model.named_parameters()} if _has_names(run.model) else {}
    return [known.get(id(parameter), f"parameter {i}") for i, parameter in enumerate(wanted)]


def _has_names(model: object) -> bool:
    return isinstance(model, nn.Module)
