"""States as text: a typed JSON tree, with tensors beside it under names.

Nothing here runs code that a file names. A file may hold None, truth values, whole numbers, floats, text, bytes, lists,
tuples, dicts, the collections registered below, tensors and arrays, and types that the reading program has registered.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ..core.errors import CannotSave, Damaged
from ..core.redact import redacted_text
from .kinds import DIMENSIONS, NAMES

__all__ = ["PARTS_LIMIT", "TEXT_LIMIT", "dumps", "flatten", "loads", "parts_of", "register_codec", "unflatten"]

TEXT_LIMIT = 8 * 2**20
PARTS_LIMIT = 2**19  # parsed, and made a state of, each takes up to 200 bytes
_DEPTH = 100
_LONG = 64
_INT64 = range(-(2**63), 2**63)


def flatten(name: str, state: object, tensors: dict[str, Tensor]) -> Any:
    """The JSON form of a state; its tensors go into `tensors`, under names that begin with the state's own.

    One tensor that stands at several places is kept once, so that what was tied is tied again.

    >>> tensors = {}
    >>> flatten("model", {"weight": torch.ones(2), "steps": 3}, tensors)
    {'map': {'weight': {'tensor': 'model/weight'}, 'steps': 3}}
    >>> list(tensors)
    ['model/weight']
    """
    return _Flattening(tensors).of(state, name, 0)


def unflatten(form: Any, tensors: dict[str, Tensor]) -> Any:
    """The state that a JSON form stands for.

    The tensors that stand for long lists are taken out of `tensors`. Each is there for one list, and takes five times
    the room as such: a file cannot ask for one again and again.
    """
    return _grown(form, tensors, 0)


def dumps(form: Any) -> bytes:
    """JSON as text that is the same for the same form."""
    data = json.dumps(form, allow_nan=False, separators=(",", ":")).encode()
    if len(data) > TEXT_LIMIT or parts_of(data) > PARTS_LIMIT:
        raise CannotSave(
            f"The states of callbacks, schedulers and loaders come to {len(data)} bytes of text with {parts_of(data)} "
            f"parts; {TEXT_LIMIT} bytes and {PARTS_LIMIT} parts can be kept. Hold what is large as tensors or arrays."
        )
    return data


def parts_of(data: bytes) -> int:
    """At least how many values a JSON text has: what it takes in memory follows from that, not from its length."""
    return data.count(b"[") + data.count(b"{") + data.count(b",")


def loads(data: bytes, said: str, *, parts: int = PARTS_LIMIT) -> Any:
    """JSON from a file that may be damaged or hostile: bounded, each key once, no NaN and nothing infinite."""
    if len(data) > TEXT_LIMIT:
        raise Damaged(f"{said} has {len(data)} bytes; more than {TEXT_LIMIT} are not read.")
    if parts_of(data) > parts:
        raise Damaged(f"{said} has {parts_of(data)} parts; more than {parts} are not read.")
    try:
        return json.loads(data.decode(), object_pairs_hook=_once, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError:
        raise Damaged(f"{said} is nested too deeply.") from None
    except ValueError as error:
        raise Damaged(f"{said} is not JSON as it is written here: {error}.") from error


def register_codec(
    cls: type, to_tree: Callable[[Any], Any], from_tree: Callable[[Any], Any], *, name: str | None = None
) -> None:
    """Let states hold objects of a class: `to_tree` gives what can be kept of one, `from_tree` makes it again.

    The program that loads must have registered the same name; nothing is imported because a file says so.
    """
    _register(name or f"{cls.__module__}.{cls.__qualname__}", cls, to_tree, from_tree)


@dataclass(frozen=True, slots=True)
class _Codec:
    name: str
    to_tree: Callable[[Any], Any]
    from_tree: Callable[[Any], Any]


_BY_TYPE: dict[type, _Codec] = {}
_BY_NAME: dict[str, _Codec] = {}


def _register(name: str, cls: type, to_tree: Callable[[Any], Any], from_tree: Callable[[Any], Any]) -> None:
    _BY_TYPE[cls] = _BY_NAME[name] = _Codec(name, to_tree, from_tree)


_register("int", int, hex, lambda said: int(said, 16))
_register(
    "text",
    str,
    lambda text: text.encode(errors="surrogatepass").hex(),
    lambda said: bytes.fromhex(said).decode(errors="surrogatepass"),
)
_register("bytes", bytes, bytes.hex, bytes.fromhex)
_register("set", set, list, set)
_register("frozenset", frozenset, list, frozenset)
_register("deque", deque, lambda d: (list(d), d.maxlen), lambda given: deque(given[0], given[1]))
_register("counter", Counter, dict, Counter)
_register("ordered", OrderedDict, dict, OrderedDict)
_register("complex", complex, lambda c: (c.real, c.imag), lambda pair: complex(*pair))
_register("size", torch.Size, list, torch.Size)
_register("device", torch.device, str, torch.device)
_register("dtype", torch.dtype, lambda d: str(d).removeprefix("torch."), lambda name: _dtype(name))


class _Flattening:
    """One walk over a state."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.seen = {_identity(tensor): name for name, tensor in tensors.items()}

    def of(self, value: Any, where: str, depth: int) -> Any:
        kind = type(value)
        if value is None or kind is bool or (kind is int and _INT64.start <= value < _INT64.stop):
            return value
        if kind is str and _is_unicode(value):
            return value
        if kind is float:
            return {"float": value.hex()}
        if depth > _DEPTH:
            raise CannotSave(f"{where} is nested more than {_DEPTH} deep, or holds itself.")
        if isinstance(value, Tensor):
            return {"tensor": self._keep(value, where)}
        if kind is np.ndarray:
            return {"array": self._keep(_tensor_of(value, where), where)}
        if isinstance(value, np.generic):
            return {"number": self._keep(_tensor_of(np.asarray(value), where), where)}
        if kind is list:
            if len(value) > _LONG and (long := self._of_numbers(value, where)):
                return long
            return [self.of(item, f"{where}/{i}", depth + 1) for i, item in enumerate(value)]
        if kind is tuple:
            return {"tuple": [self.of(item, f"{where}/{i}", depth + 1) for i, item in enumerate(value)]}
        if kind is dict:
            return self._of_dict(value, where, depth)
        if codec := _BY_TYPE.get(kind):
            return {"object": [codec.name, self.of(codec.to_tree(value), where, depth + 1)]}
        raise CannotSave(
            f"{where} is {_shown(value)}, an object of {kind.__module__}.{kind.__qualname__}, which a checkpoint "
            "cannot keep. State is made of numbers, text, tensors, arrays, lists, tuples and dicts; for a type of your "
            "own call loopline.checkpoint.register_codec."
        )

    def _of_numbers(self, value: list[Any], where: str) -> Any:
        """A long list of floats, or of whole numbers, as a tensor: text would take four times the room."""
        kinds = set(map(type, value))
        if kinds == {float}:
            return {"floats": self._keep(torch.tensor(value, dtype=torch.float64), where)}
        if kinds == {int} and all(_INT64.start <= number < _INT64.stop for number in value):
            return {"integers": self._keep(torch.tensor(value, dtype=torch.int64), where)}
        return None

    def _of_dict(self, value: dict[Any, Any], where: str, depth: int) -> Any:
        if all(type(key) is str and _is_unicode(key) for key in value):
            return {"map": {key: self.of(item, f"{where}/{key}", depth + 1) for key, item in value.items()}}
        pairs = []
        for key, item in value.items():
            if not _is_key(key):
                raise CannotSave(
                    f"{where} is a dict with the key {_shown(key)}; keys are numbers, text, or tuples of them."
                )
            pairs.append([self.of(key, f"{where}/key", depth + 1), self.of(item, f"{where}/{key}", depth + 1)])
        return {"items": pairs}

    def _keep(self, tensor: Tensor, where: str) -> str:
        if reason := _unfit(tensor):
            raise CannotSave(f"{where} is {reason}")
        tensor = tensor.detach()
        identity = _identity(tensor)
        if (known := self.seen.get(identity)) is not None:
            return known
        name = where.encode(errors="backslashreplace").decode()
        while name in self.tensors or name.endswith("/__metadata__"):  # which the format has for itself
            name += "'"  # two keys that look alike, such as 1 and "1"
        self.tensors[name] = tensor
        self.seen[identity] = name
        return name


