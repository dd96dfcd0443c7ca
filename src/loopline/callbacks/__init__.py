"""The callbacks that come with loopline, one file each; a file is read when its callback is first asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .callback_costs import CallbackCosts as CallbackCosts
    from .catch_meddling import CatchMeddling as CatchMeddling
    from .clip import ClipNorm as ClipNorm
    from .clip import ClipValue as ClipValue
    from .early_stopping import EarlyStopping as EarlyStopping
    from .gradient_stats import GradientStats as GradientStats
    from .keyed_steps import KeyedSteps as KeyedSteps
    from .lambda_ import Lambda as Lambda
    from .lr_monitor import LRMonitor as LRMonitor
    from .model_summary import ModelSummary as ModelSummary
    from .model_summary import summarize as summarize
    from .nan_guard import NaNGuard as NaNGuard
    from .preempt import Preempt as Preempt
    from .print_metrics import PrintMetrics as PrintMetrics
    from .progress_bar import ProgressBar as ProgressBar
    from .save_best import SaveBest as SaveBest
    from .stop_at import StopAt as StopAt
    from .strict import Strict as Strict
    from .subset import Subset as Subset
    from .time_limit import TimeLimit as TimeLimit

_ROOMS = {
    "CallbackCosts": "callback_costs",
    "CatchMeddling": "catch_meddling",
    "ClipNorm": "clip",
    "ClipValue": "clip",
    "EarlyStopping": "early_stopping",
    "GradientStats": "gradient_stats",
    "KeyedSteps": "keyed_steps",
    "LRMonitor": "lr_monitor",
    "Lambda": "lambda_",
    "ModelSummary": "model_summary",
    "NaNGuard": "nan_guard",
    "Preempt": "preempt",
    "PrintMetrics": "print_metrics",
    "ProgressBar": "progress_bar",
    "SaveBest": "save_best",
    "StopAt": "stop_at",
    "Strict": "strict",
    "Subset": "subset",
    "TimeLimit": "time_limit",
    "summarize": "model_summary",
}

__all__ = [
    "CallbackCosts",
    "CatchMeddling",
    "ClipNorm",
    "ClipValue",
    "EarlyStopping",
    "GradientStats",
    "KeyedSteps",
    "LRMonitor",
    "Lambda",
    "ModelSummary",
    "NaNGuard",
    "Preempt",
    "PrintMetrics",
    "ProgressBar",
    "SaveBest",
    "StopAt",
    "Strict",
    "Subset",
    "TimeLimit",
    "summarize",
]


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"loopline.callbacks has no {name!r}; it has {', '.join(__all__)}.")
    found = globals()[name] = getattr(import_module(f".{_ROOMS[name]}", __name__), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
