"""The page of the sweep benchmark."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("optuna")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/ is not installed, it lives beside src/

from tests.helpers.sweeps import sweep_result

from bench import sweep


def test_the_page_has_the_paper_beside_ours_and_a_verdict_on_minutes():
    result = sweep_result({1: [20.1, 21.0, 20.2], 2: [22.0, 22.7, 21.9], 4: [22.4, 23.0, 22.5]})
    cost = {"seconds_processor": 600.0, "steps_timed": 5}  # of 10 steps: it was taken up again in the middle
    for number, outcome in enumerate(result.outcomes):
        result.outcomes[number] = replace(outcome, report=outcome.report | cost)
    page = sweep.page(result)
    assert sweep.minutes(result.outcomes[0].report) == 10.0
    assert "24.9" in page
    assert "NOT REACHED" in page  # 10 minutes are more than 8
    assert result.answer in page
