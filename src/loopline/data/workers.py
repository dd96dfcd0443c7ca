"""What is to be done when worker processes of a DataLoader are lost."""

from __future__ import annotations

from typing import Any

from torch.utils.data._utils import signal_handling

__all__ = ["end_workers", "lost_workers"]


def lost_workers(error: Exception) -> bool:
    """Whether an error tells of workers that died or hang; an error of a sample or of a sampler does not.

    torch says so itself, or fails to read what a dead worker has sent: which of the two is a matter of microseconds.
    """
    if isinstance(error, RuntimeError):
        return str(error).startswith("DataLoader ")
    return isinstance(error, OSError | EOFError) and "in DataLoader worker process" not in str(error)


def end_workers(batches: Any) -> None:
    """Kill what is left of the workers behind a DataLoader's iterator.

    As long as torch watches them, the death of each raises an error wherever this process happens to be, and for each
    that hangs it would wait five seconds.
    """
    if not getattr(batches, "_worker_pids_set", False):
        return
    signal_handling._remove_worker_pids(id(batches))  # type: ignore[attr-defined]
    batches._worker_pids_set = False
    for worker in batches._workers:
        worker.kill()
    batches._shutdown_workers()
