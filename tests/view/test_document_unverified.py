"""Sites that are not verified, on the page's document and on the live page: marked, and not silenced."""

import re
from pathlib import Path

import pytest
import torch
from tests.helpers.doubtful_model import doubtful, ids, proved
from tests.helpers.live_models import Characters, Site, apart, loaded

import manyheads as mh
from manyheads.heads.unverified_sites import doubts_in
from manyheads.view.document import document, of_batches
from manyheads.view.live import selection
from manyheads.view.live.session import begin

UNVERIFIED = "layers.1"
ROWS = [4, 5]  # of the heads that are seen there


@pytest.fixture
def batches():
    return [ids(4, 11, seed) for seed in range(3)]


def page_of(model: torch.nn.Module, batches):
    return document(mh.inspect(model, batches), model, of_batches(batches, model))


def test_heads_that_are_not_verified_are_not_silenced_and_the_page_says_so(batches) -> None:
    made = page_of(doubtful(), batches)
    notes = made["header"]["notes"]
    assert any(note.startswith(f"not verified, {UNVERIFIED}: ") for note in notes)
    assert "heads that are not verified are not silenced, neither alone nor in the curve" in notes
    assert not any("left out" in note for note in notes)
    change = made["examples"][0]["silenced"]["change"]
    assert [i for i, value in enumerate(change) if value is None] == ROWS
    by_one = made["importance"]["leave-one-out"]["mean"]
    assert [i for i, value in enumerate(by_one) if value is None] == ROWS
    assert all(
        min(line["kept"]) >= 0.4 for line in made["curve"]["lines"]
    )  # 2 of 10 stay, and 1 of each layer
    assert made["heads"]["labels"]["verified"][4].startswith("no: ")


def test_nothing_is_said_where_everything_is_proved(batches) -> None:
    made = page_of(proved(), batches)
    assert not {"verified", "notes"} & set(made["heads"]["labels"])
    assert not any("verified" in note for note in made["header"]["notes"])
    assert None not in made["examples"][0]["silenced"]["change"]


@pytest.fixture(scope="module")
def site():
    made = Site(begin(loaded(doubtful(), Characters())))
    yield made
    made.queue.close()


def test_the_live_page_looks_at_such_heads_and_does_not_silence_them(site) -> None:
    text = {"text": "a b c"}
    status, found = apart(site.ask("/api/silence", {**text, "heads": {UNVERIFIED: [0]}}))
    assert status == 422
    assert "are not verified" in found["error"]
    assert "Traceback" not in found["error"]
    for path, body in (("/api/plan", {}), ("/api/quality", {})):
        assert apart(site.ask(path, {**body, "heads": {UNVERIFIED: [1]}}))[0] == 422
    assert apart(site.ask("/api/exact", {**text, "heads": {}, "site": UNVERIFIED, "head": 1}))[0] == 200
    assert apart(site.ask("/api/silence", {**text, "heads": {"layers.0": [0]}}))[0] == 200


def test_rules_and_rankings_of_the_live_page_leave_them_out(site, monkeypatch) -> None:
    monkeypatch.setattr(selection, "_sinks", lambda live: {"layers.0": [1], UNVERIFIED: [0]})
    assert selection.by_rule(site.live, "sinks") == {"layers.0": [1]}
    for ranking in ("fisher", "random"):
        chosen = selection.by_ranking(site.live, ranking, 0.4)
        assert UNVERIFIED not in chosen
        assert sum(map(len, chosen.values())) == 6


def test_the_document_of_the_live_page_marks_them(site) -> None:
    first = site.document._document()
    assert first["heads"]["labels"]["verified"][4].startswith("no: ")
    assert any(note.startswith("not verified") for note in first["header"]["notes"])


def test_sentences_are_told_in_chinese() -> None:
    chinese = (Path(__file__).parents[2] / "web" / "src" / "words" / "zh-said.ts").read_text(encoding="utf-8")
    table = mh.inspect(doubtful(), [ids()])
    for note in {part for text in doubts_in(table).notes.values() for part in text.split("; ")}:
        assert f'"{note}":' in chinese
    assert re.search(r"not verified, \(", chinese)
    assert "heads that are not verified are not silenced, neither alone nor in the curve" in chinese
