"""Writers are called before readers, whatever is attached in whatever order."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopline import Binding, Run, at
from loopline.core.errors import OrderCycle

NAMES = ["metrics", "metrics/val", "metrics/val/loss", "metrics/val/f1", "metrics/value", "grads", "weights", "lr"]


@dataclass(frozen=True)
class Wants:
    reads: frozenset[str]
    writes: frozenset[str]
    order: int


wants = st.builds(
    Wants,
    st.frozensets(st.sampled_from(NAMES), max_size=2),
    st.frozensets(st.sampled_from(NAMES), max_size=2),
    st.integers(-1, 1),
)


def is_about(one: str, other: str) -> bool:
    a, b = one.split("/"), other.split("/")
    return a[: len(b)] == b or b[: len(a)] == a


def edits(callback: Wants, name: str) -> bool:
    return any(is_about(name, r) for r in callback.reads) and any(is_about(name, w) for w in callback.writes)


def must_come_first(writer: Wants, reader: Wants) -> bool:
    """The reader needs something that the writer writes, and not both of them edit it."""
    return any(
        is_about(w, r) and not (edits(writer, w) and edits(reader, r)) for w in writer.writes for r in reader.reads
    )


def expected_order(callbacks: list[Wants]) -> list[int] | None:
    """Always the first, by order and attachment, of those that wait for nobody; None where there is none."""
    left, done = list(range(len(callbacks))), []
    while left:
        free = [i for i in left if not any(must_come_first(callbacks[j], callbacks[i]) for j in left if j != i)]
        if not free:
            return None
        chosen = min(free, key=lambda i: (callbacks[i].order, i))
        done.append(chosen)
        left.remove(chosen)
    return done


def attached(callbacks: list[Wants], called: list[int]) -> list[object]:
    """A class of its own for each, so that messages name it."""

    def listener(i: int, wants: Wants) -> object:
        def bindings(self, run):
            yield Binding(
                at.STEP_END, lambda run: called.append(i), self, wants.order, reads=wants.reads, writes=wants.writes
            )

        return type(f"C{i}", (), {"bindings": bindings})()

    return [listener(i, wants) for i, wants in enumerate(callbacks)]


@given(st.lists(wants, max_size=7))
def test_the_order_is_that_of_data_then_of_numbers_then_of_attachment(callbacks):
    called: list[int] = []
    expected = expected_order(callbacks)
    with pytest.raises(OrderCycle) if expected is None else nullcontext():
        Run(callbacks=attached(callbacks, called)).emit(at.STEP_END)
    assert called == (expected or [])


@given(st.lists(wants, min_size=2, max_size=7).filter(lambda callbacks: expected_order(callbacks) is None))
def test_a_cycle_names_its_members_and_each_really_waits_for_the_one_before(callbacks):
    with pytest.raises(OrderCycle) as caught:
        Run(callbacks=attached(callbacks, []))
    steps = [(int(w), int(r)) for w, r in re.findall(r"C(\d+) writes .*?, which C(\d+) reads", str(caught.value))]
    circle = [w for w, _ in steps]
    assert [r for _, r in steps] == [*circle[1:], circle[0]]
    assert all(must_come_first(callbacks[w], callbacks[r]) for w, r in steps)


def test_an_editor_comes_after_who_only_writes_and_before_who_only_reads():
    reader = Wants(frozenset(["metrics/val/loss"]), frozenset(), -1)
    editor = Wants(frozenset(["metrics"]), frozenset(["metrics"]), 0)
    writer = Wants(frozenset(), frozenset(["metrics/val/loss"]), 1)
    called: list[int] = []
    Run(callbacks=attached([reader, editor, writer], called)).emit(at.STEP_END)
    assert called == [2, 1, 0]
