import sys
from pathlib import Path

import pytest
from tests.stores.s3 import bucket, s3_environment, s3_proxy, s3_server, s3_session

sys.path.insert(0, str(Path(__file__).parent))

import whole

__all__ = ["bucket", "s3_environment", "s3_proxy", "s3_server", "s3_session"]

# programs that tests start in processes of their own; to look into one for doctests would run it here
collect_ignore = ["contender.py", "signalled.py", "two_trainings.py"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run's folder with several checkpoints, which nobody changes."""
    return whole.make(tmp_path_factory.mktemp("made") / "run")


@pytest.fixture(scope="module")
def uncut(tmp_path_factory):
    """What a training comes to that was never interrupted."""
    return whole.train(tmp_path_factory.mktemp("uncut"), whole.WHOLE)


@pytest.fixture
def folder(made, tmp_path):
    """A copy that may be damaged, or written into by a stranger."""
    return whole.copied(made, tmp_path / "run")


@pytest.fixture
def newest(folder):
    """The folder of the newest checkpoint."""
    return whole.checkpoints(folder)[whole.NEWEST]
