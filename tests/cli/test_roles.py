"""manyheads roles: a table a person understands, JSON for machines, files, and mistakes in one sentence."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

import manyheads as mh
from manyheads import cli

FACTORY = """
import sys
sys.path.insert(0, {root!r})
from tests.helpers.roles import Known
from tests.helpers.roles import tokenizer

def known():
    return Known()

def spoken():
    return Known(), tokenizer()
"""


def run(arguments: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the command in a folder that holds the factories and token ids; its exit code."""
    numpy = pytest.importorskip("numpy")
    (folder / "made_for_roles.py").write_text(FACTORY.format(root=str(Path(__file__).parents[2])))
    numpy.save(folder / "ids.npy", numpy.random.default_rng(0).integers(8, 100, (5, 61)))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "made_for_roles", raising=False)
    monkeypatch.setattr(sys, "argv", ["manyheads", "roles", *arguments])
    with pytest.raises(SystemExit) as done:
        cli.main()
    code = done.value.code
    return code if isinstance(code, int) else 0


def test_a_person_reads_who_does_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    assert run(["made_for_roles:known", "--tokens", "ids.npy", "--out", "new"], tmp_path, monkeypatch) == 0
    told = capsys.readouterr().out
    lines = {line.split()[0]: line for line in told.splitlines() if line and not line.startswith(" ")}
    assert "0.0 1.00" in lines["previous"]
    assert lines["induction"].split()[1:4] == ["2", "0.4", "1.00,"]
    assert "440" in lines["induction"]
    assert "0.2" in lines["sink"]
    assert "0 of 6 heads have none of these roles." in told
    assert "separator: no tokenizer" in told
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "roles.csv",
        "roles.json",
        "roles.txt",
    ]
    assert "induction" in (tmp_path / "new" / "roles.txt").read_text()
    table = mh.HeadTable.load(tmp_path / "new" / "roles.json")
    assert "induction" in table["roles"][4]
    with (tmp_path / "new" / "roles.csv").open(newline="") as file:
        assert "induction" in next(row for row in csv.DictReader(file) if row["head"] == "4")["roles"]


def test_machines_get_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--only", "induction, positional", "--json"]
    assert run(["made_for_roles:known", "--tokens", "ids.npy", *options], tmp_path, monkeypatch) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == "made_for_roles:known"
    head = found["heads"][4]
    assert head["roles"] == "induction"
    assert head["induction_score"] > 0.99
    assert head["induction_count"] == 440
    assert "reach_score" not in head
    assert (tmp_path / "out" / "roles" / "roles.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "sink,nosuch"], "there is no role 'nosuch'; there are positional, reach"),
        (["--treebank", "nothing.conllu"], "comes without a tokenizer"),
        (["--least", "1"], "least: expected a whole number, 2 or more, got 1"),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["made_for_roles:known", "--tokens", "ids.npy", *arguments], tmp_path, monkeypatch) == 2
    error = capsys.readouterr().err.strip()
    assert said in error
    assert "Traceback" not in error


def test_a_broken_treebank_is_named_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.conllu").write_text("1\tWe\n")
    options = ["--tokens", "ids.npy", "--treebank", "broken.conllu"]
    assert run(["made_for_roles:spoken", *options], tmp_path, monkeypatch) == 2
    assert "broken.conllu, line 1: got 2 columns; expected ten" in capsys.readouterr().err
