"""The figure of a sweep."""

import re

import pytest

pytest.importorskip("optuna")

from tests.helpers.sweeps import sweep_result

VALUES = {1: [20.1, 21.0, 20.2], 4: [22.0, 22.7, 21.9], 16: [22.4, None, 22.5]}


def test_a_curve_has_heads_on_a_log_axis_and_every_seed(tmp_path):
    sweep_result(VALUES).plot(tmp_path / "curve.svg")
    drawn = (tmp_path / "curve.svg").read_text()
    for text in ("heads (log scale)", "bleu (higher is better)", "1 failed", "translation, equal compute"):
        assert f"<!-- {text}" in drawn, text
    shown = [int(number) for number in re.findall(r"<!-- (\d+) -->", drawn)]
    assert {1, 4, 16} <= set(shown)


def test_other_options_are_lines_and_the_file_is_the_same_again(tmp_path):
    for name in ("a.svg", "b.svg", "c.png"):
        sweep_result(VALUES, higher=False, d_keys=[4, 8]).plot(tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert "<!-- d_key 8 -->" in (tmp_path / "a.svg").read_text()
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_without_several_heads_the_other_option_is_on_the_axis(tmp_path):
    sweep_result({4: [1.0, 2.0, 1.5]}, d_keys=[4, 8, 16]).plot(tmp_path / "curve.svg")
    assert "<!-- d_key (log scale) -->" in (tmp_path / "curve.svg").read_text()
