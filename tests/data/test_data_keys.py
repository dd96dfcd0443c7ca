"""Numbers that follow from a path alone, and streams that are seeded by them."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from loopline.data import key
from loopline.data.keys import digest, put_back, seed_streams, streams, untouched


@pytest.mark.parametrize(
    ("path", "number"),
    [
        (("sample", 7, 0, 41), 3455481975244355525),
        (("collate", 2**63 - 1, 3, 0), 1054332764710233589),
        (("sampler", -1, 0), 7724042468365963016),
        ((), 13020603013274838756),
    ],
)
def test_a_key_is_the_same_on_every_platform_and_in_every_release(path, number):
    assert key(*path) == number


def test_what_is_drawn_under_a_key_is_the_same_wherever_python_and_numpy_promise_it():
    seed_streams("sample", 7, 0, 41)
    assert (random.random(), np.random.random_sample()) == (0.6577943605452307, 0.3451550956677153)


def drawn():
    return random.getrandbits(64), random.gauss(), *np.random.randint(2**62, size=2), *torch.randn(3).tolist()


def test_the_same_path_gives_the_same_draws_whatever_was_drawn_before():
    seed_streams("sample", 7, 0, 41)
    first = drawn()
    random.gauss()
    np.random.randn()
    torch.randn(1)
    seed_streams("sample", 7, 0, 41)
    assert drawn() == first


def test_a_path_that_differs_anywhere_gives_other_draws_in_every_stream():
    paths = [
        ("sample", 7, 0, 41),
        ("sample", 7, 0, 42),
        ("sample", 7, 1, 41),
        ("sample", 8, 0, 41),
        ("collate", 7, 0, 41),
    ]
    draws = []
    for path in paths:
        seed_streams(*path)
        draws.append(drawn())
    assert [len(set(column)) for column in zip(*draws, strict=True)] == [len(paths)] * 7


def test_the_parts_of_a_path_do_not_run_into_each_other():
    assert len({key(1, 11), key(11, 1), key(111), key("1/11/"), digest(1, 1, 1, size=8)}) == 5


def test_whatever_is_done_inside_leaves_the_streams_where_they_were():
    before = streams()
    with pytest.raises(ZeroDivisionError):
        fail()
    after = drawn()
    put_back(before)
    assert after == drawn()


@untouched()
def fail():
    seed_streams("anything")
    drawn()
    raise ZeroDivisionError


def test_numpy_is_not_needed():
    code = """
        import sys, torch
        from loopline.data import keys
        for name in [name for name in sys.modules if name.split(".")[0] == "numpy"]:
            del sys.modules[name]
        states = keys.streams()
        keys.seed_streams("sample", 7, 0, 41)
        keys.put_back(states)
        print(states.numpy, "numpy" in sys.modules)
    """
    said = subprocess.run(
        [sys.executable, "-c", "\n".join(line[8:] for line in code.splitlines())],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert said.stdout.split() == ["None", "False"]
