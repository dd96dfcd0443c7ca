"""Callbacks that come with loopline, one file each."""

from .callback_costs import CallbackCosts
from .clip import ClipNorm, ClipValue
from .early_stopping import EarlyStopping
from .gradient_stats import GradientStats
from .lambda_ import Lambda
from .lr_monitor import LRMonitor
from .model_summary import ModelSummary, summarize
from .nan_guard import NaNGuard
from .print_metrics import PrintMetrics
from .progress_bar import ProgressBar
from .save_best import SaveBest
from .stop_at import StopAt
from .subset import Subset
from .time_limit import TimeLimit

__all__ = [
    "CallbackCosts",
    "ClipNorm",
    "ClipValue",
    "EarlyStopping",
    "GradientStats",
    "LRMonitor",
    "Lambda",
    "ModelSummary",
    "NaNGuard",
    "PrintMetrics",
    "ProgressBar",
    "SaveBest",
    "StopAt",
    "Subset",
    "TimeLimit",
    "summarize",
]
