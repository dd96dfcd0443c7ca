"""A shuffle that is computed from a key: every number once, evenly, and the same for ever."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopline.data import Permutation, order

GOLDEN = {
    (1, 0, 0): [0],
    (2, 0, 0): [0, 1],
    (10, 7, 0): [4, 0, 5, 3, 2, 8, 1, 6, 9, 7],
    (10, 7, 1): [6, 5, 7, 3, 4, 8, 0, 2, 1, 9],
    (1000, 2**63 - 1, 12): [26, 688, 325, 923, 773, 565, 337, 40, 419, 789],
    (1281167, 0, 89): [1273877, 171901, 447275, 169706, 264616, 18967, 380401, 441534, 410893, 844490],
    (2**40, -5, 3): [1008046491369, 646318308987, 613342720404, 101745813081, 344739918139],
    (2**63 - 1, 1, 1): [2084062658829129364, 2373277374331121336, 8120261668143254393, 4829334562578708940],
}


def by_hand(n, *key, rounds=16):
    """The same order by whole numbers of Python, one place at a time; for a few numbers that is the faster way."""
    mask = 2**64 - 1
    text = "/".join(map(str, ("permutation/1", *key)))
    hashed = b"".join(hashlib.blake2b(f"{text}/{part}".encode(), digest_size=64).digest() for part in (0, 1))
    keys = [int.from_bytes(hashed[i : i + 8], "little") for i in range(0, 8 * rounds, 8)]
    low_bits = (n - 1).bit_length() // 2
    high_bits = (n - 1).bit_length() - low_bits

    def mixed(x):
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = ((x ^ x >> shift) * factor) & mask
        return x ^ x >> 31

    def once(x):
        high, low = x >> low_bits, x % 2**low_bits
        for i in range(0, rounds, 2):
            high ^= mixed((low + keys[i]) & mask) % 2**high_bits
            low ^= mixed((high + keys[i + 1]) & mask) % 2**low_bits
        return high << low_bits | low

    def at(place):
        place = once(place)
        while place >= n:
            place = once(place)
        return place

    return at


def excess(counts, cells):
    """How many standard deviations a count over equally likely cells lies above what chance gives."""
    expected = sum(counts.values()) / cells
    chi = sum((count - expected) ** 2 for count in counts.values()) / expected + (cells - len(counts)) * expected
    return (chi - (cells - 1)) / math.sqrt(2 * (cells - 1))


def of_all_orders(n, *, epochs, rounds=16):
    orders = (tuple(map(by_hand(n, 1, epoch, rounds=rounds), range(n))) for epoch in range(epochs))
    return excess(Counter(orders), math.factorial(n))


def of_places(n, *, epochs, order=lambda epoch, n: Permutation(n, 2, epoch)):
    return excess(Counter(pair for epoch in range(epochs) for pair in enumerate(order(epoch, n))), n * n)


def of_steps(n, *, epochs, order=lambda epoch, n: Permutation(n, 2, epoch)):
    steps = ((b - a) % n for epoch in range(epochs) for a, b in itertools.pairwise(order(epoch, n)))
    return excess(Counter(steps), n - 1)


@pytest.mark.parametrize("key", GOLDEN, ids=str)
def test_an_order_is_the_same_on_every_platform_and_in_every_release(key):
    assert list(Permutation(*key).between(0, len(GOLDEN[key]))) == GOLDEN[key]


def test_the_hash_of_an_order_is_that_of_its_version():
    assert (order.VERSION, Permutation(1000, 7, 0).first()) == ("permutation/1", "d3fa1c8da7768872")


@given(n=st.integers(1, 2**63 - 1), seed=st.integers(), place=st.integers(0))
def test_any_place_can_be_computed_by_hand(n, seed, place):
    place %= n
    assert Permutation(n, seed, 0)[place] == by_hand(n, seed, 0)(place)


@given(n=st.integers(0, 9000), seed=st.integers())
def test_every_number_comes_once(n, seed):
    assert sorted(Permutation(n, seed)) == list(range(n))


@given(n=st.integers(1, 9000), start=st.integers(0, 9000), stop=st.integers(0, 9000))
def test_a_range_of_places_is_that_part_of_the_whole(n, start, stop):
    shuffled = Permutation(n, 3, 1)
    assert list(shuffled.between(start, stop)) == list(shuffled)[start:stop]


def test_a_permutation_is_read_like_a_list():
    shuffled = Permutation(10, 7, 0)
    assert (len(shuffled), shuffled[0], shuffled[-1], [*shuffled][9]) == (10, 4, 7, 7)


@pytest.mark.parametrize("place", [10, -11])
def test_a_place_that_is_not_there_is_an_index_error(place):
    with pytest.raises(IndexError):
        Permutation(10, 7, 0)[place]


def test_a_negative_length_is_refused():
    with pytest.raises(ValueError, match="Permutation"):
        Permutation(-1)


def test_seeds_and_epochs_do_not_run_into_each_other():
    orders = {tuple(Permutation(50, *key)) for key in itertools.product((1, 11, 111), (1, 11, 111))}
    assert len(orders) == 9


@pytest.mark.parametrize("n", [3, 5, 6])
def test_all_orders_of_a_few_are_equally_likely(n):
    assert abs(of_all_orders(n, epochs=6000)) < 4


def test_with_half_the_rounds_some_orders_would_be_seen_to_be_likelier():
    assert of_all_orders(6, epochs=6000, rounds=8) > 4


@pytest.mark.parametrize("n", [32, 37])
def test_every_number_is_equally_likely_at_every_place(n):
    assert abs(of_places(n, epochs=400)) < 4


def test_an_order_that_forgets_the_epoch_would_be_seen():
    assert of_places(37, epochs=400, order=lambda epoch, n: by_rotation(0, n)) > 4


@pytest.mark.parametrize("n", [32, 37])
def test_a_number_is_followed_by_any_other(n):
    assert abs(of_steps(n, epochs=400)) < 4


def test_an_order_that_only_begins_elsewhere_would_be_seen():
    assert of_steps(37, epochs=37, order=by_rotation) > 4


def by_rotation(epoch, n):
    return [(place + epoch) % n for place in range(n)]
