"""A model and its corpus from options."""

import pytest

from manyheads.data.source import Source


def test_processes_do_not_share_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="several processes cannot share standard input"):
        Source(text="-").open()


def test_a_sample_has_no_negative_size() -> None:
    with pytest.raises(ValueError, match="sample: got -1"):
        Source().open(sample=-1)
