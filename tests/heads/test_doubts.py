"""What is not verified, and notes: in every table, on the terminal, in JSON."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.heads.doubtful import doubtful, ids, proved
from typer.testing import CliRunner

import manyheads as mh
from manyheads.cli import app
from manyheads.heads.doubts import doubts_in
from manyheads.inspection import Counted, notes
from manyheads.surgery.elimination import elimination
from manyheads.training.live import looking

UNVERIFIED, NOTED = "layers.1", "layers.2"
FACTORY = "tests.heads.doubtful:doubtful"


@pytest.fixture
def batches():
    return [ids(4, 11, seed) for seed in range(3)]


@pytest.fixture
def tokens(tmp_path) -> Path:
    np.save(tmp_path / "ids.npy", ids(30, 11).numpy())
    return tmp_path / "ids.npy"


def table_of_training(model, batches):
    with looking(model) as look:
        model(batches[0]).square().mean().backward()
    return look.table


TABLES = {
    "inspect": mh.inspect,
    "roles": mh.roles,
    "diversity": mh.diversity,
    "elimination": elimination,
    "training": table_of_training,
    **{name: lambda m, b, name=name: mh.importance(m, b, name) for name in ("fisher", "confidence", "random")},
}


@pytest.mark.filterwarnings("ignore:diversity")
@pytest.mark.parametrize("verb", TABLES)
def test_every_table_says_what_is_not_verified(verb, batches) -> None:
    table = TABLES[verb](doubtful(), batches)
    found = doubts_in(table)
    assert list(found.unverified) == [UNVERIFIED]
    assert "opaque operator" in found.unverified[UNVERIFIED]
    assert "do not sum to one" in found.notes[NOTED]
    assert not doubts_in(TABLES[verb](proved(), batches)).sentences()


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    if code:
        assert result.exit_code and isinstance(result.exception, ValueError)
        return str(result.exception)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("verb", ["inspect", "roles", "diversity", "importance"])
def test_verbs_say_what_is_not_verified(verb, tokens, tmp_path) -> None:
    given = (verb, FACTORY, "--tokens", tokens, "--out", tmp_path / "out")
    said = run(*given)
    assert f"Note: not verified, {UNVERIFIED}: one part of it was seen" in said
    assert f"Note: {NOTED}: the model changes its weights after the softmax" in said
    assert f"{UNVERIFIED} was not seen" not in said
    found = json.loads(run(*given, "--json"))
    assert list(found["unverified"]) == [UNVERIFIED]
    assert "do not sum to one" in found["site_notes"][NOTED]
    clean = (verb, "tests.heads.doubtful:proved", "--tokens", tokens, "--out", tmp_path / "clean")
    assert "verified" not in run(*clean)
    found = json.loads(run(*clean, "--json"))
    assert (found["unverified"], found["site_notes"]) == ({}, {})


def test_notes_of_a_count_name_modules_that_are_no_sites(batches) -> None:
    table = mh.inspect(doubtful(), batches)
    counted = Counted(table, missed={UNVERIFIED: "half of it", "mixer": "a convolution", "": "nothing proved"})
    assert notes(counted) == ["mixer was not seen: a convolution"]
    counted.table = mh.inspect(proved(), batches)
    assert notes(counted)[-1] == "nothing proved"
