"""What a model is made of, as a table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..core.callback import Callback
from ..data import move
from ..randomness import untouched
from .print_metrics import say

if TYPE_CHECKING:
    from ..core.run import Run

__all__ = ["ModelSummary", "Summary", "SummaryRow", "summarize"]


class ModelSummary(Callback):
    """Prints a table of the model's modules when a fit starts.

    `depth` says how far down it looks: 0 is the whole model in one row. `example`, an input of the model (a tuple of
    arguments, a mapping of named ones, or the one argument), adds the shapes of what the modules give.
    """

    ranks = "zero"
    on_error = "disable"
    careful = True

    def __init__(self, depth: int = 2, *, example: Any = None, write: Callable[[str], object] | None = None) -> None:
        _check_depth(depth)
        self.depth = depth
        self._example = example
        self.write = write

    def on_fit_start(self, run: Run) -> None:
        summary = summarize(run.model, self.depth, example=self._example)
        (self.write or say)(f"{summary}\n")


def summarize(model: nn.Module, depth: int = 2, *, example: Any = None) -> Summary:
    """Count a model's parameters, module by module; `str()` of the result is a table.

    With an `example` the model is run once, in evaluation mode and without gradients; random streams and modes are
    given back as they were. A parameter that several modules share is counted where it is first met.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> summary = summarize(model, example=torch.zeros(1, 4))
    >>> summary.parameters, [row.shape for row in summary.rows]
    (58, ['1 x 2', '1 x 8', '1 x 8', '1 x 2'])
    """
    _check_depth(depth)
    if not isinstance(model, nn.Module):
        raise TypeError(f"summarize({type(model).__name__}): give a torch module.")
    model = _unwrapped(model)
    lazy = any(is_lazy(tensor) for tensor in _tensors(model))
    notes: list[str] = []
    shapes: dict[int, str] = {}
    if example is not None and lazy:
        notes.append("No shapes: a forward pass would initialise the lazy parameters.")
    elif example is not None:
        shapes = _shapes(model, example)
    counted: dict[int, str] = {}
    rows = list(_rows(model, "", depth, shapes, counted, {}))
    whole = rows[0]
    buffers = list(_unique(model.buffers()))
    if lazy:
        notes.append("Lazy parameters are counted once they are initialised, by a first forward pass.")
    return Summary(
        rows=rows,
        parameters=whole.parameters,
        trainable=whole.trainable,
        buffers=sum(buffer.numel() for buffer in buffers if not is_lazy(buffer)),
        bytes=whole.bytes,
        notes=notes,
    )


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """One module: its numbers include its children's, and leave out what was counted further up the table."""

    path: str
    type: str
    depth: int
    parameters: int
    trainable: int
    bytes: int
    shape: str | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Summary:
    """A model in numbers. `bytes` is what its parameters and buffers take."""

    rows: list[SummaryRow]
    parameters: int
    trainable: int
    buffers: int
    bytes: int
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        shapes = any(row.shape for row in self.rows)
        frozen = self.parameters - self.trainable
        words = ["module", "type", *(["output"] if shapes else [])]
        table = [[*words, "parameters", *(["trainable"] if frozen else []), "MB", ""]]
        for row in self.rows:
            name = "  " * row.depth + (row.path.rpartition(".")[2] or "(model)")
            share = f"{row.trainable / row.parameters:.0%}" if row.parameters else "-"
            numbers = [f"{row.parameters:,}", *([share] if frozen else []), _megabytes(row.bytes)]
            table.append([name, row.type, *([row.shape or "-"] if shapes else []), *numbers, row.note])
        widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
        lines = [
            "  ".join(
                # words stand left, numbers right
                f"{cell:<{width}}" if place < len(words) or place == len(line) - 1 else f"{cell:>{width}}"
                for place, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in table
        ]
        total = f"{self.parameters:,} parameters"
        total += f", {self.trainable:,} trainable, {frozen:,} frozen" if frozen else ", all trainable"
        total += f"; {self.buffers:,} numbers in buffers" if self.buffers else ""
        return "\n".join([*lines, f"{total}; {_megabytes(self.bytes)} MB", *self.notes])


def _check_depth(depth: object) -> None:
    if not isinstance(depth, int) or isinstance(depth, bool) or depth < 0:
        raise ValueError(f"depth={depth!r}: give a whole number, 0 or more; 0 is the whole model in one row.")


def _rows(
    module: nn.Module,
    path: str,
    depth: int,
    shapes: Mapping[int, str],
    counted: dict[int, str],
    seen: dict[int, str],
) -> Iterator[SummaryRow]:
    """A module's row and those below it; `counted` and `seen` say where a tensor or a module was first met."""
    level = path.count(".") + 1 if path else 0
    type_name = type(module).__name__
    if first := seen.get(id(module)):
        yield SummaryRow(path, type_name, level, 0, 0, 0, shapes.get(id(module)), f"the same module as {first}")
        return
    seen[id(module)] = path or "(model)"
    before = dict(counted)
    tensors = list(_unique(_tensors(module)))
    own = [tensor for tensor in tensors if id(tensor) not in counted]
    parameters = [tensor for tensor in own if isinstance(tensor, nn.Parameter) and not is_lazy(tensor)]
    notes = []
    if count := sum(is_lazy(tensor) for tensor in own):
        notes.append(f"{count} not initialised yet")
    # the root shares with nobody, and a parent's sharing is told by its children where they have rows
    if path and (level == depth or not any(module.children())):
        notes += _shared(tensors, before)
    yield SummaryRow(
        path,
        type_name,
        level,
        sum(parameter.numel() for parameter in parameters),
        sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        sum(tensor.numel() * tensor.element_size() for tensor in own if not is_lazy(tensor)),
        shapes.get(id(module)),
        ", ".join(notes),
    )
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        counted.setdefault(id(tensor), path or "(model)")
    for name, child in module._modules.items():  # named_children leaves out a module's second place
        if child is None:
            continue
        below = f"{path}.{name}" if path else name
        if level < depth:
            yield from _rows(_unwrapped(child), below, depth, shapes, counted, seen)
    for tensor in tensors:
        counted.setdefault(id(tensor), path or "(model)")


def _shared(tensors: list[Tensor], counted: Mapping[int, str]) -> list[str]:
    places: dict[str, int] = {}
    for tensor in tensors:
        if id(tensor) in counted and isinstance(tensor, nn.Parameter) and not is_lazy(tensor):
            place = counted[id(tensor)]
            places[place] = places.get(place, 0) + tensor.numel()
    return [f"shares {count:,} with {place}" for place, count in places.items()]


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _unique(tensors: Iterator[Tensor]) -> Iterator[Tensor]:
    yield from {id(tensor): tensor for tensor in tensors}.values()


def _unwrapped(module: nn.Module) -> nn.Module:
    """The module that the user wrote, out of what torch.compile and data parallelism put around it."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if inner is None and isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = module.module
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def _shapes(model: nn.Module, example: Any) -> dict[int, str]:
    """Run the model once and note the shape of what each module gives first."""
    shapes: dict[int, str] = {}

    def note(module: nn.Module, args: Any, output: Any) -> None:
        shapes.setdefault(id(module), _shape(output))

    first = next(iter(_tensors(model)), None)
    if first is not None:
        example = move(example, first.device)
    modes = [(module, module.training) for module in model.modules()]
    with ExitStack() as back:
        back.enter_context(untouched())
        back.enter_context(torch.no_grad())
        if "torch._dynamo" in sys.modules:  # where something may be compiled: one pass is not worth compiling for
            back.enter_context(torch.compiler.set_stance("force_eager"))
        for module, training in modes:
            back.callback(setattr, module, "training", training)
            back.callback(module.register_forward_hook(note).remove)
        model.eval()
        if isinstance(example, Mapping):
            model(**example)
        elif isinstance(example, tuple):
            model(*example)
        else:
            model(example)
    return shapes


def _shape(output: Any) -> str:
    match output:
        case Tensor():
            return " x ".join(map(str, output.shape)) or "a number"
        case tuple() | list():
            return ", ".join(f"({_shape(item)})" for item in output)
        case Mapping():
            return ", ".join(f"{name}: ({_shape(item)})" for name, item in output.items())
        case _:
            return type(output).__name__


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.2f}" if count >= 5000 or count == 0 else f"{count / 1e6:.4f}"
