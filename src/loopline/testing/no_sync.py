"""A proof that nothing inside reads a tensor's value: on an accelerator each such read waits for the device."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["SyncFound", "no_sync"]


class SyncFound(AssertionError):
    """A tensor's value was read where nothing may wait for the device."""


@contextmanager
def no_sync() -> Iterator[None]:
    """Inside, whatever needs a tensor's value on the host raises SyncFound, naming the call and its line.

    That is: `item`, `tolist`, `float`, `int`, `bool`, use as an index, `numpy`, printing and formatting, a copy from a
    device to the cpu that waits, and what must look at values to know a shape (`nonzero`, a boolean mask as an index,
    `unique`, `torch.equal`, ...). On the cpu all this is free, but what is proved there holds for a device too.

    Allowed are the step counters that torch.optim keeps on the cpu and reads there. Not seen are other threads, bytes
    that are taken from a storage (as pickling does), `torch.cuda.synchronize`, and, in hooks on gradients, `tolist`,
    `numpy` and printing.

    An error that somebody inside has caught is raised once more at the end.

    >>> import torch
    >>> with no_sync():
    ...     mean = torch.stack([torch.tensor(1.0), torch.tensor(3.0)]).mean()
    >>> with no_sync():
    ...     mean.item()
    Traceback (most recent call last):
    loopline.testing.no_sync.SyncFound: torch.Tensor.item reads a tensor's value, at <doctest ...
    """
    found: list[SyncFound] = []
    calls: list[Callable[..., Any]] = []
    with ExitStack() as modes:
        modes.enter_context(_Calls(calls, found))
        modes.enter_context(_Kernels(calls, found))
        yield
    if found:
        raise found[0]


class _Calls(TorchFunctionMode):
    """Sees what is called on tensors in Python: some reads never reach a kernel."""

    def __init__(self, calls: list[Callable[..., Any]], found: list[SyncFound]) -> None:
        super().__init__()
        self.calls, self.found = calls, found

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _READS or _reads_items(func, args, kwargs):
            _tell(_name(func), _tensor_of(args), self.found)
        self.calls.append(func)
        try:
            return func(*args, **kwargs)
        finally:
            self.calls.pop()


class _Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what reaches a kernel, from wherever it was called."""

    def __init__(self, calls: list[Callable[..., Any]], found: list[SyncFound]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls, self.found = calls, found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _waits(func.overloadpacket.__name__, args, kwargs):
            _tell(_name(self.calls[-1]) if self.calls else str(func), _tensor_of(args), self.found)
        return func(*args, **kwargs)


_READS = frozenset(
    {
        Tensor.tolist,
        Tensor.numpy,
        Tensor.__array__,
        Tensor.__dlpack__,
        Tensor.__repr__,
        Tensor.__format__,
    }
)
_MAKERS = frozenset({torch.tensor, torch.as_tensor, torch.asarray})
_SPLITS = frozenset({torch.tensor_split, Tensor.tensor_split})
_KERNELS_THAT_READ = frozenset(
    {
        "_local_scalar_dense",
        "_unique2",
        "_unique",
        "allclose",
        "argwhere",
        "bincount",
        "equal",
        "is_nonzero",
        "item",
        "masked_select",
        "nonzero",
        "nonzero_numpy",
        "unique_consecutive",
        "unique_dim",
        "unique_dim_consecutive",
    }
)


def _reads_items(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether tensors in a list, or given as numbers, are read one by one without a kernel."""
    if func in _MAKERS:
        return bool(args) and isinstance(args[0], list | tuple) and _any_tensor(args[0])
    return func in _SPLITS and any(isinstance(given, Tensor) for given in [*args[1:], *kwargs.values()])


def _any_tensor(items: Any) -> bool:
    return any(isinstance(x, Tensor) or (isinstance(x, list | tuple) and _any_tensor(x)) for x in items)


def _waits(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a kernel must look at values before the host can go on."""
    match name:
        case "index" | "index_put" | "index_put_" | "_index_put_impl_":
            return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        case "linspace" | "logspace":
            return any(isinstance(end, Tensor) for end in args[:2])
        case "repeat_interleave":
            return kwargs.get("output_size") is None
        case "_to_copy" | "copy_":
            return _comes_home(name, args, kwargs)
        case _:
            return name in _KERNELS_THAT_READ


def _comes_home(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a tensor is copied from a device to the cpu, and the copy waited for."""
    if name == "_to_copy":
        to, source = kwargs.get("device"), args[0]
        device, non_blocking = (source.device if to is None else torch.device(to)), kwargs.get("non_blocking", False)
    else:
        device, source = args[0].device, args[1]
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    return device.type == "cpu" and source.device.type != "cpu" and not non_blocking


def _tell(call: str, tensor: Tensor | None, found: list[SyncFound]) -> None:
    frame, in_optimizer = _caller()
    if in_optimizer and (tensor is None or tensor.device.type == "cpu"):
        return
    name, number = frame.f_code.co_filename, frame.f_lineno
    line = linecache.getline(name, number, frame.f_globals).strip()
    error = SyncFound(f"{call} reads a tensor's value, at {name}:{number} in {frame.f_code.co_name}: {line}")
    found.append(error)
    raise error


_TORCH = str(Path(torch.__file__).parent)
_OPTIM = str(Path(_TORCH) / "optim")


def _caller() -> tuple[FrameType, bool]:
    """The innermost frame outside of torch, and whether torch.optim's own code lies between it and the read."""
    frame: FrameType | None = sys._getframe(1)
    in_optimizer = False
    last = sys._getframe(1)
    while frame is not None:
        last, name = frame, frame.f_code.co_filename
        if name != __file__ and not name.startswith(_TORCH):
            return frame, in_optimizer
        # a scheduler that is given a tensor reads the user's value, not a counter of its own
        in_optimizer = in_optimizer or (name.startswith(_OPTIM) and not name.endswith("lr_scheduler.py"))
        frame = frame.f_back
    return last, in_optimizer


def _tensor_of(args: tuple[Any, ...]) -> Tensor | None:
    return next((x for x in args if isinstance(x, Tensor)), None)


def _name(func: Callable[..., Any]) -> str:
    return str(resolve_name(func) or getattr(func, "__name__", repr(func)))
