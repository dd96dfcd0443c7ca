from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from loopline.testing import Recorder

# a slow machine is not a failing test
settings.register_profile("loopline", deadline=None)
settings.load_profile("loopline")

# the models here are so small that waking a second thread costs more than it does
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regold", action="store_true", help="write the golden files anew; review their diff")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[Recorder, str], None]:
    """Compares a recording with tests/golden/<name>.txt."""

    def compare(recorder: Recorder, name: str) -> None:
        path = Path(__file__).parent / "golden" / f"{name}.txt"
        recorder.assert_equal(path, rewrite=request.config.getoption("--regold"))

    return compare
