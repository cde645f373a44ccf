"""What the tests of training learn from."""

import pytest


@pytest.fixture
def text(tmp_path):
    """A text with something to learn in it."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{n} and {n + 1} are {2 * n + 1}.\n" for n in range(97)), encoding="utf-8")
    return str(path)
