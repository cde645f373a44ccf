"""study keeps what was measured, continues, and does not mix rows of other settings or code."""

import signal

import pytest
import torch

from manyheads.common.interrupts import Interrupted
from manyheads.studies import find
from manyheads.studies.result import read_result
from manyheads.studies.run import study

NAME = "splitting_is_free"


def interrupt_after(parts):
    def progress(stage, done, total):
        if done == parts:
            signal.raise_signal(signal.SIGINT)

    return progress


def test_a_run_that_was_ended_continues_with_the_same_rows(tmp_path):
    ended = study(NAME, "tiny", out=tmp_path, progress=interrupt_after(2))
    assert not ended.complete
    assert len(ended.rows) == 2
    steps = []
    continued = study(NAME, "tiny", out=tmp_path, progress=lambda stage, done, total: steps.append(done))
    assert steps[0] == 2
    assert continued.complete
    assert continued.rows[:2] == ended.rows
    key = ["heads", "seed"]
    whole = study(NAME, "tiny")
    assert [[row[k] for k in key] for row in continued.rows] == [[row[k] for k in key] for row in whole.rows]


def test_a_run_that_was_ended_before_its_first_part_has_no_result():
    with pytest.raises(Interrupted):
        study(NAME, "tiny", progress=interrupt_after(0))


def test_a_complete_run_measures_nothing_again(tmp_path):
    study(NAME, "tiny", out=tmp_path)
    before = (tmp_path / "result.json").read_bytes()
    study(NAME, "tiny", out=tmp_path)
    assert (tmp_path / "result.json").read_bytes() == before


def test_rows_of_other_settings_are_not_taken_over(tmp_path):
    study(NAME, "tiny", out=tmp_path)
    other = study(NAME, "tiny", out=tmp_path, settings={"heads": "1,2"}, seeds=1)
    assert [row["heads"] for row in other.rows] == [1, 2]
    assert read_result(tmp_path / "result.json").rows == other.rows


def test_rows_of_other_code_are_not_taken_over(tmp_path):
    result = study(NAME, "tiny", out=tmp_path)
    result.code = "of another version"
    result.rows = result.rows[:1]
    result.save(tmp_path / "result.json")
    steps = []
    study(NAME, "tiny", out=tmp_path, progress=lambda stage, done, total: steps.append(done))
    assert steps[0] == 0


def test_bad_input_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="no 'nothing'; expected one of"):
        study("nothing")
    with pytest.raises(ValueError, match="size: expected one of tiny, quick, full, got 'huge'"):
        study(NAME, "huge")
    with pytest.raises(ValueError, match="no setting 'head'; it has seeds, data, heads"):
        study(NAME, settings={"head": "3"})
    with pytest.raises(ValueError, match="heads=a: expected a whole number"):
        study(NAME, settings={"heads": "a"})
    with pytest.raises(ValueError, match="seeds: expected 1 or more, got 0"):
        study(NAME, seeds=0)
    (tmp_path / "result.json").write_text("[]")
    with pytest.raises(ValueError, match="is damaged, or is something else"):
        study(NAME, "tiny", out=tmp_path)


def test_the_random_state_of_the_caller_is_left_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    study("scaled_scores", "tiny", seeds=1)
    assert torch.equal(torch.rand(2), expected)


def test_settings_of_a_study_are_its_fields():
    assert find(NAME).SIZES["tiny"].heads == (1, 2, 4)
