"""What stands between a user's loader and the loop: sizes, lengths, devices."""

from .batches import move, size_of, trusted_length
from .loader import Placed

__all__ = ["Placed", "move", "size_of", "trusted_length"]
