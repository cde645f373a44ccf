"""What several files of tests share."""

from __future__ import annotations

import pytest

from manyheads.nn import block_statistics


@pytest.fixture(params=["blocks", "tiles"])
def engine(request, monkeypatch):
    """Sequences of any length go through one engine or the other."""
    least = 0 if request.param == "blocks" else 10**9
    monkeypatch.setattr(block_statistics, "SHORTEST", least)
