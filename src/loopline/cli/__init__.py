"""The command line. Each command is a module with `add_to(subparsers)` and `run(args) -> int`, its exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Protocol

from .. import __version__
from . import checkpoints, convert, demo

__all__ = ["COMMANDS", "Command", "main", "parser"]


class Command(Protocol):
    """What a module in this folder offers. It is imported with the others, so costly imports belong into `run`."""

    def add_to(self, subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
        """Add a parser that says `set_defaults(run=run)`."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Do it, and give the exit code: 0 for success, 1 for failure."""
        ...


COMMANDS: tuple[Command, ...] = (demo, checkpoints, convert)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 2 for a wrong command line and 130 after Ctrl-C."""
    args = parser().parse_args(argv)
    if args.run is None:
        parser().print_help()
        return 0
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, `head` say, has seen enough; what is left must not fail at exit once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    whole = argparse.ArgumentParser(
        prog="loopline",
        description="Train PyTorch models around one event timeline.",
        epilog="Begin with: loopline demo",
    )
    whole.add_argument("--version", action="version", version=f"loopline {__version__}")
    whole.set_defaults(run=None)
    subparsers = whole.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(subparsers)
    return whole
