"""Where a model lives and how its numbers are kept: devices, processes, precision."""

from .base import Parts, Strategy, Traits, load_whole, plain_name, whole_state
from .precision import Bf16, Fp16, Fp32, Precision, precision_of
from .single import Single, strategy_of

__all__ = [
    "Bf16",
    "Fp16",
    "Fp32",
    "Parts",
    "Precision",
    "Single",
    "Strategy",
    "Traits",
    "load_whole",
    "plain_name",
    "precision_of",
    "strategy_of",
    "whole_state",
]
