"""Whether a state is fit to be gone on from."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loopline.checkpoint.finite import not_finite
from loopline.checkpoint.kinds import KINDS

FLOATS = [kind for kind in KINDS.values() if kind.is_floating_point]
WITH_INF = [kind for kind in FLOATS if kind is not torch.float8_e4m3fn]
ODD = [math.nan, math.inf, -math.inf]


def broken(tensor, inf_allowed=False):
    return not_finite([("it", tensor, inf_allowed)]) == "it"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_nan_anywhere_is_found_in_every_type(dtype):
    found = set()
    for place in (0, 1, 499, 998):
        tensor = torch.zeros(999).to(dtype)
        tensor[place] = math.nan
        found |= {broken(tensor), broken(tensor, inf_allowed=True)}
    assert found == {True}


@pytest.mark.parametrize("dtype", WITH_INF, ids=str)
@pytest.mark.parametrize("odd", [math.inf, -math.inf])
def test_an_infinity_is_found_unless_it_is_allowed(dtype, odd):
    tensor = torch.zeros(99).to(dtype)
    tensor[50] = odd
    assert (broken(tensor), broken(tensor, inf_allowed=True)) == (True, False)


@pytest.mark.parametrize("dtype", list(KINDS.values()), ids=str)
def test_ordinary_numbers_are_fit_in_every_type(dtype):
    assert [broken(torch.arange(size).to(dtype)) for size in (0, 1, 9)] == [False] * 3


@pytest.mark.parametrize("dtype", [kind for kind in FLOATS if kind.itemsize > 1], ids=str)
def test_the_largest_numbers_are_fit(dtype):
    info = torch.finfo(dtype)
    assert not broken(torch.tensor([info.max, info.min, info.tiny, -0.0], dtype=dtype))


@given(st.lists(st.floats(width=32), max_size=40), st.booleans())
def test_it_says_what_torch_says_of_every_number(values, inf_allowed):
    tensor = torch.tensor(values, dtype=torch.float32)
    expected = bool(tensor.isnan().any()) or (not inf_allowed and bool(tensor.isinf().any()))
    assert broken(tensor, inf_allowed) == expected


@pytest.mark.parametrize("odd", ODD)
def test_both_parts_of_a_complex_number_count_however_it_is_viewed(odd):
    parts = [torch.complex(*map(torch.tensor, pair)) for pair in (([0.0], [odd]), ([odd], [0.0]))]
    assert [broken(view) for part in parts for view in (part, part.conj())] == [True] * 4


def test_numbers_that_do_not_lie_in_a_row_are_looked_at_all_the_same():
    whole = torch.zeros(4, 6)
    whole[2, 3] = math.nan
    assert [broken(whole.t()), broken(whole[::2, 1::2]), broken(whole[::2, ::2])] == [True, True, False]


def test_the_first_that_is_broken_is_named():
    state = [("a", torch.ones(1), False), ("b", torch.tensor(math.inf), True), ("c", torch.tensor(math.nan), True)]
    assert (not_finite(state), not_finite([*state, ("d", torch.tensor(math.nan), False)])) == ("c", "c")


def test_a_number_alone_is_looked_at():
    assert [broken(torch.tensor(value)) for value in (1.0, math.nan, math.inf)] == [False, True, True]


def test_nothing_is_broken_where_there_is_nothing():
    assert not_finite([]) is None
