"""Tensors in pieces, as torch's distributed checkpoint (DCP) plans them, kept in files that hold no pickle.

DCP says which process writes which piece, lets only one write what several hold, and finds the pieces that a process
needs which cuts the tensors differently. Its storage is not used: it has no checksums, and reads its plan with pickle.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (  # noqa: TID251 - here alone
    DefaultLoadPlanner,
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.metadata import (  # noqa: TID251 - here alone
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (  # noqa: TID251 - here alone
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import (  # noqa: TID251 - here alone
    StorageReader,
    StorageWriter,
    WriteResult,
)
from torch.futures import Future

from ..core.comm import ALONE, Comm
from ..core.errors import CannotSave, Damaged, Mismatch, StoreError
from .blocks import KINDS, NAMES, Blocks, tensors_of
from .codec import Reads, Writes
from .tree import TEXT_LIMIT, loads

__all__ = ["Dcp", "METADATA", "Reader", "Writer"]

METADATA = "tensors/METADATA.json"

_DEEP = 64  # dimensions; the product of very many would take minutes
_MANY = 2**17  # pieces; to read so many takes 200 MB

T = TypeVar("T")


class Dcp:
    """One file for each process, with the pieces of tensors that it holds: `tensors/rank-00000.safetensors` and so on.

    `tensors/METADATA.json` says which pieces make up which tensor, so that it can be read by more processes or fewer.
    """

    name = "dcp"

    def write(self, sections: Mapping[str, Mapping[str, Tensor]], to: Writes, *, comm: Comm = ALONE) -> None:
        """Put the tensors of this process into its file. With a `comm` all its ranks call this, each with its pieces.

        What several ranks hold alike, one of them writes. Rank zero writes the metadata.
        """
        state: dict[str, Any] = {name: tensor for tensors in sections.values() for name, tensor in tensors.items()}
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        writer = Writer(to, comm.rank)
        planner.set_up_planner(state, is_coordinator=comm.rank == 0)
        # not torch's `save`: alone it warns each time, and what fails in it comes as a BaseException of its own
        asked = _of_all(comm, lambda: writer.prepare_local_plan(planner.create_local_plan()))
        plans, metadata = planner.create_global_plan(asked)
        plan = planner.finish_plan(plans[comm.rank])
        results = _of_all(comm, lambda: writer.write_data(plan, planner).value())
        if comm.rank == 0:
            writer.finish(metadata, results)

    def read(
        self, sections: Sequence[str], source: Reads, *, into: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Every tensor of some sections, whole, except those that are given to be filled.

        Tensors in `into`, which may be DTensors, are filled as they are cut, from the files that hold their pieces.
        """
        reader = Reader(source)
        metadata = reader.read_metadata()
        known, given = _entries(metadata), into or {}
        _refuse_differences(known, given)
        beginnings = tuple(f"{section}/" for section in sections)
        state: dict[str, Any] = {
            name: given[name] if name in given else torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in known.items()
            if name.startswith(beginnings)
        }
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(state, metadata, is_coordinator=True)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
        reader.read_data(plan, planner).wait()
        return state


class Writer(StorageWriter):
    """What DCP writes through: one file of tensors for this rank, and the metadata as JSON. Tensors only."""

    def __init__(self, to: Writes, rank: int = 0) -> None:
        self._to = to
        self._path = f"tensors/rank-{rank:05d}.safetensors"

    def reset(self, checkpoint_id: object = None) -> None:
        return None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        return None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        for item in plan.items:
            if item.tensor_data is None:
                raise CannotSave(f"{item.index.fqn} is no tensor; DCP would pickle it. Only tensors can be kept here.")
            if (kind := item.tensor_data.properties.dtype) not in NAMES:
                raise CannotSave(f"{item.index.fqn} is a tensor of {kind}, which a checkpoint cannot keep.")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        pieces: dict[MetadataIndex, Tensor] = {}
        for item in plan.items:
            if item.tensor_data is not None and item.tensor_data.chunk.sizes.numel():
                pieces[item.index] = cast(Tensor, planner.resolve_data(item)).detach().cpu()
        if pieces:
            self._to.put(self._path, Blocks({_key(index): piece for index, piece in pieces.items()}))
        return _done([WriteResult(index, piece.nbytes, self._path) for index, piece in pieces.items()])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = {result.index: str(result.storage_data) for of_rank in results for result in of_rank}
        files = {path: number for number, path in enumerate(sorted(set(written.values())))}
        entries = {name: _entry(name, of, written, files) for name, of in _entries(metadata).items()}
        text = json.dumps({"files": list(files), "tensors": entries}, separators=(",", ":")).encode()
        if len(text) > TEXT_LIMIT or len(written) > _MANY:
            raise CannotSave(
                f"{METADATA} would name {len(written)} pieces in {len(text)} bytes; {_MANY} in {TEXT_LIMIT} bytes are "
                "what is read. Cut the tensors for fewer processes."
            )
        self._to.put_text(METADATA, text)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return False


