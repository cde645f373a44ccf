"""manyheads study: a list, one claim with its files, the gallery, and mistakes in one sentence."""

import json
import sys

import pytest

from manyheads import cli
from manyheads.studies import NAMES, splitting_is_free


def run(arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["manyheads", "study", *arguments])
    with pytest.raises(SystemExit) as done:
        cli.main()
    return done.value.code or 0


SMALL = ["--seeds", "1", "--set", "d_model=16", "--set", "length=8", "--set", "heads=1,2"]


def test_without_a_name_it_lists_the_claims(monkeypatch, capsys, tmp_path):
    assert run(["--out", str(tmp_path)], monkeypatch) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in NAMES)
    assert list(tmp_path.iterdir()) == []


def test_one_claim_is_run_printed_and_written(monkeypatch, capsys, tmp_path):
    assert run(["splitting_is_free", *SMALL, "--out", str(tmp_path)], monkeypatch) == 0
    text = capsys.readouterr().out
    assert splitting_is_free.claim.sentence.en.split(":")[0] in text
    assert "holds" in text
    names = sorted(path.name for path in (tmp_path / "splitting_is_free").iterdir())
    assert names == ["figure.png", "figure.svg", "index.html", "result.json", "rows.csv"]
    run(["--json", "--out", str(tmp_path)], monkeypatch)
    listed = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert listed["splitting_is_free"]["verdict"] == "holds"


def test_json_has_the_verdict_and_the_rows(monkeypatch, capsys, tmp_path):
    assert run(["splitting_is_free", *SMALL, "--json", "--out", str(tmp_path)], monkeypatch) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"] == "holds"
    assert [row["heads"] for row in document["rows"]] == [1, 2]


def test_chinese(monkeypatch, capsys, tmp_path):
    assert run(["splitting_is_free", *SMALL, "--language", "zh", "--out", str(tmp_path)], monkeypatch) == 0
    assert "成立" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["one_head"], "study: there is no 'one_head'"),
        (["splitting_is_free", "--set", "heads"], "expected NAME=VALUE"),
        (["splitting_is_free", "--set", "head=2"], "this study has no setting 'head'"),
        (["splitting_is_free", "--seeds", "0"], "seeds: expected 1 or more"),
    ],
)
def test_mistakes_are_one_sentence(arguments, sentence, monkeypatch, capsys, tmp_path):
    assert run([*arguments, "--out", str(tmp_path / "out")], monkeypatch) == 2
    assert sentence in capsys.readouterr().err


def test_a_result_whose_rows_were_changed_is_one_sentence(monkeypatch, capsys, tmp_path):
    run(["splitting_is_free", *SMALL, "--out", str(tmp_path)], monkeypatch)
    path = tmp_path / "splitting_is_free" / "result.json"
    path.write_text(path.read_text(encoding="utf-8").replace("parameters", "metres"), encoding="utf-8")
    for arguments in ([], ["splitting_is_free", *SMALL]):
        assert run([*arguments, "--out", str(tmp_path)], monkeypatch) == 2
        assert "damaged, or not what study wrote; remove it" in capsys.readouterr().err
