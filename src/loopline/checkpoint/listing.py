"""What checkpoints there are, for people. Nothing here writes into the folder, or needs the right to."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from ..core.errors import Damaged, NewerFormat, NoSuchKey, StoreError
from ..stores import Store, store_of
from .identity import named_in
from .manifest import NAME, Manifest, Ref
from .shelf import Shelf, Stored

__all__ = ["Listed", "State", "find", "is_there", "list_checkpoints"]

State: TypeAlias = Literal["committed", "damaged", "of a newer format", "of another run", "set aside", "unfinished"]
"""Set aside is what a run found damaged when it was to go on; unfinished, what has no manifest, yet or any more."""

_TRIES = 10


@dataclass(frozen=True, slots=True)
class Listed:
    """One checkpoint as it lies there. A manifest that cannot be believed is not shown, and `why` says what is wrong.

    `newest` is the one that a run would go on from, as far as it was looked at.
    """

    name: str
    state: State
    why: str | None = None
    manifest: Manifest | None = None
    pins: tuple[str, ...] = ()
    newest: bool = False

    @property
    def step(self) -> int:
        """The optimizer steps that were done, by its name."""
        return int(self.name[:12])


def list_checkpoints(store: Store | str | os.PathLike[str], *, verify: bool = False) -> list[Listed]:
    """The checkpoints in a run's folder, by step, those of earlier runs first. With `verify` every file is compared.

    A run may train into the folder meanwhile: what it removes while it is being looked at is not listed.
    """
    store = store_of(store)
    found, vanished = _listed(store, verify=verify)
    for _ in range(_TRIES):
        states = {one.state for one in found}
        if "committed" in states or not (vanished or "unfinished" in states):
            break
        # a listing is no snapshot: the newest may have been committed, and the one before removed, while it was made
        found, vanished = _listed(store, verify=verify)
    return found


def find(store: Store, ref: Ref | str = "latest") -> Stored:
    """A committed checkpoint by its name, its step, the label of a pin such as "best", or as the "latest"."""
    name = ref.name if isinstance(ref, Ref) else ref
    if not NAME.fullmatch(name):
        name = _name(store, name)
    try:
        return Shelf(store).get(name)
    except NoSuchKey:
        raise NoSuchKey(f"There is no checkpoint {name} in {store.name}.") from None


def is_there(stored: Stored) -> bool:
    """Whether a checkpoint that was found a moment ago has not been removed since."""
    return stored.manifest.name in Shelf(stored.store).committed()


def _listed(store: Store, *, verify: bool) -> tuple[list[Listed], bool]:
    """What one listing shows, and whether some of it was gone when it was looked at."""
    shelf = Shelf(store)
    seen = [_look(shelf, name, committed=committed) for name, committed in shelf.attempts().items()]
    found = [listed for listed in seen if listed is not None]
    readable = [listed.manifest for listed in found if listed.manifest is not None]
    run_id = _run_id(store, readable)
    labels = defaultdict(list)
    for label, name in shelf.pins().items():
        labels[name].append(label)
    found = [replace(_of_run(listed, run_id), pins=tuple(sorted(labels[listed.name]))) for listed in found]
    if verify:
        found = [checked for listed in found if (checked := _verified(store, listed)) is not None]
    vanished = len(found) < len(seen)
    found += [Listed(name, "set aside") for name in _set_aside(store)]
    newest = max(
        (listed for listed in found if listed.state == "committed" and listed.manifest), key=_age, default=None
    )
    found = [replace(listed, newest=listed is newest) for listed in found]
    found.sort(key=lambda listed: (listed.state != "of another run", listed.step, _age(listed), listed.name))
    return found, vanished


def _name(store: Store, said: str) -> str:
    """The name of the checkpoint that is meant by a step, a label or "latest"."""
    if said == "latest" or (said.isdecimal() and len(said) <= 12):
        listed = [one for one in list_checkpoints(store) if one.state not in ("set aside", "unfinished")]
        if said == "latest":
            meant = [one for one in listed if one.newest]
        else:
            meant = sorted((one for one in listed if one.step == int(said)), key=_preferred)
        if meant:
            return meant[-1].name
        what = "committed checkpoint" if said == "latest" else f"checkpoint of step {int(said)}"
        steps = ", ".join(str(step) for step in sorted({one.step for one in listed})[-12:])
        raise NoSuchKey(f"There is no {what} in {store.name}" + (f"; the last steps are {steps}." if steps else "."))
    pins = Shelf(store).pins()
    if said not in pins:
        known = ", ".join(["latest", *sorted(pins)])
        raise NoSuchKey(
            f"There is no checkpoint {said!r:.80} in {store.name}. Give a name such as 000000001500-7f3a9c2e, a step, "
            f"or one of: {known}."
        )
    return pins[said]


def _look(shelf: Shelf, name: str, *, committed: bool) -> Listed | None:
    if not committed:
        return Listed(name, "unfinished")
    try:
        return Listed(name, "committed", manifest=shelf.get(name).manifest)
    except NoSuchKey:
        return None  # removed a moment ago
    except NewerFormat as error:
        return Listed(name, "of a newer format", str(error))
    except (Damaged, StoreError) as error:
        return Listed(name, "damaged", str(error))


def _run_id(store: Store, readable: list[Manifest]) -> str | None:
    """The run in force; without a run file, that of the newest checkpoint, which would be gone on from."""
    try:
        named = named_in(store)
    except (Damaged, StoreError):
        named = None
    newest = max(readable, key=lambda manifest: manifest.ref().age, default=None)
    return named or (newest.run_id if newest else None)


def _of_run(listed: Listed, run_id: str | None) -> Listed:
    if listed.manifest is None or listed.manifest.run_id == run_id:
        return listed
    return replace(listed, state="of another run")


def _verified(store: Store, listed: Listed) -> Listed | None:
    if listed.manifest is None:
        return listed
    stored = Stored(store, listed.manifest)
    try:
        damage = stored.damage()
    except StoreError as error:
        damage = str(error)
    if damage is None:
        return listed
    return replace(listed, state="damaged", why=damage) if is_there(stored) else None


def _set_aside(store: Store) -> list[str]:
    """The names of what lies in quarantine; one that is there twice has something behind its name."""
    folders = {key.split("/")[1] for key in store.keys("quarantine/") if key.count("/") > 1}
    return sorted(found[0] for folder in folders if (found := NAME.match(folder)))


def _age(listed: Listed) -> tuple[int, int]:
    return listed.manifest.ref().age if listed.manifest else (0, 0)


def _preferred(listed: Listed) -> tuple[bool, tuple[int, int]]:
    return listed.state == "committed", _age(listed)
