"""What stands between a user's loader and the loop: sizes, lengths, devices, and the exact order of samples."""

from .batches import move, size_of, trusted_length
from .exact import Exact, exactly
from .fingerprint import fingerprint_of_files
from .keys import key
from .loader import Placed
from .order import Permutation
from .position import start, state_of
from .resumable import Report, check_resumable

__all__ = [
    "Exact",
    "Permutation",
    "Placed",
    "Report",
    "check_resumable",
    "exactly",
    "fingerprint_of_files",
    "key",
    "move",
    "size_of",
    "start",
    "state_of",
    "trusted_length",
]
