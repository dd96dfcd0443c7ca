"""The weights in a file of torch or Lightning, as one safetensors file. No code that a file names is run."""

from __future__ import annotations

import os
import pickle
import pickletools
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint

from ..core.errors import CannotSave, Damaged, LooplineError
from .weights import Written, apart, check_target, write_weights

__all__ = ["convert_weights"]

_PLACES = ("state_dict", "model_state_dict", "model")
_PICKLE_LIMIT = 64 * 2**20  # parsed, a pickle takes up to 60 times its size
_TIMES, _SLACK = 16, 64 * 2**20
_WANTED = re.compile(r"GLOBAL (\S+) (?:was not an allowed|whose module)")
_HOW = (
    "Run what you trust with it, the program that wrote it, and let that save the weights alone: "
    "torch.save(model.state_dict(), 'weights.pt')."
)


def convert_weights(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    key: str | None = None,
    strip: str | None = None,
    force: bool = False,
) -> Written:
    """Write the tensors of a `.pt`, `.pth`, `.bin`, `.ckpt` or `.safetensors` file as one safetensors file.

    The file holds a state dict, or a dict with one under `key`; without a key that is `state_dict`, `model_state_dict`
    or `model`. From names that begin with the module `strip`, such as "model", this is taken away.

    It is read with `torch.load(weights_only=True)` and in no other way: what needs a class is refused, and a class that
    is named in it as data, as in Lightning's hyper-parameters, is data. What is no tensor is left out. The new file
    appears whole or not at all, only its owner may read it, and it replaces one that is there only with `force`.

    Nothing in a file makes this run code; a hostile one may make it take much memory, which `loopline convert` bounds.
    """
    _check_torch()
    source, path = Path(source), Path(path)
    _check_source(source)
    check_target(path, force=force)
    if path.exists() and path.samefile(source):
        raise LooplineError(f"{path} is the file to be read itself; choose another name.")
    found = _read(source)
    state, left_out = _state(found, key, source)
    weights: dict[str, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            weights[_checked_name(name, source)] = _checked(name, value, source)
        else:
            left_out[_shown(name)] = type(value).__qualname__
    _check_size(weights, source)
    if strip is not None:
        weights = _stripped(weights, strip, source)
    write_weights(path, apart(weights), {"format": "pt"})
    return Written(path, str(source), tuple(weights), path.stat().st_size, left_out)


def _check_torch() -> None:
    if torch.__version__ < "2.10":
        raise LooplineError(
            f"torch {torch.__version__} can be made to run code by a file although it reads weights only "
            "(CVE-2025-32434, CVE-2026-24747). Install torch 2.10 or later."
        )


def _check_source(source: Path) -> None:
    if source.is_dir():
        raise LooplineError(f"{source} is a folder; give a file. Where weights are in several files, convert each.")
    if not source.exists():
        raise LooplineError(f"There is no file {source}.")
    if not source.is_file():
        raise LooplineError(f"{source} is no regular file.")
    if not source.stat().st_size:
        raise Damaged(f"{source} is empty.")


def _read(source: Path) -> Any:
    """What a file holds; what it begins with says how it is read, its name does not."""
    with source.open("rb") as file:
        start = file.read(9)
    if start[8:] == b"{":
        return _read_safetensors(source)
    zipped = start.startswith(b"PK\x03\x04")
    if zipped:
        _check_zip(source)
    with _telling(source, zipped=zipped), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of old pickles and old classes
        return torch.load(source, map_location="cpu", weights_only=True, mmap=zipped)


def _read_safetensors(source: Path) -> dict[str, Tensor]:
    try:
        with safe_open(source, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a dict
    except SafetensorError as error:
        raise Damaged(f"{source} is cut off or damaged, or no safetensors file: {_first_line(error)}.") from error


def _check_zip(source: Path) -> None:
    """Refuse archives that torch.save does not write: they could unpack to far more than the file's size."""
    try:
        with zipfile.ZipFile(source) as archive:
            entries = archive.infolist()
    except Exception as error:
        raise Damaged(f"{source} is cut off or damaged: {_first_line(error)}.") from error
    if any(entry.filename.endswith("/constants.pkl") for entry in entries):
        raise LooplineError(
            f"{source} is a TorchScript program, which is not loaded here. Where you trust it, save its weights alone: "
            "torch.save(torch.jit.load(path).state_dict(), 'weights.pt')."
        )
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise Damaged(f"{source} holds compressed entries, which torch.save does not write. It is not unpacked.")
    if sum(entry.file_size for entry in entries) > source.stat().st_size:
        raise Damaged(f"{source} says that it holds more than its own size. It is not unpacked.")
    if any(entry.file_size > _PICKLE_LIMIT for entry in entries if entry.filename.endswith("data.pkl")):
        raise LooplineError(f"{source} holds more than {_PICKLE_LIMIT >> 20} MB beside its tensors. {_HOW}")


@contextmanager
def _telling(source: Path, *, zipped: bool) -> Iterator[None]:
    """Errors of torch.load come out as sentences; its own advice, to load without care, is left out."""
    try:
        yield
    except pickle.UnpicklingError as error:
        if wanted := _wanted(source, str(error), zipped=zipped):
            raise LooplineError(
                f"{source} asks for {wanted}, and making such objects would run code that the file chooses; only "
                f"tensors, numbers, text, and lists and dicts of them are read. {_HOW}"
            ) from None
        raise Damaged(
            f"{source} is cut off or damaged, or holds something else than weights as torch.save writes them. {_HOW}"
        ) from None
    except MemoryError as error:
        raise Damaged(f"{source} asks for far more memory than a file of its size should. It is not read.") from error
    except Exception as error:
        raise Damaged(f"{source} is cut off or damaged, or no file of torch: {_first_line(error)}.") from error


def _wanted(source: Path, said: str, *, zipped: bool) -> str:
    """The classes and functions that a file asks for."""
    names = _WANTED.findall(said)
    if "torch.distributed.tensor" in said:
        names.append("torch.distributed.tensor.DTensor")
    with suppress(Exception):  # the file may be hostile
        names += get_unsafe_globals_in_checkpoint(source) if zipped else []
    with suppress(Exception):
        names += [] if names else _named(source, zipped=zipped)
    known = sorted({f"{name:.80}" for name in names})
    return ", ".join(known[:5]) + (f" and {len(known) - 5} more" if len(known) > 5 else "")


def _named(source: Path, *, zipped: bool) -> Iterator[str]:
    """What a pickle names that torch does not read at all; it is looked at, not followed."""
    with ExitStack() as opened:
        file: IO[bytes] = opened.enter_context(source.open("rb"))
        if zipped:
            archive = opened.enter_context(zipfile.ZipFile(file))
            entry = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            file = opened.enter_context(archive.open(entry))
        texts: list[str] = []
        # before torch 1.6 a file was five pickles, of which the fourth is what was saved
        for operation, argument, _ in chain.from_iterable(pickletools.genops(file) for _ in range(5)):
            name = ""
            if isinstance(argument, str) and operation.name != "GLOBAL":
                texts = [*texts[-1:], argument]
            elif operation.name in ("GLOBAL", "STACK_GLOBAL"):
                name = ".".join(texts) if argument is None else argument.replace(" ", ".")
            if name and not name.startswith(("torch.", "collections.")):
                yield name


def _state(found: Any, key: str | None, source: Path) -> tuple[dict[Any, Any], dict[str, str]]:
    """The dict that holds the tensors, and what lies beside it."""
    if not isinstance(found, dict):
        raise LooplineError(f"{source} holds a {type(found).__qualname__}, no dict of tensors. {_HOW}")
    entries = _items(found)
    holders = [name for name, value in entries.items() if isinstance(value, dict) and _has_tensors(value)]
    if key is None:
        places = [name for name in _PLACES if name in holders]
        if len(places) > 1:
            raise LooplineError(f"{source} has weights under {_list(places)}; say which are meant with key (--key).")
        if not places and _has_tensors(entries):
            return entries, {}
        key = places[0] if places else None
    if key is None or key not in holders:
        what = "tensors" if key is None else f"dict of tensors {key!r}"
        have = f"there are some under {_list(holders)}; give one as key (--key)" if holders else "there are none in it"
        raise LooplineError(f"{source} has no {what} at its top: {have}. It has the entries {_list(entries)}.")
    left_out = {_shown(name): type(value).__qualname__ for name, value in entries.items() if name != key}
    return _items(entries[key]), left_out


def _items(given: dict[Any, Any]) -> dict[Any, Any]:
    return dict(dict.items(given))  # a file can give an OrderedDict attributes, one named `items` too


def _has_tensors(given: dict[Any, Any]) -> bool:
    return any(isinstance(value, Tensor) for value in dict.values(given))


def _checked_name(name: Any, source: Path) -> str:
    with suppress(UnicodeEncodeError):
        if isinstance(name, str) and name.encode() and name != "__metadata__":
            return name
    raise LooplineError(f"{source} has a tensor named {_shown(name)}, which a safetensors file cannot name so.")


def _checked(name: str, given: Tensor, source: Path) -> Tensor:
    """A plain tensor: no parameter, and without the attributes that a file can give it."""
    tensor = torch.Tensor.detach(given)
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or tensor.device.type != "cpu":
        kind = (
            "meta" if tensor.is_meta else "nested" if tensor.is_nested else tensor.dtype if tensor.is_quantized else ""
        )
        raise CannotSave(
            f"{_shown(name)} in {source} is a tensor of the kind {kind or tensor.layout}, which a safetensors file "
            "cannot hold. Save it as dense tensors, for example its parts."
        )
    return tensor.as_subclass(Tensor)


def _check_size(weights: Mapping[str, Tensor], source: Path) -> None:
    """Tied weights are written under each of their names, but a small file must not become a huge one."""
    size = sum(tensor.numel() * tensor.dtype.itemsize for tensor in weights.values())
    if size > _TIMES * source.stat().st_size + _SLACK:
        raise Damaged(
            f"{source} has {source.stat().st_size} bytes, and its tensors would take {size}. It is not unpacked."
        )


def _stripped(weights: Mapping[str, Tensor], module: str, source: Path) -> dict[str, Tensor]:
    prefix = f"{module.rstrip('.')}."
    if not any(name.startswith(prefix) for name in weights):
        raise LooplineError(f"No tensor in {source} has a name that begins with {prefix!r}; they are {_list(weights)}.")
    found = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    if len(found) < len(weights):
        raise LooplineError(f"Without {prefix!r} two tensors in {source} would have one name.")
    return found


def _list(names: Any) -> str:
    shown = [_shown(name) for name in names]
    return ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")


def _shown(name: Any) -> str:
    return repr(name[:80]) if isinstance(name, str) else f"{type(name).__qualname__}"


def _first_line(error: Exception) -> str:
    said = str(error) if isinstance(error, RuntimeError | OSError | SafetensorError | zipfile.BadZipFile) else ""
    return (said or type(error).__name__).splitlines()[0][:200].rstrip(".")
