"""From tokens to words: which sub-words belong to which word, and attention between words.

Attention to a word is the sum over its sub-words, attention from a word the mean over them. Special tokens
are no words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from manyheads.common.types import Batch
from manyheads.heads.roles.attention_rows import Facts, Rows
from manyheads.heads.roles.probe_texts import BatchFacts
from manyheads.heads.roles.treebank import Sentence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Tokens of a batch, padding included.
BATCH_TOKENS = 2048


@dataclass(frozen=True, eq=False)
class Words:
    """The words of a batch of sentences.

    to: (batch, tokens, words) 1 where a token is part of a word.
    targets: for each relation and direction the word (batch, words) on the other side, -1 for none.
    offsets: for each relation and direction how often each offset is right, among words before the query
        (first) and among all (second).
    """

    to: Tensor
    targets: dict[str, Tensor]
    offsets: dict[str, tuple[Counter[int], Counter[int]]]

    def offset(self, relation: str, kind: str) -> int:
        """The fixed offset that is right most often, among the keys that attention of this kind can see."""
        counts = self.offsets[relation][0 if kind == "causal" else 1]
        return max(counts, key=lambda offset: (counts[offset], -abs(offset)), default=0)


@dataclass(frozen=True, eq=False)
class Aligned:
    """A sentence in tokens: its ids, and the word of each, -1 for none."""

    ids: list[int]
    word: list[int]
    sentence: Sentence

    def pairs(self) -> dict[str, dict[int, int]]:
        """For each relation and direction: from which word to which. A head with several dependents of one
        relation has no single right answer, and is no case.
        """
        with_tokens = set(self.word)
        pairs: dict[str, dict[int, int]] = {}
        several: set[tuple[str, int]] = set()
        for number, word in enumerate(self.sentence.words):
            if word.head < 0 or number not in with_tokens or word.head not in with_tokens:
                continue
            pairs.setdefault(f"{word.relation} to head", {})[number] = word.head
            back = pairs.setdefault(f"{word.relation} from head", {})
            if word.head in back:
                several.add((f"{word.relation} from head", word.head))
            back[word.head] = number
        for relation, head in several:
            del pairs[relation][head]
        return pairs


def align(tokenizer: PreTrainedTokenizerBase, sentence: Sentence) -> Aligned:
    """Tokenize a sentence as written; a token belongs to the word that most of its letters are from."""
    encoding = tokenizer(sentence.text, return_offsets_mapping=True)
    spans = [(word.start, word.stop) for word in sentence.words]
    words = []
    for start, stop in encoding["offset_mapping"]:
        common = [min(stop, end) - max(start, begin) for begin, end in spans]
        best = max(range(len(spans)), key=lambda n: common[n], default=-1)
        words.append(best if best >= 0 and common[best] > 0 else -1)
    return Aligned(list(encoding["input_ids"]), words, sentence)


def batches(
    batch_facts: BatchFacts,
    tokenizer: PreTrainedTokenizerBase | None,
    sentences: Sequence[Sentence],
    path: str | PathLike[str],
) -> tuple[list[tuple[Batch, Facts]], str]:
    """The sentences as batches, bucketed by length, and a note about what was left out."""
    if tokenizer is None:
        raise ValueError("treebank: needs the tokenizer of the model; give roles(..., tokenizer=tokenizer)")
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            "treebank: the tokenizer gives no character offsets of its tokens; use a fast one (of the "
            "tokenizers library)"
        )
    aligned = [align(tokenizer, sentence) for sentence in sentences]
    short = [a for a in aligned if batch_facts.positions is None or len(a.ids) <= batch_facts.positions]
    total = sum(len(a.sentence.words) for a in aligned)
    without_token = [
        word for a in aligned for number, word in enumerate(a.sentence.words) if number not in set(a.word)
    ]
    if 2 * len(without_token) > total:
        word = without_token[0]
        raise ValueError(
            f"treebank: {path}, line {word.line}: no token belongs to the word {word.form!r}, nor to "
            f"{len(without_token) - 1:,} others of {total:,}; give the model's tokenizer, and text in its "
            "language"
        )
    notes = []
    if without_token:
        first = f"{without_token[0].form!r} in line {without_token[0].line}"
        notes.append(f"{len(without_token)} of {total:,} words that have no token, {first} the first")
    if len(short) < len(aligned):
        notes.append(
            f"{len(aligned) - len(short)} sentences longer than the model's {batch_facts.positions} tokens"
        )
    return list(_batch_sentences(batch_facts, short)), " and ".join(notes)


def _batch_sentences(batch_facts: BatchFacts, aligned: list[Aligned]) -> Iterator[tuple[Batch, Facts]]:
    pairs = {id(a): a.pairs() for a in aligned}
    offsets: dict[str, tuple[Counter[int], Counter[int]]] = {}
    for by_relation in pairs.values():
        for relation, targets in by_relation.items():
            before, every = offsets.setdefault(relation, (Counter(), Counter()))
            steps = [target - query for query, target in targets.items()]
            every.update(steps)
            before.update(step for step in steps if step < 0)
    waiting: list[Aligned] = []
    for a in [*sorted(aligned, key=lambda a: -len(a.ids)), None]:
        full = bool(waiting) and (
            a is None
            or (len(waiting) + 1) * len(waiting[0].ids) > BATCH_TOKENS
            or (len(a.ids) < len(waiting[0].ids) and not batch_facts.pads)
        )
        if full:
            yield _batch(batch_facts, waiting, [pairs[id(x)] for x in waiting], offsets)
            waiting = []
        if a is not None:
            waiting.append(a)


def _batch(
    batch_facts: BatchFacts,
    aligned: list[Aligned],
    pairs: list[dict[str, dict[int, int]]],
    offsets: dict[str, tuple[Counter[int], Counter[int]]],
) -> tuple[Batch, Facts]:
    length = max(len(a.ids) for a in aligned)
    number = max(len(a.sentence.words) for a in aligned)
    ids = torch.full((len(aligned), length), -1)
    to = torch.zeros(len(aligned), length, number)
    targets: dict[str, Tensor] = {}
    for row, a in enumerate(aligned):
        ids[row, : len(a.ids)] = torch.tensor(a.ids)
        for token, word in enumerate(a.word):
            if word >= 0:
                to[row, token, word] = 1.0
        for relation, words in pairs[row].items():
            target = targets.setdefault(relation, torch.full((len(aligned), number), -1))
            for query, answer in words.items():
                target[row, query] = answer
    return batch_facts.batch(ids), Facts(special=batch_facts.special, words=Words(to, targets, offsets))


def between_words(parts: Iterable[Rows]) -> Iterator[Rows]:
    """Attention between words, from all rows of a call; nothing when those are no tokens of the words."""
    weights = allowed = last = None
    for rows in parts:
        assert rows.facts.words is not None
        to = rows.facts.words.to.to(rows.weights)
        if rows.site.cross or rows.tokens is None or rows.tokens.shape[1] != to.shape[1]:
            return
        batch, _, number = to.shape
        if weights is None or allowed is None:
            weights = to.new_zeros(batch, rows.site.heads, number, number)
            allowed = to.new_zeros(batch, number, number)
        word_of = to[rows.sequences]
        keys = word_of[:, None, rows.start : rows.start + rows.weights.shape[-1]]  # (batch, 1, keys, words)
        queries = word_of[:, rows.position].transpose(1, 2).unsqueeze(1)  # (batch, 1, words, rows)
        share = queries / word_of.sum(1)[:, None, :, None].clamp(min=1)
        weights[rows.sequences, rows.heads] += share @ (rows.weights @ keys)
        allowed_here = (
            rows.allowed.any(1, keepdim=True).expand(len(word_of), 1, *rows.weights.shape[2:]).to(to.dtype)
        )
        allowed[rows.sequences] += (queries @ (allowed_here @ keys)).squeeze(1)
        last = rows
    if weights is None or allowed is None or last is None:
        return
    visible = (allowed > 0).unsqueeze(1)
    yield Rows(
        weights,
        visible,
        (visible.sum(-1) > 1).expand(weights.shape[:-1]),
        torch.arange(weights.shape[-1], device=weights.device),
        0,
        last.site,
        last.facts,
    )
