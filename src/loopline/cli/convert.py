"""`loopline convert`: the weights in a file of torch or Lightning, as a safetensors file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import LooplineError
from ._screen import failed, holding, lines, safe

if TYPE_CHECKING:
    from ..checkpoint.weights import Written

__all__ = ["add_to", "run"]

_TIMES, _ROOM = 20, 2**30  # more than what convert_weights lets pass


def add_to(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `convert` to the command line."""
    parser = subparsers.add_parser(
        "convert",
        help="turn the weights in a .pt or .ckpt file into a safetensors file",
        description=lines(
            "Read the tensors of a .pt, .pth or .bin file (a state dict, or a dict that holds one), of a Lightning "
            ".ckpt, or of a .safetensors file, and write them as one safetensors file. Nothing that the file names is "
            "run: one that needs more than tensors and plain values is refused. What is no tensor is left out and "
            "listed."
        ),
        epilog="example: loopline convert epoch=9.ckpt weights.safetensors --strip model\n"
        "exit codes: 0 written, 1 could not be read or written, 2 wrong command line, 130 interrupted",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the file to read")
    parser.add_argument("path", type=Path, metavar="WEIGHTS", help="the file to write; its name ends with .safetensors")
    parser.add_argument(
        "--key",
        metavar="NAME",
        help="the entry that holds the tensors (default: state_dict, model_state_dict or model, else the file itself)",
    )
    parser.add_argument("--strip", metavar="MODULE", help="take this off the front of names, for example model")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")
    parser.add_argument("--json", action="store_true", help="say what was done as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Convert, and say what was written and what was left out."""
    from ..checkpoint import convert_weights

    try:
        with _bounded(args.file):
            written = convert_weights(args.file, args.path, key=args.key, strip=args.strip, force=args.force)
    except (LooplineError, OSError) as error:
        return failed("convert", error)
    print(_json(written) if args.json else _described(written))
    return 0


def _described(written: Written) -> str:
    lines = [f"Wrote {holding(written)} to {written.path}"]
    if written.left_out:
        lines.append("left out, for they are no tensors:")
        width = max(len(safe(name)) for name in written.left_out)
        lines += [f"  {safe(name):{width}}  {safe(what)}" for name, what in written.left_out.items()]
    return "\n".join(lines)


def _json(written: Written) -> str:
    said = {"path": str(written.path), "source": written.source, "size": written.size}
    return json.dumps({**said, "tensors": written.names, "left_out": dict(written.left_out)}, indent=2)


@contextmanager
def _bounded(file: Path) -> Iterator[None]:
    """Let this process take no more than some times the size of a file, where the system can see to that.

    Reading weights only runs no code, but a few hundred bytes can still ask for all the memory there is.
    """
    if not sys.platform.startswith("linux") or not file.is_file():
        yield
        return
    import resource

    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = pages * resource.getpagesize() + _TIMES * file.stat().st_size + _ROOM
    limits = [limit, *(given for given in (soft, hard) if given != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
