"""Code as users write it passes mypy --strict, and their mistakes do not."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.mark.slow
def test_user_code_passes_mypy_strict_and_mistakes_are_found():
    api = pytest.importorskip("mypy.api")
    files = [str(path) for path in sorted(HERE.glob("user_*.py"))]
    said, trouble, status = api.run(
        [
            "--strict",
            "--config-file=",
            "--follow-imports=silent",
            "--disable-error-code=no-untyped-call",  # torch's own: some optimizers are not typed
            f"--cache-dir={ROOT / '.mypy_cache'}",
            *files,
        ]
    )
    assert (said, trouble, status) == (f"Success: no issues found in {len(files)} source files\n", "", 0)
