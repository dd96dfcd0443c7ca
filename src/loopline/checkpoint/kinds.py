"""What tensors in a file may be: their types, by their names in the safetensors format, and their dimensions."""

from __future__ import annotations

import torch

__all__ = ["DIMENSIONS", "KINDS", "NAMES"]

DIMENSIONS = 64  # torch copies no more of them

KINDS = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
NAMES = {kind: name for name, kind in KINDS.items()}