class Reader(StorageReader):
    """What DCP reads through. It believes nothing: Damaged where metadata and files are not as they are written."""

    def __init__(self, source: Reads) -> None:
        self._source = source
        self._files: dict[MetadataIndex, str] = {}
        self._content: dict[str, dict[str, tuple[torch.dtype, torch.Size]]] = defaultdict(dict)

    def reset(self, checkpoint_id: object = None) -> None:
        return None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        said = loads(bytes(self._source.read(METADATA)), METADATA, parts=16 * _MANY)
        try:
            return _metadata(said, self._source)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise Damaged(f"{METADATA} is not as it is written: {error!r:.300}.") from error

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._files = metadata.storage_data
        for name, entry in _entries(metadata).items():
            for chunk in entry.chunks:
                index = MetadataIndex(name, chunk.offsets)
                self._content[self._files[index]][_key(index)] = entry.properties.dtype, chunk.sizes

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        asked: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            asked[self._files[item.storage_index]].append(item)
        for path, items in asked.items():
            pieces = tensors_of(self._source.read(path), path)
            if {key: (piece.dtype, piece.shape) for key, piece in pieces.items()} != self._content[path]:
                raise Damaged(f"{path} does not hold the pieces that {METADATA} says.")
            for item in items:
                piece = pieces[_key(item.storage_index)]
                for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    piece = piece.narrow(dim, start, length)
                target = planner.resolve_tensor(item).detach()
                target.copy_(piece)
                planner.commit_tensor(item, target)
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return False


def _of_all(comm: Comm, step: Callable[[], T]) -> list[T]:
    """What a step gives on every rank. Where it fails on one, it fails on all, and nobody waits for the one."""
    mine, failed = None, None
    try:
        mine = step()
    except Exception as error:  # noqa: BLE001 - raised when the others have been told
        failed = error
    found = comm.gather((mine, None if failed is None else f"{type(failed).__name__}: {failed}"))
    if failed is not None:
        raise failed
    all_said = cast("list[tuple[T, str | None]]", found)
    for rank, (_, said) in enumerate(all_said):
        if said is not None:
            raise StoreError(f"Rank {rank} could not write its pieces: {said}")
    return [value for value, _ in all_said]


def _key(index: MetadataIndex) -> str:
    """The name of a piece in its file: that of the tensor, and where in it the piece begins."""
    return f"{index.fqn}@{','.join(map(str, index.offset or ()))}"


def _entry(name: str, of: TensorStorageMetadata, written: Mapping[MetadataIndex, str], files: Mapping[str, int]) -> Any:
    """A tensor's metadata as JSON; a piece is [number of its file, offsets, sizes]."""
    chunks = [chunk for chunk in of.chunks if chunk.sizes.numel()]
    if not _make_up(of.size, [(chunk.offsets, chunk.sizes) for chunk in chunks]):
        raise CannotSave(f"The pieces of {name} do not make it up. Did every rank write that holds some of it?")
    pieces = [(files[written[MetadataIndex(name, chunk.offsets)]], chunk.offsets, chunk.sizes) for chunk in chunks]
    return {"dtype": NAMES[of.properties.dtype], "size": of.size, "chunks": pieces}


def _metadata(said: Any, source: Reads) -> Metadata:
    """What `_entry` wrote, checked: afterwards no tensor is larger than what its files hold."""
    files, tensors = said["files"], said["tensors"]
    known = set(source.paths)
    if not known.issuperset(files):
        raise ValueError(f"it names files that the manifest does not have: {files!r:.80}")
    if sum(len(given["chunks"]) for given in tensors.values()) > _MANY:
        raise ValueError(f"it names more than {_MANY} pieces")
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, str] = {}
    need: Counter[str] = Counter()
    for name, given in tensors.items():
        kind, size = KINDS[given["dtype"]], _counts(given["size"])
        chunks = []
        for number, offsets, sizes in given["chunks"]:
            path = files[_counts([number])[0]]
            chunks.append(ChunkStorageMetadata(_counts(offsets), _counts(sizes)))
            places[MetadataIndex(name, chunks[-1].offsets)] = path
            need[path] += chunks[-1].sizes.numel() * kind.itemsize
        if not _make_up(size, [(chunk.offsets, chunk.sizes) for chunk in chunks]):
            raise ValueError(f"the pieces of {name!r:.80} do not make it up")
        entries[name] = TensorStorageMetadata(TensorProperties(dtype=kind), size, chunks)
    for path, count in need.items():
        if count > source.size(path):
            raise ValueError(f"{path} cannot hold {count} bytes of pieces")
    return Metadata(entries, storage_data=places)


def _make_up(size: Sequence[int], pieces: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Whether boxes fill a tensor, each place once. They lie in rows and columns, as a mesh of processes cuts it."""
    if not prod(size):
        return not pieces
    spans: list[set[tuple[int, int]]] = [set() for _ in size]
    for offsets, sizes in pieces:
        for along, start, length in zip(spans, offsets, sizes, strict=True):
            along.add((start, start + length))
    for along, end in zip(spans, size, strict=True):
        cuts = sorted(along)
        if [0, *(stop for _, stop in cuts)] != [*(start for start, _ in cuts), end]:
            return False
    return len({tuple(offsets) for offsets, _ in pieces}) == len(pieces) == prod(map(len, spans))


def _counts(given: Any) -> torch.Size:
    if not isinstance(given, list) or len(given) > _DEEP:
        raise TypeError(f"{given!r:.80} is no shape")
    if any(type(n) is not int or n < 0 for n in given) or prod(n or 1 for n in given) >= 2**62:
        raise ValueError(f"{given!r:.80} is no shape")
    return torch.Size(given)


def _entries(metadata: Metadata) -> Mapping[str, TensorStorageMetadata]:
    return cast("dict[str, TensorStorageMetadata]", metadata.state_dict_metadata)  # Writer and Reader keep all else out


def _refuse_differences(known: Mapping[str, TensorStorageMetadata], given: Mapping[str, Tensor]) -> None:
    for name, tensor in given.items():
        if name not in known:
            raise Mismatch(f"The checkpoint has no tensor {name!r}.")
        then = known[name]
        if (then.properties.dtype, then.size) != (tensor.dtype, tensor.shape):
            raise Mismatch(
                f"{name} was {then.properties.dtype}{list(then.size)} and is {tensor.dtype}{list(tensor.shape)}."
            )


def _done(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future
