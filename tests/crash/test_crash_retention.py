"""A24: however saves and removals fail, one intact checkpoint stays, and so do pinned ones and those of others."""

from __future__ import annotations

import os
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from loopline.checkpoint import All, Best, Each, Latest, saving
from loopline.checkpoint.manifest import Manifest
from loopline.checkpoint.saving import tidy
from loopline.checkpoint.shelf import Attempt, Shelf
from loopline.core.errors import LooplineError, StoreError
from loopline.stores import MemoryStore

SEQUENCES = 10_000 if os.environ.get("LOOPLINE_FULL") else 1_000
POLICIES = [Latest(1), Latest(3), Best(1, "val/loss"), Best(2, "val/loss", mode="max"), Each(epochs=2), All()]


class Flaky(MemoryStore):
    """Fails at the k-th change from now on, once."""

    def __init__(self) -> None:
        super().__init__()
        self.left = -1

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise StoreError("the store does not answer")

    def put(self, key, data):
        self._count()
        super().put(key, data)

    def put_new(self, key, data):
        self._count()
        return super().put_new(key, data)

    def delete(self, key):
        self._count()
        super().delete(key)


actions = st.one_of(
    st.tuples(st.just("save"), st.integers(0, 3), st.integers(0, 12)),
    st.tuples(st.just("pin"), st.integers(0, 5), st.integers(0, 12)),
    st.tuples(st.just("unpin"), st.integers(0, 5), st.just(0)),
    st.tuples(st.just("spoil"), st.integers(0, 5), st.just(0)),
)


def manifest(serial: int, run_id: str, loss: int) -> Manifest:
    return Manifest(
        run_id=run_id,
        name=f"{serial:012d}-{serial:08x}" if run_id == "ours" else f"{serial:012d}-ffffffff",
        parent=None,
        serial=serial,
        fencing=1,
        step=serial,
        epochs=serial,
        samples=serial,
        world_size=1,
        codec="whole",
        hash="xxh3_128",
        files={},
        metrics={"val/loss": float(loss)},
        versions={},
        reason="",
        created="",
    )


class World:
    """A shelf, and what must be true of it."""

    def __init__(self, keep) -> None:
        self.store = Flaky()
        self.shelf = Shelf(self.store)
        self.keep = keep
        self.serial = 0
        self.spoilt: set[str] = set()
        for serial in (7, 900):
            self.commit(manifest(serial, "another run", 0))
        self.foreign = {key: self.store.open(key).read() for key in self.store.keys("checkpoints/")}

    def commit(self, draft: Manifest) -> None:
        attempt = Attempt(self.store, draft.name, draft.hash)
        try:
            attempt.put_text("global.json", draft.name.encode())
            attempt.commit(replace(draft, files=attempt.files))
        except StoreError:
            attempt.abandon()
            raise

    def do(self, action: str, number: int, fails_at: int) -> None:
        ours = [s.manifest.ref() for s in self.shelf.stored()[0] if s.manifest.run_id == "ours"]
        before = {ref.name for ref in ours} - self.spoilt
        pinned = {name for label, name in self.shelf.pins().items() if label != "best"}  # which moves
        self.store.left = fails_at
        try:
            if action == "save":
                self.serial += 1
                self.commit(manifest(self.serial, "ours", number))
                tidy(self.shelf, self.keep, "ours")
            elif action == "pin" and ours:
                self.shelf.pin(f"label-{number}", ours[number % len(ours)])
            elif action == "unpin":
                self.shelf.unpin(f"label-{number}")
            elif action == "spoil" and ours:
                name = ours[number % len(ours)].name
                self.spoilt.add(name)
                self.store.delete(f"checkpoints/{name}/global.json")
        except LooplineError:
            pass
        self.store.left = -1
        assert not before or self.intact() or action == "spoil"
        assert action != "save" or pinned <= set(self.shelf.committed()) | self.gone(pinned)
        assert {key: self.store.open(key).read() for key in self.foreign} == self.foreign

    def gone(self, names: set[str]) -> set[str]:
        """Pins may name what was never there."""
        return {name for name in names if name not in {f"{n:012d}-{n:08x}" for n in range(1, self.serial + 1)}}

    def intact(self) -> set[str]:
        return {
            stored.manifest.name
            for stored in self.shelf.stored()[0]
            if stored.manifest.run_id == "ours" and stored.damage() is None
        }


@settings(max_examples=SEQUENCES)
@given(st.sampled_from(POLICIES), st.lists(actions, min_size=1, max_size=12))
def test_one_intact_checkpoint_stays_and_pinned_and_foreign_ones_are_never_removed(keep, sequence):
    world = World(keep)
    for action in sequence:
        world.do(*action)


def test_the_check_finds_a_policy_that_removes_what_is_pinned(monkeypatch):
    world = World(Latest(1))
    world.do("save", 0, -1)
    world.do("pin", 0, -1)
    monkeypatch.setattr(Shelf, "pins", lambda shelf: {})
    pinned = world.shelf.committed()[0]
    world.do("save", 0, -1)
    monkeypatch.undo()
    assert pinned not in world.shelf.committed()


def test_the_newest_is_read_back_before_it_is_the_only_one(monkeypatch):
    world = World(Latest(1))
    world.do("save", 0, -1)
    commit = Attempt.commit

    def spoilt(attempt, manifest):
        commit(attempt, manifest)
        attempt.store.delete(f"checkpoints/{attempt.name}/global.json")

    monkeypatch.setattr(saving.Attempt, "commit", spoilt)
    world.do("save", 0, -1)
    assert world.intact() == {"000000000001-00000001"}
