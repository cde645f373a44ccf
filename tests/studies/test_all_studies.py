"""Every study has the shape of one, runs in seconds at its tiny size, draws, and judges what it measured."""

import dataclasses

import pytest

from manyheads.studies import NAMES, find
from manyheads.studies.drawing import as_svg
from manyheads.studies.run import RECORDS, recorded, study
from manyheads.studies.study import VERDICTS, Claim, Settings, Words


def words_of(claim: Claim) -> list[Words]:
    return [claim.sentence, claim.explanation, claim.rule, claim.caption]


@pytest.mark.parametrize("name", NAMES)
def test_a_study_is_written_in_both_languages(name):
    module = find(name)
    texts = [*words_of(module.claim), *module.COLUMNS.values()]
    assert all(text.en.isascii() and not text.zh.isascii() for text in texts)
    assert module.claim.sources
    assert list(module.SIZES) == ["tiny", "quick", "full"]
    assert all(isinstance(settings, Settings) for settings in module.SIZES.values())
    assert module.SIZES["quick"].data is None
    assert module.SIZES["full"].seeds >= 3


@pytest.mark.parametrize("name", NAMES)
def test_a_study_runs_draws_and_judges(name):
    module = find(name)
    result = study(name, "tiny")
    assert result.complete
    assert all(set(module.COLUMNS) >= set(row) - set(result.rows[0]) for row in result.rows)
    assert set(module.COLUMNS) <= {column for row in result.rows for column in row}
    judgement = module.verdict(result)
    assert judgement.verdict in VERDICTS
    assert any(character.isdigit() for character in judgement.because.en)
    assert "nan" not in judgement.because.en
    english, chinese = (as_svg(module.figure(result, language)) for language in ("en", "zh"))
    assert english != chinese
    assert "<text" in english


@pytest.mark.parametrize("name", NAMES)
def test_the_first_seed_of_every_setting_comes_first(name):
    """Then a run that is ended early has something to show for all settings."""
    module = find(name)
    seeds = [part.key["seed"] for part in module.parts(module.SIZES["full"]) if "seed" in part.key]
    assert seeds == sorted(seeds)


@pytest.mark.parametrize("name", NAMES)
def test_two_runs_with_the_same_seed_measure_the_same(name):
    module = find(name)
    part = module.parts(module.SIZES["tiny"])[0]
    timed = {column for column in module.COLUMNS if "seconds" in column or "bytes" in column}
    first, second = part.measure(), part.measure()
    rows = [rows if isinstance(rows, list) else [rows] for rows in (first, second)]
    for one, other in zip(*rows, strict=True):
        assert list(one) == list(other)
        for column in set(one) - timed:
            number = isinstance(one[column], float)
            expected = pytest.approx(one[column], 1e-3, 1e-6, nan_ok=True) if number else one[column]
            assert other[column] == expected


def test_records_are_full_and_complete_and_of_studies_that_exist():
    for path in RECORDS.glob("*.json"):
        result = recorded(path.stem)
        assert result is not None
        assert path.stem in NAMES
        assert result.complete
        assert result.size == "full"
        names = {field.name for field in dataclasses.fields(find(path.stem).SIZES["full"])}
        assert set(result.settings) == names
