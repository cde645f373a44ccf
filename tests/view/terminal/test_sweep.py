"""A sweep on the terminal."""

import json

import pytest

pytest.importorskip("optuna")

from tests.helpers.sweeps import sweep_result

from manyheads.common.json_numbers import plain
from manyheads.view.terminal.presentation import plain_text
from manyheads.view.terminal.sweep import SweepPresentation, how_it_ended


def test_the_table_has_means_margins_and_costs(tmp_path):
    result = sweep_result({1: [20.0, 20.3, 20.1], 2: [29.9, 30.2, 30.4], 4: [30.0, 30.1, None]}, out=tmp_path)
    shown = plain_text(SweepPresentation(result).show, width=80)
    assert "20.13 ± 0.38" in shown
    assert "2 (1 failed)" in shown
    assert "? cannot be told apart from the best" in shown
    assert "200 ms" in shown
    assert max(map(len, shown.split(result.answer)[0].splitlines())) <= 80
    assert json.loads(json.dumps(plain(SweepPresentation(result).document())))["settings"][0]["heads"] == 1
    assert how_it_ended(result) is None


def test_one_seed_and_no_seed_are_shown(tmp_path):
    shown = plain_text(SweepPresentation(sweep_result({1: [2.5], 2: [None]}, higher=False)).show)
    assert "Only 1 head has a result: 2.5 (loss, lower is better)." in shown
    assert " - " in shown
