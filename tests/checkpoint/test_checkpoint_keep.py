"""Which checkpoints stay."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopline.checkpoint import All, Best, Each, Keep, Latest, Ref


def ref(number, *, step=None, epochs=0, **metrics):
    named = {f"val/{name}": value for name, value in metrics.items()}
    return Ref(f"{number:012d}-00000000", number if step is None else step, epochs, 0, 1, number, 0, named)


def numbers(refs):
    return sorted(ref.serial for ref in refs)


STEPS = [ref(step) for step in range(0, 60, 5)]
LOSSES = [ref(i, loss=loss) for i, loss in enumerate([0.5, 0.3, math.nan, 0.3, 0.9, math.inf, -math.inf])]

policies = st.recursive(
    st.one_of(
        st.integers(1, 5).map(Latest),
        st.builds(Best, st.integers(1, 5), st.just("val/loss"), st.sampled_from(["min", "max"])),
        st.integers(1, 20).map(lambda count: Each(steps=count)),
        st.integers(1, 5).map(lambda count: Each(epochs=count)),
        st.just(All()),
    ),
    lambda inner: st.tuples(inner, inner).map(lambda pair: pair[0] | pair[1]),
    max_leaves=4,
)


@st.composite
def histories(draw):
    """Checkpoints in the order in which they were taken; an epoch's end may be taken at the step before it again."""
    step, epochs, found = 0, 0, []
    for number in range(draw(st.integers(0, 12))):
        step += draw(st.integers(0, 7))
        epochs += draw(st.integers(0, 1))
        metrics = {"loss": draw(st.floats())} if draw(st.booleans()) else {}
        found.append(ref(number, step=step, epochs=epochs, **metrics))
    return found


@pytest.mark.parametrize(("count", "kept"), [(1, [55]), (2, [50, 55]), (100, list(range(0, 60, 5)))])
def test_latest_keeps_the_newest(count, kept):
    assert numbers(Latest(count).keep(STEPS)) == kept


@pytest.mark.parametrize(("count", "kept"), [(1, [1]), (2, [1, 3]), (3, [0, 1, 3]), (9, [0, 1, 3, 4])])
def test_best_keeps_the_lowest_and_of_equals_the_older_and_never_what_is_no_number(count, kept):
    assert numbers(Best(count, "val/loss").keep(LOSSES)) == kept


def test_best_with_mode_max_keeps_the_highest():
    assert numbers(Best(2, "val/loss", "max").keep(LOSSES)) == [0, 4]


def test_best_keeps_none_that_does_not_have_the_metric():
    assert Best(2, "val/accuracy").keep(LOSSES) == set()


def test_each_keeps_the_first_at_or_after_every_multiple():
    assert numbers(Each(steps=12).keep(STEPS)) == [15, 25, 40, 50]


def test_each_keeps_one_for_each_so_many_epochs():
    refs = [ref(i, epochs=i // 2) for i in range(12)]
    assert numbers(Each(epochs=2).keep(refs)) == [4, 8]


def test_all_keeps_all():
    assert All().keep(STEPS) == set(STEPS)


@given(policies, policies, histories())
def test_of_two_policies_what_either_keeps_is_kept(one, other, refs):
    assert (one | other).keep(refs) == one.keep(refs) | other.keep(refs)


@given(policies, histories())
def test_what_is_kept_is_kept_again_when_the_rest_is_gone(policy, refs):
    kept = policy.keep(refs)
    assert policy.keep([ref for ref in refs if ref in kept]) == kept


@given(policies, histories())
def test_what_was_let_go_is_never_wanted_later(policy, refs):
    """Retention that removes after each save ends with what it would have kept of all."""
    held = []
    for new in refs:
        held.append(new)
        kept = policy.keep(held)
        held = [ref for ref in held if ref in kept or ref is new]
    assert policy.keep(held) == policy.keep(refs)


def test_a_policy_of_many_parts_lists_each_of_them():
    assert (Latest(2) | Best(1) | Each(epochs=1)).parts == (Latest(2), Best(1), Each(epochs=1))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Latest(0), r"Latest\(0\): give a whole number, 1 or more"),
        (lambda: Latest(True), r"Latest\(True\)"),
        (lambda: Latest(1.5), r"Latest\(1.5\)"),
        (lambda: Best(0), r"Best\(0\)"),
        (lambda: Best(1, "val/loss", "low"), "give 'min' or 'max'"),
        (lambda: Best(1, "loss"), "such as 'val/loss'"),
        (lambda: Best(1, 7), "such as 'val/loss'"),
        (lambda: Each(), "give one of the two"),
        (lambda: Each(steps=1, epochs=1), "give one of the two"),
        (lambda: Each(steps=0), r"Each\(0\): give a whole number"),
        (lambda: Each(epochs=-1), r"Each\(-1\)"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused_where_it_is_made(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_a_policy_goes_together_with_policies_alone():
    with pytest.raises(TypeError):
        Latest(1) | 2


def test_a_policy_of_ones_own_without_keep_says_what_is_missing():
    class Mine(Keep):
        pass

    with pytest.raises(NotImplementedError, match=r"Mine has no keep\(refs\)"):
        Mine().keep([])
