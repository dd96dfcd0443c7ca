"""A task and loaders that are real, and so small that a fit takes milliseconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from ..core.run import Run
from ..task import Task

__all__ = ["TinyTask", "tiny_loader", "tiny_stream"]

INPUTS, CLASSES = 4, 2


class TinyTask(Task):
    """A linear layer that tells two classes apart, trained by SGD.

    The same seed gives the same weights, and making one draws nothing from torch's global random stream.

    >>> batch, *_ = tiny_loader()
    >>> TinyTask().predict_step(batch, None).shape
    torch.Size([2, 2])
    """

    def __init__(self, seed: int = 0, *, lr: float = 0.1, momentum: float = 0.0) -> None:
        self.model = nn.Linear(INPUTS, CLASSES, device="meta").to_empty(device="cpu")
        source = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.uniform_(-0.5, 0.5, generator=source)
        self.optimizer = SGD(self.model.parameters(), lr=lr, momentum=momentum)

    def optimizers(self) -> SGD:
        """Always the same optimizer, so that a second fit goes on with its state."""
        return self.optimizer

    def train_step(self, batch: Any, run: Run) -> Mapping[str, Tensor]:
        """The cross entropy of one batch."""
        x, y = batch
        output = self.model(x)
        return {"loss": cross_entropy(output, y), "output": output}

    def eval_step(self, batch: Any, run: Run) -> Mapping[str, Tensor]:
        """The cross entropy and the accuracy of one batch."""
        x, y = batch
        output = self.model(x)
        return {
            "loss": cross_entropy(output, y),
            "accuracy": (output.argmax(dim=1) == y).float().mean(),
            "output": output,
        }

    def predict_step(self, batch: Any, run: Run | None) -> Tensor:
        """The logits of one batch."""
        output: Tensor = self.model(batch[0] if isinstance(batch, tuple | list) else batch)
        return output


def tiny_loader(batches: int = 5, batch_size: int = 2, *, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """A list of (x, y) batches that a linear layer can learn; the same seed gives the same batches.

    >>> len(tiny_loader(batches=3))
    3
    """
    source = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(batch_size, INPUTS, generator=source) for _ in range(batches)]
    return [(x, (x.sum(dim=1) > 0).long()) for x in inputs]


def tiny_stream(batches: int = 5, batch_size: int = 2, *, seed: int = 0) -> _Stream:
    """The same batches as a loader that has no length, and can be read again.

    >>> stream = tiny_stream(batches=3)
    >>> len(list(stream)), len(list(stream)), hasattr(stream, "__len__")
    (3, 3, False)
    """
    return _Stream(tiny_loader(batches, batch_size, seed=seed))


class _Stream:
    def __init__(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self._batches)
