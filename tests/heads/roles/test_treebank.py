"""Treebanks: words found in their text and tokens, dependencies against loops, mistakes with their line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import models
from tests.helpers.models import eager
from tests.helpers.roles import tokenizer

import manyheads as mh
from manyheads.heads.roles import word_alignment
from manyheads.heads.roles.treebank import read

# Two sentences: sub-words (play ##ing), a contraction that splits, one that does not, an empty node, a word
# that no token belongs to.
BANK = """\
# sent_id = 1
# text = We didn't see the cats playing.
1 We we PRON _ _ 4 nsubj _ _
2-3 didn't _ _ _ _ _ _ _ _
2 did do AUX _ _ 4 aux _ _
3 n't not PART _ _ 4 advmod _ _
4 see see VERB _ _ 0 root _ _
5 the the DET _ _ 6 det _ _
6 cats cat NOUN _ _ 4 obj _ _
6.1 who who PRON _ _ _ _ 7:nsubj _
7 playing play VERB _ _ 6 acl _ SpaceAfter=No
8 . . PUNCT _ _ 4 punct _ _

# text = the dog sees im the cats
1 the the DET _ _ 2 det _ _
2 dog dog NOUN _ _ 3 nsubj _ _
3 sees see VERB _ _ 0 root _ _
4-5 im _ _ _ _ _ _ _ _
4 in in ADP _ _ 7 case _ _
5 dem der DET _ _ 7 det _ _
6 the the DET _ _ 7 det _ _
7 cats cat NOUN _ _ 3 obl _ _
"""


def bank(folder: Path, text: str = BANK, times: int = 1) -> Path:
    path = folder / "bank.conllu"
    lines = [line if line.startswith("#") else line.replace(" ", "\t") for line in text.split("\n")]
    path.write_text(("\n".join(lines) + "\n") * times, encoding="utf-8")
    return path


def test_words_are_found_in_their_text(tmp_path: Path) -> None:
    first, second = read(bank(tmp_path))
    spans = [first.text[word.start : word.stop] for word in first.words]
    assert spans == ["We", "did", "n't", "see", "the", "cats", "playing", "."]
    assert [word.head for word in first.words] == [3, 3, 3, -1, 5, 3, 5, 3]
    assert [word.line for word in first.words] == [3, 5, 6, 7, 8, 9, 11, 12]
    assert [second.text[w.start : w.stop] for w in second.words] == [
        "the",
        "dog",
        "sees",
        "",
        "",
        "the",
        "cats",
    ]


def test_without_a_text_the_words_are_the_text(tmp_path: Path) -> None:
    lines = "\n".join(line for line in BANK.split("\n") if not line.startswith("#"))
    first, _ = read(bank(tmp_path, lines))
    assert first.text == "We didn't see the cats playing."
    assert [first.text[w.start : w.stop] for w in first.words][1:4] == ["did", "n't", "see"]


def test_tokens_are_given_to_words(tmp_path: Path) -> None:
    first, second = (word_alignment.align(tokenizer(), sentence) for sentence in read(bank(tmp_path)))
    assert tokenizer().convert_ids_to_tokens(first.ids)[2:6] == ["[UNK]", "'", "t", "see"]  # didn, ', t
    assert first.word == [-1, 0, 1, 2, 2, 3, 4, 5, 6, 6, 7, -1]
    assert second.word == [-1, 0, 1, 2, -1, 5, 6, -1]
    pairs = second.pairs()
    assert pairs["det to head"] == {0: 1, 5: 6}  # in and dem share their letters: no case
    assert pairs["det from head"] == {1: 0, 6: 5}
    assert "case to head" not in pairs
    assert "punct from head" in first.pairs()


def test_a_head_with_several_dependents_of_a_relation_is_no_case(tmp_path: Path) -> None:
    two = (
        BANK.split("\n\n")[1]
        .replace("3 sees see VERB _ _ 0 root", "3 sees see VERB _ _ 2 det")
        .replace("2 dog dog NOUN _ _ 3 nsubj", "2 dog dog NOUN _ _ 0 root")
    )
    pairs = word_alignment.align(tokenizer(), read(bank(tmp_path, two))[0]).pairs()
    assert pairs["det to head"] == {0: 1, 2: 1, 5: 6}
    assert pairs["det from head"] == {6: 5}


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_syntactic_scores_are_what_loops_count(name: str, tmp_path: Path) -> None:
    model = (models.bert if name == "bert" else models.llama)(max_position_embeddings=32).double()
    text = "We see the dog. the cats see"
    batch = dict(tokenizer()([text], return_tensors="pt"))
    batch.pop("token_type_ids", None)
    path = bank(tmp_path, times=3)
    table = mh.roles(model, [batch], path, tokenizer=tokenizer(), only=["syntactic"], least=2)
    aligned = [word_alignment.align(tokenizer(), sentence) for sentence in read(path)]
    answers: dict[str, list[tuple[int, int, int]]] = {}
    attention: list[list[list[list[list[float]]]]] = []  # sentence, row of the table, word, word
    for number, a in enumerate(aligned):
        ids = torch.tensor([a.ids])
        maps = torch.cat(
            [p[0] for p in eager(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})]
        )
        size = len(a.sentence.words)
        parts = [[t for t, word in enumerate(a.word) if word == w] for w in range(size)]
        between = []
        for p in maps.tolist():
            to_words = [[sum(row[j] for j in parts[u]) for u in range(size)] for row in p]
            between.append(
                [[sum(to_words[i][u] for i in parts[w]) / max(1, len(parts[w])) for u in range(size)]
                 for w in range(size)]
            )  # fmt: skip
        attention.append(between)
        for relation, pairs in a.pairs().items():
            for query, target in pairs.items():
                if name == "bert" or target < query:
                    answers.setdefault(relation, []).append((number, query, target))
    assert answers
    for relation, cases in answers.items():
        steps = [target - query for _, query, target in cases]
        best = max(steps.count(step) for step in steps) / len(steps)
        column = f"syntactic:{relation}"
        for row in range(len(table)):
            hits = [
                max(range(len(attention[n][row])), key=lambda u: attention[n][row][query][u]) == target
                for n, query, target in cases
            ]
            assert int(table.sums[f"{column}_score"][0, row]) == len(cases), relation
            assert float(table[f"{column}_score"][row]) == pytest.approx(sum(hits) / len(hits))
            weight = [attention[n][row][query][target] for n, query, target in cases]
            assert float(table[f"{column}_weight"][row]) == pytest.approx(sum(weight) / len(weight))
            assert float(table[f"{column}_baseline"][row]) == pytest.approx(best)
    judged = {c.removesuffix("_score").removeprefix("syntactic:") for c in table.sums if c.endswith("_score")}
    counted = {relation for relation in judged if table.sums[f"syntactic:{relation}_score"][0].sum()}
    assert counted == set(answers)
    assert "syntactic: 6 of 45 words that have no token, 'in' in line 19" in table["not_judged"][0]


def test_too_few_pairs_are_said(tmp_path: Path) -> None:
    batch = dict(tokenizer()(["We see the dog."], return_tensors="pt"))
    batch.pop("token_type_ids", None)
    table = mh.roles(models.bert(), [batch], bank(tmp_path), tokenizer=tokenizer(), only=["syntactic"])
    assert set(table["roles"]) == {""}
    assert "det to head 3" in table["not_judged"][0]
    assert "of 100 pairs" in table["not_judged"][0]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (
            "5 the the DET _ _ 6 det _ _",
            "5 the the DET",
            r"line 8: got 4 columns; expected ten, between tabs",
        ),
        (
            "5 the the DET _ _ 6 det",
            "5 the the DET _ _ six det",
            r"line 8: got .*six.*; expected a line of CoNLL-U",
        ),
        (
            "5 the the DET _ _ 6 det",
            "5 the the DET _ _ 19 det",
            r"line 8: got the head 19; expected at most 8",
        ),
        (
            "5 the the DET _ _ 6 det",
            "5 the the DET _ _ _ det",
            r"line 8: got the head None; expected the number",
        ),
        ("5 the the DET", "7 the the DET", r"line 8: got word number 7; expected 5"),
        (
            "5 the the DET",
            "5 this the DET",
            r"line 8: got the word 'this'; expected .*'# text': 'the cats playing.'",
        ),
    ],
)
def test_broken_lines_are_named(before: str, after: str, said: str, tmp_path: Path) -> None:
    assert BANK.count(before) == 1
    path = bank(tmp_path, BANK.replace(before, after))
    with pytest.raises(ValueError, match=rf"treebank: .*bank.conllu, {said}"):
        read(path)


def test_files_that_are_no_treebank(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="treebank: there is no file"):
        read(tmp_path / "nothing.conllu")
    with pytest.raises(ValueError, match="holds no sentence"):
        read(bank(tmp_path, "# only a comment\n"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        read(tmp_path / "binary")


def test_a_tokenizer_is_needed_and_must_fit(tmp_path: Path) -> None:
    batch = {"input_ids": torch.tensor([[2, 4, 5, 3]])}
    with pytest.raises(ValueError, match="treebank: needs the tokenizer of the model"):
        mh.roles(models.bert(), [batch], bank(tmp_path), only=["syntactic"])

    class Slow:
        is_fast = False
        all_special_ids = (0,)

    with pytest.raises(ValueError, match="the tokenizer gives no character offsets"):
        mh.roles(models.bert(), [batch], bank(tmp_path), tokenizer=Slow(), only=["syntactic"])

    class Mute:
        is_fast = True
        all_special_ids = (0,)

        def __call__(self, text: str, **_: Any) -> dict[str, Any]:
            return {"input_ids": [4], "offset_mapping": [(0, 0)]}

    with pytest.raises(
        ValueError, match=r"bank.conllu, line 3: no token belongs to the word 'We', nor to 14"
    ):
        mh.roles(models.bert(), [batch], bank(tmp_path), tokenizer=Mute(), only=["syntactic"])
