"""A PyTorch training library around one event timeline."""

from . import callbacks, loop
from .core import event as at
from .core.binding import Binding, Listener
from .core.callback import Callback, on
from .core.comm import Comm
from .core.errors import LooplineError, StopRun
from .core.event import Event
from .core.progress import Batch, Progress
from .core.run import Run, Scheduled
from .core.when import At, Every, Never, When
from .strategies import Bf16, Fp16, Fp32, Single
from .task import SupervisedTask, Task
from .trainer import Trainer

__version__ = "0.1.0"

__all__ = [
    "At",
    "Batch",
    "Bf16",
    "Binding",
    "Callback",
    "Comm",
    "Event",
    "Every",
    "Fp16",
    "Fp32",
    "Listener",
    "LooplineError",
    "Never",
    "Progress",
    "Run",
    "Scheduled",
    "Single",
    "StopRun",
    "SupervisedTask",
    "Task",
    "Trainer",
    "When",
    "at",
    "callbacks",
    "loop",
    "on",
]
