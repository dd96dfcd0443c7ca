"""Where metrics go: the screen, files, and other people's services."""

from .base import Record, Sink
from .console import ConsoleSink
from .csv import CsvSink
from .jsonl import JsonlSink
from .listener import Sinks

__all__ = ["ConsoleSink", "CsvSink", "JsonlSink", "Record", "Sink", "Sinks"]
