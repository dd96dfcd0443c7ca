from __future__ import annotations

import contextlib
import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ReduceLROnPlateau

from loopline.testing import SyncFound, no_sync

READS = {
    "item": lambda t: t.x.item(),
    "tolist": lambda t: t.v.tolist(),
    "tolist of a scalar": lambda t: t.x.tolist(),
    "float": lambda t: float(t.x),
    "int": lambda t: int(t.x),
    "bool": lambda t: bool(t.x),
    "complex": lambda t: complex(t.x),
    "if": lambda t: 1 if t.x > 0 else 2,
    "not": lambda t: not t.x,
    "max of Python": lambda t: max(t.x, t.x + 1),
    "sorted": lambda t: sorted([t.x, t.x + 1]),
    "in": lambda t: 2.0 in t.v,
    "in a list": lambda t: t.x in [torch.ones(())],
    "index of a list": lambda t: [1, 2, 3][t.i],
    "range": lambda t: range(t.i),
    "slice": lambda t: t.v[: t.i],
    "select": lambda t: t.v[t.i],
    "math": lambda t: math.sqrt(t.x),
    "numpy": lambda t: t.v.numpy(),
    "numpy of a parameter": lambda t: t.p.detach().numpy(),
    "np.asarray": lambda t: np.asarray(t.v),
    "dlpack": lambda t: np.from_dlpack(t.v),
    "repr": lambda t: repr(t.v),
    "str": lambda t: str(t.x),
    "print": lambda t: print(t.v),  # noqa: T201
    "repr of a parameter": lambda t: repr(t.p),
    "repr of a list": lambda t: repr([t.x]),
    "f-string": lambda t: f"{t.x}",
    "f-string with digits": lambda t: f"{t.x:.3f}",
    "f-string of a vector": lambda t: f"{t.v}",
    "percent": lambda t: "%.2f" % t.x,  # noqa: UP031
    "format": lambda t: "{:.2f}".format(t.x),  # noqa: UP032
    "cpu": lambda t: t.away.cpu(),
    "to cpu": lambda t: t.away.to("cpu"),
    "to a device of cpu": lambda t: t.away.to(torch.device("cpu"), torch.float64),
    "to another tensor": lambda t: t.away.to(t.v),
    "copy to cpu": lambda t: torch.empty(2).copy_(t.away),
    "nonzero": lambda t: t.v.nonzero(),
    "torch.nonzero": lambda t: torch.nonzero(t.v),
    "where of one": lambda t: torch.where(t.v > 1),
    "argwhere": lambda t: torch.argwhere(t.v),
    "is_nonzero": lambda t: torch.is_nonzero(t.x),
    "mask": lambda t: t.v[t.v > 1],
    "masked_select": lambda t: t.v.masked_select(t.v > 1),
    "write by mask": lambda t: t.v.__setitem__(t.v > 1, torch.zeros(1)),
    "unique": lambda t: t.v.unique(),
    "unique by dimension": lambda t: torch.unique(t.v.reshape(3, 1), dim=0),
    "bincount": lambda t: torch.bincount(t.v.long()),
    "equal": lambda t: torch.equal(t.v, t.v),
    "method equal": lambda t: t.v.equal(t.v + 1),
    "allclose": lambda t: torch.allclose(t.v, t.v),
    "repeat_interleave": lambda t: torch.repeat_interleave(t.v, t.v.long()),
    "tensor_split": lambda t: t.v.tensor_split(t.one),
    "full": lambda t: torch.full((2,), t.x),
    "linspace": lambda t: torch.linspace(0, t.x, 3),
    "alpha": lambda t: torch.add(t.v, t.v, alpha=t.x),
    "a tensor of tensors": lambda t: torch.tensor([t.x, t.x]),
    "as_tensor of tensors": lambda t: torch.as_tensor([[t.x], [t.x]]),
    "clip that looks": lambda t: nn.utils.clip_grad_norm_([t.p], 1.0, error_if_nonfinite=True),
    "plateau": lambda t: ReduceLROnPlateau(SGD([t.p], lr=0.1)).step(t.x),
    "any of Python": lambda t: any(t.v),
    "or": lambda t: t.v.sum() or None,
}

