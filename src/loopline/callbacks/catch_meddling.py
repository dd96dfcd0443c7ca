"""Finding out which observer changes the training."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from xxhash import xxh3_128_digest

from ..core.binding import Binding, Handler, name_of
from ..core.callback import Callback
from ..core.errors import Meddling
from ..randomness import streams

if TYPE_CHECKING:
    from ..core.run import Run

__all__ = ["CatchMeddling"]

_NAMED = 5


class CatchMeddling(Callback):
    """Compares the training before and after each call of an observer, and raises Meddling where something changed.

    An observer is what has `on_error = "disable"`. Looked at are parameters and buffers, their gradients and
    `requires_grad`, the modules and their modes, the batch in hand with the output and the loss, the optimizers'
    settings and state, the random streams and the gradient mode. What an observer is kept from anyway does not count.

    Each look reads every tensor to the last bit: attach this to find an error, or in a short test, not to a long run.

    >>> import torch
    >>> from loopline import Run, loop
    >>> from loopline.callbacks import Lambda
    >>> model = torch.nn.Linear(1, 1)
    >>> clamp = Lambda(on_batch_start=lambda run: run.model.weight.data.clamp_(-1, 1), on_error="disable")
    >>> with loop.fit(Run(model=model, callbacks=[clamp, CatchMeddling()])) as run:
    ...     for _ in loop.epochs(run, 1):
    ...         model.weight.data.fill_(2.0)
    ...         for x in loop.batches(run, [torch.ones(1, 1)]):
    ...             pass
    Traceback (most recent call last):
        ...
    loopline.core.errors.Meddling: Lambda changed weight at batch_start, epoch 0, step 0. ...
    """

    def wrap_handler(self, run: Run, binding: Binding, handler: Handler) -> Handler:
        """A handler that looks before and after an observer's; others stay as they are."""
        if binding.on_error != "disable":
            return handler

        def watched(run: Run, **payload: object) -> None:
            before = dict(_look(run))
            try:
                handler(run, **payload)
            except Exception as error:
                _compare(before, run, binding, error)
                raise
            _compare(before, run, binding, None)

        return watched


class _Seen(NamedTuple):
    """Something that may not change: which object it is, where that matters, and what is in it, where that is plain."""

    which: object
    content: object


def _compare(before: Mapping[str, _Seen], run: Run, binding: Binding, cause: Exception | None) -> None:
    after = dict(_look(run))
    changes = [
        said for name in {**before, **after} if (said := _change(name, before.get(name), after.get(name))) is not None
    ]
    if not changes:
        return
    more = f" and {len(changes) - _NAMED} more" if len(changes) > _NAMED else ""
    raise Meddling(
        f"{name_of(binding.owner)} changed {', '.join(changes[:_NAMED])}{more} at {binding.event.name}, epoch "
        f'{run.epoch}, step {run.step}. With on_error = "disable" it may only look: let it work on a copy, such as '
        'tensor.clone(), or set on_error = "raise" if it is meant to steer.'
    ) from cause


def _change(name: str, was: _Seen | None, now: _Seen | None) -> str | None:
    if was is None:
        return f"{name} (new)"
    if now is None:
        return f"{name} (gone)"
    if was.which is not now.which:
        return f"{name} (another object)"
    if was.content == now.content:
        return None
    plain = isinstance(was.content, str | int | float) and isinstance(now.content, str | int | float)
    return f"{name} ({was.content} -> {now.content})" if plain else name


def _look(run: Run) -> Iterator[tuple[str, _Seen]]:
    """All that the training goes on from, by the names that messages use."""
    names: dict[int, str] = {}
    if isinstance(run.model, nn.Module):
        for name, module in run.model.named_modules():
            yield f"module {name or '(model)'}", _Seen(module, None)
            yield f"the mode of {name or '(model)'}", _Seen(None, "train" if module.training else "eval")
        for name, buffer in run.model.named_buffers():
            yield name, _Seen(buffer, _bits(buffer))
        yield from _parameters(run.model.named_parameters(), names)
    for i, optimizer in enumerate(run.optimizers):
        for j, group in enumerate(getattr(optimizer, "param_groups", ())):
            own = f"run.optimizers[{i}].param_groups[{j}]"
            yield from _inside(own, {key: value for key, value in group.items() if key != "params"})
            for k, parameter in enumerate(group["params"]):
                place = f"{own}['params'][{k}]"
                yield place, _Seen(parameter, None)
                if id(parameter) not in names:
                    yield from _parameters([(place, parameter)], names)
        for parameter, state in getattr(optimizer, "state", {}).items():
            yield from _inside(f"run.optimizers[{i}].state[{names.get(id(parameter))}]", state)
    if run.in_batch:
        for name in ("data", "output", "loss"):
            yield from _all_of(f"run.batch.{name}", getattr(run.batch, name))
    for name, stream in streams().items():
        yield f"the random stream {name}", _Seen(None, _plain(stream))
    yield "torch.is_grad_enabled()", _Seen(None, torch.is_grad_enabled())


def _parameters(named: Iterable[tuple[str, Tensor]], names: dict[int, str]) -> Iterator[tuple[str, _Seen]]:
    for name, parameter in named:
        names[id(parameter)] = name
        yield name, _Seen(parameter, _bits(parameter))
        yield f"{name}.requires_grad", _Seen(None, parameter.requires_grad)
        yield f"{name}.grad", _Seen(parameter.grad, _bits(parameter.grad))


def _all_of(name: str, value: object) -> Iterator[tuple[str, _Seen]]:
    match value:
        case bool() | int() | float() | str():
            yield name, _Seen(None, value)
        case Tensor() | np.ndarray():
            yield name, _Seen(value, _bits(value))
        case _:
            yield name, _Seen(value, None)
            yield from _inside(name, value)


def _inside(name: str, value: object) -> Iterator[tuple[str, _Seen]]:
    """What a container holds, all the way down."""
    if isinstance(value, Mapping):
        for key in value:
            yield from _all_of(f"{name}[{key!r}]", value[key])
    elif isinstance(value, tuple | list):
        for i, item in enumerate(value):
            yield from _all_of(f"{name}[{i}]", item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _all_of(f"{name}.{field.name}", getattr(value, field.name))


def _plain(stream: object) -> object:
    """The state of a random stream as something that equals what is the same."""
    match stream:
        case tuple() | list():
            return [_plain(part) for part in stream]
        case Tensor():
            return stream.cpu().numpy().tobytes()
        case np.ndarray():
            return stream.tobytes()
        case _:
            return stream


def _bits(value: Tensor | np.ndarray | None) -> object:
    """What tells one content of a tensor or an array from another."""
    if isinstance(value, np.ndarray):
        return xxh3_128_digest(value.tobytes())
    if value is None:
        return None
    if is_lazy(value):
        return "not initialised"
    # the counter also sees a write that changes nothing; what goes through `.data` only the bytes show
    version = None if value.is_inference() else value._version
    try:
        local = value.to_local() if hasattr(value, "to_local") else value
        flat = local.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return version, xxh3_128_digest(flat.view(torch.uint8).numpy().data)
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        return version, None  # sparse, without storage, of a library's own kind: not to be read as bytes
