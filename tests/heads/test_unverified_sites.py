"""What is not verified, and notes: in every table, on the terminal, in JSON."""

import json
from pathlib import Path

import numpy as np
import pytest
from tests.helpers.doubtful_model import doubtful, ids, proved, unproved
from typer.testing import CliRunner

import manyheads as mh
from manyheads.cli import app, main
from manyheads.heads.inspect import Counted
from manyheads.heads.unverified_sites import doubts_in
from manyheads.view.inspect import notes

UNVERIFIED, NOTED = "layers.1", "layers.2"
FACTORY = "tests.helpers.doubtful_model:doubtful"


@pytest.fixture
def batches():
    return [ids(4, 11, seed) for seed in range(3)]


@pytest.fixture
def tokens(tmp_path) -> Path:
    np.save(tmp_path / "ids.npy", ids(30, 11).numpy())
    return tmp_path / "ids.npy"


def table_of_training(model, batches):
    health = mh.HeadHealth(model, every=1)
    health.before_step()
    model(batches[0]).square().mean().backward()
    health.after_step()
    return health.table


TABLES = {
    "inspect": mh.inspect,
    "roles": mh.roles,
    "diversity": mh.diversity,
    "training": table_of_training,
    **{
        name: lambda m, b, name=name: mh.importance(m, b, name)
        for name in ("fisher", "confidence", "random", "elimination")
    },
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
        assert isinstance(result.exception, ValueError)
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
    clean = (verb, "tests.helpers.doubtful_model:proved", "--tokens", tokens, "--out", tmp_path / "clean")
    assert "verified" not in run(*clean)
    found = json.loads(run(*clean, "--json"))
    assert (found["unverified"], found["site_notes"]) == ({}, {})


def test_notes_of_a_count_name_modules_that_are_no_sites(batches) -> None:
    table = mh.inspect(doubtful(), batches)
    counted = Counted(
        table, missed={UNVERIFIED: "half of it", "mixer": "a convolution", "": "nothing proved"}
    )
    assert notes(counted) == ["mixer was not seen: a convolution"]
    counted.table = mh.inspect(proved(), batches)
    assert notes(counted)[-1] == "nothing proved"


SILENCING = ("leave-one-out", "gates")


@pytest.mark.parametrize("method", SILENCING)
def test_methods_that_silence_refuse_what_is_not_verified(method, batches) -> None:
    with pytest.raises(ValueError, match=rf"{method}: what the heads of 'layers.1' are could not be proved"):
        mh.importance(doubtful(), batches, method)
    table = mh.importance(doubtful(), batches, method, unverified="allow")
    assert table["importance"].isfinite().all()
    assert list(doubts_in(table).unverified) == [UNVERIFIED]


@pytest.mark.parametrize("method", ["elimination", *SILENCING])
def test_prune_refuses_what_is_not_verified_unless_told(method, batches) -> None:
    model = unproved()
    with pytest.raises(ValueError, match=r"could not be proved \(for want of means\).*unverified='allow'"):
        mh.prune(model, batches, 0.5, method=method, scope="layer")
    small = mh.prune(model, batches, 0.5, method=method, scope="layer", unverified="allow")
    assert sum(map(len, small.original_heads.values())) == 4


def test_prune_leaves_protected_heads_alone(batches) -> None:
    small = mh.prune(unproved(), batches, 0.75, protect={UNVERIFIED: [0, 1, 2, 3]})
    assert len(small.original_heads["layers.0"]) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), ("could not be proved", "--unverified allow")),
        (("--unverified", "allow"), ("manyheads: cut: layers.1 (Half) without heads",)),  # its own check
    ],
)
def test_the_command_refuses_in_one_sentence(options, words, tokens, tmp_path, capsys, monkeypatch) -> None:
    arguments = (*prune_command("doubtful", tokens, tmp_path / "a"), *options)
    monkeypatch.setattr("sys.argv", ["manyheads", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert all(part in message for part in words)
    assert "Traceback" not in message
    assert not (tmp_path / "a").exists()


def test_the_command_cuts_what_is_not_verified_when_told(tokens, tmp_path) -> None:
    given = prune_command("unproved", tokens, tmp_path / "a")
    assert "Note: not verified, layers.1: for want of means" in run(*given, "--unverified", "allow")
    given = prune_command("unproved", tokens, tmp_path / "b")
    found = json.loads(run(*given, "--unverified", "allow", "--json"))
    assert found["unverified"] == {UNVERIFIED: "for want of means"}
    assert found["site_notes"] == {}
    assert len(found["original_heads"][UNVERIFIED]) == 2


def test_the_command_ranks_by_silencing_when_told(tokens, tmp_path) -> None:
    given = (
        "importance",
        FACTORY,
        "--tokens",
        tokens,
        "--method",
        "leave-one-out",
        "--out",
        tmp_path / "out",
    )
    assert "--unverified allow" in run(*given, code=2)
    assert f"Note: not verified, {UNVERIFIED}" in run(*given, "--unverified", "allow")


def prune_command(factory: str, tokens: Path, out: Path) -> tuple[object, ...]:
    model = f"tests.helpers.doubtful_model:{factory}"
    return ("prune", model, "--tokens", tokens, "--keep", 0.5, "--uniform", "--out", out)
