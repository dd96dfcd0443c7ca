"""When something is due."""

import time

import pytest

from loopline import At, Every, Never, When


def due(when, unit="steps", counts=range(1, 7)):
    watch = when.watch()
    return [count for count in counts if watch(unit, count)]


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set by hand."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def forward(seconds):
        now[0] += seconds

    return forward


def test_every_so_many_steps():
    assert (due(Every(steps=3)), due(Every(steps=3), "epochs")) == ([3, 6], [])


def test_every_so_many_epochs():
    assert (due(Every(epochs=2), "epochs"), due(Every(epochs=2))) == ([2, 4, 6], [])


@pytest.mark.parametrize("when", [Every(seconds=60), Every(minutes=1)])
@pytest.mark.parametrize("unit", ["steps", "epochs"])
def test_every_so_much_time(clock, when, unit):
    watch = when.watch()
    said = []
    for seconds in (30, 29, 1, 30, 100, 1):
        clock(seconds)
        said.append(watch(unit, 1))
    assert said == [False, False, True, False, True, False]


def test_time_is_counted_from_when_one_begins_to_watch(clock):
    when = Every(seconds=10)
    clock(60)
    assert due(when) == []


def test_two_watches_of_one_policy_do_not_disturb_each_other(clock):
    when = Every(seconds=10)
    one, other = when.watch(), when.watch()
    clock(10)
    assert (one("steps", 1), one("steps", 1), other("steps", 1)) == (True, False, True)


def test_at_given_counts():
    when = At(steps=[2, 5], epochs=3)
    assert (due(when), due(when, "epochs")) == ([2, 5], [3])


def test_at_one_count_is_at_a_list_of_one():
    assert At(steps=4) == At(steps=[4])


def test_never_is_never():
    assert (due(Never()), due(Never(), "epochs")) == ([], [])


def test_either_of_two_is_due_when_one_of_them_is():
    when = Every(steps=4) | At(steps=[1]) | Every(epochs=5) | Never()
    assert (due(when), due(when, "epochs")) == ([1, 4], [5])


def test_every_timer_of_several_hears_every_question(clock):
    watch = (Every(steps=1) | Every(seconds=10)).watch()
    clock(10)
    assert watch("steps", 1)
    assert watch("epochs", 1) is False


def test_policies_are_values():
    assert (
        Every(steps=1) == Every(steps=1),
        Every(steps=1) == Every(epochs=1),
        len({Never(), Never(), At(steps=1), At(steps=[1])}),
    ) == (True, False, 2)


def test_two_equal_unions_are_equal():
    assert (Every(steps=1) | Never()) == (Every(steps=1) | Never())


@pytest.mark.parametrize("when", [Every(steps=1), At(epochs=1), Never(), Every(steps=1) | Never()])
def test_every_policy_is_a_when(when):
    assert isinstance(when, When)


@pytest.mark.parametrize(
    ("when", "units"),
    [
        (Every(steps=1), {"steps"}),
        (Every(epochs=1), {"epochs"}),
        (Every(seconds=1), {"steps", "epochs"}),
        (At(steps=1), {"steps"}),
        (At(epochs=1), {"epochs"}),
        (At(steps=1, epochs=1), {"steps", "epochs"}),
        (Never(), set()),
        (Every(steps=1) | At(epochs=1), {"steps", "epochs"}),
        (Every(steps=1) | Never(), {"steps"}),
    ],
)
def test_a_policy_says_in_which_units_it_can_be_due(when, units):
    assert when.units == units


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "nothing"),
        ({"steps": 1, "epochs": 2}, "steps=1, epochs=2"),
        ({"seconds": 1.0, "minutes": 1.0}, "seconds=1.0, minutes=1.0"),
    ],
)
def test_every_wants_exactly_one_unit(given, said):
    with pytest.raises(ValueError, match="takes exactly one of") as caught:
        Every(**given)
    assert str(caught.value) == (
        f"Every takes exactly one of steps, epochs, seconds, minutes; it was given {said}. "
        "Join two with |: Every(steps=500) | Every(minutes=10)."
    )


@pytest.mark.parametrize("name", ["steps", "epochs"])
@pytest.mark.parametrize("count", [1.5, 2.0, "3", True])
def test_every_wants_whole_numbers_of_steps_and_epochs(name, count):
    with pytest.raises(TypeError, match=rf"^Every\({name}={count!r}\): a number of {name} is a whole number\.$"):
        Every(**{name: count})


@pytest.mark.parametrize("name", ["steps", "epochs", "seconds", "minutes"])
@pytest.mark.parametrize("count", [0, -1])
def test_every_wants_a_number_above_zero(name, count):
    with pytest.raises(ValueError, match=rf"^Every\({name}={count}\) would never be due; give a number above 0\.$"):
        Every(**{name: count})


@pytest.mark.parametrize("seconds", [float("nan"), "10"])
def test_every_wants_a_number_of_seconds(seconds):
    with pytest.raises((TypeError, ValueError), match=r"^Every\(seconds="):
        Every(seconds=seconds)


def test_at_wants_something():
    with pytest.raises(ValueError, match=r"^At needs steps=\.\.\. or epochs=\.\.\., as numbers done; .* use Never\(\)"):
        At()


def test_at_counts_from_one():
    with pytest.raises(ValueError, match=r"^At\(epochs=\[-1, 0\]\) would never be due: the first count is 1\.$"):
        At(epochs=[0, 3, -1])


@pytest.mark.parametrize("wrong", [1.5, [1.5], "10", ["a"], [None]])
def test_at_wants_whole_numbers(wrong):
    with pytest.raises((TypeError, ValueError), match=r"^At\(steps="):
        At(steps=wrong)


@pytest.mark.parametrize("other", [5, None, "epochs"])
def test_only_policies_can_be_joined(other):
    with pytest.raises(TypeError):
        Every(steps=1) | other


def test_a_policy_of_ones_own_can_be_joined():
    class Even(When):
        def watch(self):
            return lambda unit, count: count % 2 == 0

    assert (due(Every(steps=3) | Even()), due(Even() | Every(steps=3))) == ([2, 3, 4, 6], [2, 3, 4, 6])


def test_a_policy_of_ones_own_is_asked_of_steps_and_epochs_unless_it_says_otherwise():
    class Mine(When): ...

    assert Mine().units == {"steps", "epochs"}


def test_a_policy_of_ones_own_without_a_watch_is_named():
    class Mine(When): ...

    Mine.__qualname__ = "Mine"
    with pytest.raises(NotImplementedError, match=r"^Mine has no watch\(\)\.$"):
        Mine().watch()
