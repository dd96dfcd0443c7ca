"""`loopline checkpoints`: what a run has saved, whether it is intact, and the weights in it."""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import json
import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from ..core.errors import Damaged, Exit, LooplineError, NoSuchKey, StoreError
from ._screen import failed, holding, lines, safe, screen, size_said

if TYPE_CHECKING:
    from ..checkpoint import Listed, Manifest
    from ..checkpoint.contents import Shape
    from ..stores import Store

__all__ = ["add_to", "run"]

_STYLES = {"damaged": "red", "of a newer format": "red", "set aside": "yellow", "committed": ""}
_METRICS = 6


def add_to(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `checkpoints` to the command line."""
    parser = subparsers.add_parser(
        "checkpoints",
        help="list and verify the checkpoints of a run, or export weights",
        description=lines(
            "List the checkpoints of a run, look into one, or write the weights of one as a safetensors file. Nothing "
            "is written into the run's folder, and a run may train into it meanwhile."
        ),
        epilog="examples:\n"
        "  loopline checkpoints runs/1 --verify\n"
        "  loopline checkpoints runs/1 --show 1500\n"
        "  loopline checkpoints runs/1 --export best.safetensors --from best\n"
        "exit codes: 0 done, 1 not done, or with --verify one is damaged, 2 wrong command line, 74 none is intact, "
        "130 interrupted",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("place", metavar="RUN", help="the run's folder, or its URL, such as s3://bucket/runs/1")
    parser.add_argument("--verify", action="store_true", help="read every file and compare it with its hash")
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--show", metavar="CHECKPOINT", help="show what is in one: its name, step, pin, or latest")
    one.add_argument(
        "--export", type=Path, metavar="WEIGHTS", help="write a model's weights; the file ends .safetensors"
    )
    parser.add_argument(
        "--from",
        dest="source",
        metavar="CHECKPOINT",
        help="which one to export: its name, its step, best or another pin, or latest, the newest intact (default)",
    )
    parser.add_argument("--force", action="store_true", help="let --export replace a file that is there")
    parser.add_argument("--json", action="store_true", help="say it as JSON")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """List, show or export."""
    if args.export is None and (args.source is not None or args.force):
        args.parser.error("--from and --force belong to --export WEIGHTS")
    if args.export is not None and args.verify:
        args.parser.error("--export verifies what it reads; --verify does not go with it")
    try:
        store = _store(args.place)
        if args.export is not None:
            return _export(store, args)
        return _show(store, args) if args.show is not None else _list(store, args)
    except Exit as error:
        return failed("checkpoints", error, int(error.code or 1))
    except (LooplineError, OSError) as error:
        return failed("checkpoints", error)


def _store(place: str) -> Store:
    from ..stores import store_of

    if "://" not in place and not Path(place).exists():
        raise StoreError(f"There is no folder {place}.")
    return store_of(place)


def _list(store: Store, args: argparse.Namespace) -> int:
    from ..checkpoint import list_checkpoints

    found = list_checkpoints(store, verify=args.verify)
    if not found:
        folder = store.folder
        inside = f" Give the run's own folder: {folder.parent}" if folder and folder.name == "checkpoints" else ""
        raise NoSuchKey(f"There are no checkpoints in {args.place}.{inside}")
    if args.json:
        said = {"store": store.name, "verified": args.verify, "checkpoints": [_record(listed) for listed in found]}
        print(json.dumps(said, indent=2))
    else:
        _print_table(found, args)
    return _verdict(found) if args.verify else 0


def _verdict(found: list[Listed]) -> int:
    states = {listed.state for listed in found}
    if not states & {"committed", "of another run"}:
        return 74 if states & {"damaged", "set aside"} else 1
    return 1 if "damaged" in states else 0


def _print_table(found: list[Listed], args: argparse.Namespace) -> None:
    console = screen()
    rows = [_cells(listed) for listed in found]
    heads = ["checkpoint", "step", "epochs", "samples", "size", "written (UTC)"]
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    while sum(widths) + 2 * len(widths) > console.width:
        widths.pop()
    notes = [list(_notes(listed)) for listed in found]
    room = console.width - sum(widths) - 2 * len(widths) - 3
    beside = all(len("  ".join(note)) <= room for note in notes)
    console.print(Text(_headline(found, args), "bold"))
    console.print(Text("  " + _row(heads, widths), "dim"))
    for listed, cells, note in zip(found, rows, notes, strict=True):
        style = "bold green" if listed.newest else _STYLES.get(listed.state, "dim")
        line = Text(f"{'*' if listed.newest else ' '} {_row(cells, widths)}", style)
        if beside:
            console.print(line.append(f"   {'  '.join(note)}", "" if listed.newest else style))
            continue
        console.print(line)
        for part in _wrapped(note, max(20, console.width - 6)):
            console.print(Text(f"      {part}", _STYLES.get(listed.state) or "dim"))


def _headline(found: list[Listed], args: argparse.Namespace) -> str:
    states = Counter("intact" if args.verify and one.state == "committed" else one.state for one in found)
    counts = ", ".join(f"{count} {state}" for state, count in states.most_common())
    return f"{safe(args.place)}: {counts}{'' if args.verify else ' (not verified)'}"


def _row(cells: list[str], widths: list[int]) -> str:
    """The first to the left, as names are, the others to the right."""
    first, *others = (
        cell.ljust(width) if i == 0 else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=False))
    )
    return "  ".join([first, *others])


def _cells(listed: Listed) -> list[str]:
    manifest = listed.manifest
    if manifest is None:
        return [listed.name, str(listed.step), "-", "-", "-", "-"]
    counts = [str(manifest.step), str(manifest.epochs), str(manifest.samples)]
    return [listed.name, *counts, size_said(manifest.size), _time(manifest.created)]


def _notes(listed: Listed) -> Iterator[str]:
    """What is to be said of one beside its figures."""
    if listed.newest:
        yield "newest"
    if listed.state != "committed":
        yield listed.state + (f": {safe(listed.why)}" if listed.why else "")
    if listed.pins:
        yield f"pinned as {', '.join(listed.pins)}"
    if listed.manifest is not None:
        yield f"saved: {safe(listed.manifest.reason)}"
        metrics = [f"{safe(name)} {value:.4g}" for name, value in sorted(listed.manifest.metrics.items())]
        yield from metrics[:_METRICS]
        if len(metrics) > _METRICS:
            yield f"and {len(metrics) - _METRICS} more"


def _wrapped(notes: list[str], width: int) -> list[str]:
    """Notes in lines; a metric and its value stay together."""
    found = [""]
    for note in notes:
        for piece in textwrap.wrap(note, width):
            if found[-1] and len(found[-1]) + 2 + len(piece) > width:
                found.append("")
            found[-1] += ("  " if found[-1] else "") + piece
    return found


def _show(store: Store, args: argparse.Namespace) -> int:
    from ..checkpoint.contents import contents
    from ..checkpoint.listing import find, is_there

    stored = find(store, args.show)
    damage = stored.damage() if args.verify else None
    try:
        sections = contents(stored)
    except Damaged as error:
        sections, damage = {}, damage or str(error)
    if damage is not None and not is_there(stored):
        raise NoSuchKey(f"Checkpoint {stored.manifest.name} was removed while it was read.")
    if args.json:
        said = {**_manifest_record(stored.manifest), "damage": damage, "sections": _shapes(sections)}
        print(json.dumps({**said, "verified": args.verify}, indent=2))
    else:
        console = screen()
        for line in _described(stored.manifest, sections):
            console.print(line)
        if damage is not None:
            console.print(Text(f"damaged: {safe(damage)}", "bold red"))
        elif args.verify:
            console.print(Text("intact: every file was read and compared", "bold green"))
    return 0 if damage is None else 1


def _described(manifest: Manifest, sections: Mapping[str, Mapping[str, Shape]]) -> Iterator[Text]:
    processes = f"{manifest.world_size} process{'es' * (manifest.world_size != 1)}"
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    facts = {
        "saved": f"{manifest.reason}, {manifest.created}",
        "progress": f"step {manifest.step}, {manifest.epochs} epochs, {manifest.samples} samples",
        "run": f"{manifest.run_id}, by {processes}",
        "order": f"serial {manifest.serial}, fencing {manifest.fencing}, parent {manifest.parent or 'none'}",
        "with": versions,
        "format": f"{manifest.format[0]}.{manifest.format[1]}, tensors by codec {manifest.codec}",
        "metrics": "  ".join(f"{name} {value:.6g}" for name, value in sorted(manifest.metrics.items())) or "none",
    }
    yield Text(manifest.name, "bold")
    for name, fact in facts.items():
        yield Text.assemble((f"  {name:9} ", "dim"), safe(fact))
    yield Text.assemble(("files", "bold"), (f"  with {manifest.hash}", "dim"))
    width = max((len(path) for path in manifest.files), default=0)
    for path, file in sorted(manifest.files.items()):
        yield Text.assemble(f"  {path:{width}}  {size_said(file.size):>8}  ", (file.hash, "dim"))
    if sections:
        yield Text("sections", "bold")
    for section, tensors in sections.items():
        size = sum(shape.nbytes for shape in tensors.values())
        count = f"{len(tensors)} tensor{'s' * (len(tensors) != 1)}, {size_said(size)}" if tensors else "no tensors"
        yield Text.assemble(f"  {safe(section)}  ", (count, "dim"))
        width = max((len(safe(name)) for name in tensors), default=0)
        for name, shape in tensors.items():
            yield Text.assemble(f"    {safe(name):{width}}  ", (str(shape), "dim"))


def _export(store: Store, args: argparse.Namespace) -> int:
    from ..checkpoint import export_weights

    written = export_weights(store, args.source or "latest", args.export, force=args.force)
    if args.json:
        said = {"path": str(written.path), "checkpoint": written.source, "size": written.size}
        print(json.dumps({**said, "tensors": written.names, "left_out": dict(written.left_out)}, indent=2))
        return 0
    print(f"Wrote {holding(written)} of checkpoint {written.source} to {written.path}")
    for name, what in written.left_out.items():
        print(f"left out: {safe(name)} ({safe(what)})")
    return 0


def _record(listed: Listed) -> dict[str, Any]:
    said: dict[str, Any] = {"name": listed.name, "state": listed.state, "why": listed.why}
    said |= {"newest": listed.newest, "pins": listed.pins, "step": listed.step}
    return said | ({} if listed.manifest is None else _manifest_record(listed.manifest))


def _manifest_record(manifest: Manifest) -> dict[str, Any]:
    said = dataclasses.asdict(manifest)
    metrics = {name: value if math.isfinite(value) else repr(value) for name, value in manifest.metrics.items()}
    return {**said, "metrics": metrics, "size": manifest.size}


def _shapes(sections: Mapping[str, Mapping[str, Shape]]) -> dict[str, Any]:
    return {
        section: {name: {"dtype": shape.dtype, "shape": shape.sizes} for name, shape in tensors.items()}
        for section, tensors in sections.items()
    }


def _time(created: str) -> str:
    try:
        when = dt.datetime.fromisoformat(created).astimezone(dt.UTC)
    except (ValueError, OverflowError):
        return "-"
    return when.strftime("%Y-%m-%d %H:%M")