FINE = {
    "stack": lambda t: torch.stack([t.x, t.x]).mean(),
    "arithmetic": lambda t: (t.v * 2 + t.x) / 3,
    "compare": lambda t: (t.v > 1).float().mean(),
    "where of three": lambda t: torch.where(t.v > 1, t.v, 0),
    "masked_fill": lambda t: t.v.masked_fill(t.v > 1, 0.0),
    "index by a tensor": lambda t: t.v[torch.tensor([0, 1])],
    "argmax": lambda t: t.v.argmax(),
    "shape": lambda t: (t.v.shape, len(t.v), t.v.dim(), t.v.numel(), t.v.dtype, t.v.requires_grad),
    "detach": lambda t: t.p.detach().data,
    "clone": lambda t: t.v.clone(),
    "deepcopy": lambda t: copy.deepcopy(t.v),
    "iterate": lambda t: list(t.v),
    "sum of Python": lambda t: sum(t.v),
    "backward": lambda t: (t.p * 2).sum().backward(),
    "clip": lambda t: nn.utils.clip_grad_norm_([t.p], 1.0),
    "foreach with a tensor": lambda t: torch._foreach_div_([t.v.clone()], t.x),
    "tensor of numbers": lambda t: torch.tensor([1.0, 2.0]),
    "as_tensor of a tensor": lambda t: torch.as_tensor(t.x, dtype=torch.float64),
    "cpu to cpu": lambda t: (t.v.cpu(), t.v.to("cpu"), t.v.to(torch.float64)),
    "to a device": lambda t: t.v.to("meta"),
    "a copy that nobody waits for": lambda t: torch.empty(2, device="meta").copy_(t.v[:2], non_blocking=True),
    "is None": lambda t: t.v.grad is None,
    "hash": lambda t: {t.v: 1}[t.v],
    "state dict": lambda t: nn.Linear(2, 2).state_dict(),
    "repeat_interleave of known size": lambda t: torch.repeat_interleave(t.v, torch.tensor([1, 1, 1]), output_size=3),
}


class Tensors:
    def __init__(self):
        self.x = torch.tensor(2.0)
        self.i = torch.tensor(1)
        self.one = torch.tensor([1])
        self.v = torch.arange(3.0)
        self.p = nn.Parameter(torch.ones(2))
        self.p.grad = torch.ones(2)
        self.away = torch.empty(2, device="meta")  # stands for a device: the cpu has no other here


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_read_is_found(read):
    tensors = Tensors()
    with pytest.raises(SyncFound), no_sync():
        read(tensors)


@pytest.mark.parametrize("call", FINE.values(), ids=FINE)
def test_what_reads_nothing_is_left_alone(call):
    tensors = Tensors()
    with no_sync():
        call(tensors)


def test_the_call_and_its_line_are_named():
    loss = torch.tensor(1.0)
    with pytest.raises(SyncFound) as caught, no_sync():
        loss.item()
    words = str(caught.value)
    assert words.startswith(f"torch.Tensor.item reads a tensor's value, at {__file__}:")
    assert words.endswith("in test_the_call_and_its_line_are_named: loss.item()")


@pytest.mark.parametrize("optimizer", [SGD, Adam])
@pytest.mark.parametrize("foreach", [True, False])
def test_the_step_counters_of_torchs_optimizers_are_allowed(optimizer, foreach):
    parameter = nn.Parameter(torch.ones(2))
    steps = optimizer([parameter], lr=0.1, foreach=foreach)
    with no_sync():
        for _ in range(2):
            parameter.square().sum().backward()
            steps.step()
            steps.zero_grad()


def test_a_read_in_a_closure_that_an_optimizer_calls_is_found():
    parameter = nn.Parameter(torch.ones(2))

    def closure():
        loss = parameter.sum()
        return loss.item()

    with pytest.raises(SyncFound, match=r"in closure: return loss.item\(\)"), no_sync():
        SGD([parameter], lr=0.1).step(closure)


def test_a_read_in_a_hook_on_a_gradient_is_found():
    parameter = nn.Parameter(torch.ones(2))
    parameter.register_hook(lambda grad: grad.sum().item() and None)
    with pytest.raises(SyncFound), no_sync():
        parameter.sum().backward()


def test_a_read_in_a_forward_hook_is_found():
    model = nn.Linear(2, 2)
    model.register_forward_hook(lambda module, args, output: output.tolist() and None)
    with pytest.raises(SyncFound, match=r"torch.Tensor.tolist"), no_sync():
        model(torch.ones(1, 2))


def swallowed():
    with contextlib.suppress(AssertionError):
        torch.tensor(1.0).item()


def test_a_read_whose_error_was_caught_is_raised_at_the_end():
    with pytest.raises(SyncFound, match=r"torch.Tensor.item"), no_sync():
        swallowed()


def test_an_error_inside_is_not_replaced():
    def fails():
        swallowed()
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"), no_sync():
        fails()


def test_afterwards_reading_is_allowed_again():
    with no_sync():
        mean = torch.ones(2).mean()
    assert mean.item() == 1.0


def test_it_may_be_nested():
    with pytest.raises(SyncFound), no_sync(), no_sync():
        torch.tensor(1.0).item()