def _unfit(tensor: Tensor) -> str | None:
    """Why the numbers of a tensor cannot be kept, if they cannot."""
    if is_lazy(tensor):
        return "a parameter that has no shape yet. Call the model once, with a batch, before it is trained."
    if tensor.layout != torch.strided or tensor.is_nested:
        return f"a {'nested' if tensor.is_nested else tensor.layout} tensor. Give it as dense ones, such as its parts."
    if tensor.device.type == "meta":
        return "a tensor on the device meta, where there are no numbers."
    if tensor.dtype not in NAMES or tensor.dim() > DIMENSIONS:
        return f"a tensor of {tensor.dtype} with {tensor.dim()} dimensions, which a checkpoint cannot keep."
    if tensor.numel() and not tensor.data_ptr():
        return f"a {type(tensor).__name__} that has no memory of its own. Give it as plain tensors."
    return None


def _identity(tensor: Tensor) -> Any:
    if tensor.numel() == 0:
        return id(tensor)
    as_it_is_read = tensor.dtype, tensor.is_conj(), tensor.is_neg(), tuple(tensor.shape), tensor.stride()
    return tensor.data_ptr(), tensor.device, as_it_is_read


def _tensor_of(array: Any, where: str) -> Tensor:
    try:
        # a copy, since torch takes no read-only one, with the bytes in this machine's order
        return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))
    except TypeError as error:
        raise CannotSave(f"{where} is an array of {array.dtype}, which a checkpoint cannot keep.") from error


