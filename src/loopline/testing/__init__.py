"""What tests of callbacks, tasks and loops are written with: recordings, tiny real runs, ranks as threads."""

from .drive import Driven, drive
from .fake_comm import FakeComm, run_ranks
from .no_sync import SyncFound, no_sync
from .recorder import Recorder
from .replay import Asked, Replay, replay
from .store_contract import StoreContract
from .tiny import TinyTask, tiny_loader, tiny_stream

__all__ = [
    "Asked",
    "Driven",
    "FakeComm",
    "Recorder",
    "Replay",
    "StoreContract",
    "SyncFound",
    "TinyTask",
    "drive",
    "no_sync",
    "replay",
    "run_ranks",
    "tiny_loader",
    "tiny_stream",
]
