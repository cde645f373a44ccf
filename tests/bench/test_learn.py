"""How the training benchmark keeps its books: parts on record, and what a run cost over all its sittings."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/ is not installed, it lives beside src/

from bench import cost, learn, runs
from manyheads.tasks.language import Language


def test_the_page_has_all_parts_in_their_order_and_the_latest_of_each(tmp_path):
    for part, report in (("speed", "slow"), ("multi30k", "37.5"), ("speed", "twice")):
        learn.keep(part, report, "a machine", tmp_path)
    page = (tmp_path / "learn.md").read_text()
    assert page.index("### multi30k") < page.index("37.5") < page.index("### speed") < page.index("twice")
    assert "slow" not in page
    assert list(json.loads((tmp_path / "learn.json").read_text())) == ["speed", "multi30k"]


def test_a_run_ends_after_its_minutes_and_adds_up_what_it_cost(tmp_path):
    (tmp_path / "text.txt").write_text("some words, and some more. " * 20)
    out = tmp_path / "run"
    options = {"steps": 9, "batch_tokens": 55, "evaluate_every": 1, "watch_every": 0, "evaluate_examples": 1}

    def go(minutes):
        task = Language(d_model=6, heads=2, layers=1, context=11)
        return runs.run(task, tmp_path / "text.txt", out, minutes, **options)

    result, first = go(0.0)
    assert (result.ended, result.step) == ("interrupted", 2)
    result, second = go(10.0)
    assert (result.ended, result.step) == ("finished", 9)
    assert second.processor > first.processor > 0
    assert json.loads((tmp_path / "run-cost.json").read_text())["processor"] == pytest.approx(
        second.processor, rel=0.5
    )
    assert str(cost.Cost(120, 180)) == "1.5 minutes of two cores (2.0 passed, shared with others)"