def _is_key(key: object) -> bool:
    if type(key) is tuple:
        return all(map(_is_key, key))
    return key is None or type(key) in (bool, int, float, str)


def _is_unicode(text: str) -> bool:
    """Whether a text is the same again after JSON, which takes two halves of a surrogate pair for one letter."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def _grown(form: Any, tensors: dict[str, Tensor], depth: int) -> Any:
    if form is None or isinstance(form, bool | int | str):
        return form
    if depth > 2 * _DEPTH:
        raise Damaged("a state in this checkpoint is nested too deeply.")
    if isinstance(form, list):
        return [_grown(item, tensors, depth + 1) for item in form]
    if not isinstance(form, dict) or len(form) != 1:
        raise Damaged(f"a state in this checkpoint holds {_shown(form)}, which nothing stands for.")
    ((kind, content),) = form.items()
    try:
        match kind:
            case "float":
                return float.fromhex(content)
            case "tensor":
                return tensors[content]
            case "array":
                return tensors[content].numpy()
            case "number":
                return tensors[content].numpy()[()]
            case "floats" | "integers":
                return _list(tensors.pop(content), torch.float64 if kind == "floats" else torch.int64)
            case "tuple":
                return tuple(_grown(item, tensors, depth + 1) for item in content)
            case "map":
                return {str(key): _grown(item, tensors, depth + 1) for key, item in content.items()}
            case "items":
                return {_grown(k, tensors, depth + 1): _grown(v, tensors, depth + 1) for k, v in content}
            case "object":
                name, inner = content
                if name not in _BY_NAME:
                    raise Damaged(f"a state holds {name!r}; call loopline.checkpoint.register_codec for it first.")
                return _BY_NAME[name].from_tree(_grown(inner, tensors, depth + 1))
    except Damaged:
        raise
    except Exception as error:
        raise Damaged(
            f"a state in this checkpoint holds {_shown(form)}, which cannot be read: {error!r:.200}."
        ) from error
    raise Damaged(f"a state in this checkpoint holds {_shown(form)}, which nothing stands for.")


def _list(tensor: Tensor, kind: torch.dtype) -> list[Any]:
    if tensor.dtype != kind or tensor.dim() != 1:
        raise ValueError(f"it is {tensor.dtype} {list(tensor.shape)}")
    numbers: list[Any] = tensor.tolist()
    return numbers


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


def _no_constant(said: str) -> Any:
    raise ValueError(f"{said} is not allowed")


def _finite(said: str) -> float:
    number = float(said)
    if not math.isfinite(number):
        raise ValueError(f"{said:.40} is not allowed")
    return number


def _dtype(name: str) -> torch.dtype:
    found = vars(torch).get(name)  # not getattr, which imports what has such a name
    if not isinstance(found, torch.dtype):
        raise Damaged(f"{name!r} is no type of tensors.")
    return found


def _shown(value: object) -> str:
    short = reprlib.Repr()
    short.maxother = short.maxstring = 1000  # a secret is known by what stands before it
    try:
        said = redacted_text(short.repr(value))
    except Exception:  # noqa: BLE001 - a number may have too many digits to be shown
        said = object.__repr__(value)
    return said if len(said) <= 80 else f"{said[:77]}..."
