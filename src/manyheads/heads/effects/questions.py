"""A question about an input, asked once and read from many runs: one for each silenced head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from manyheads.common.run_batch import run
from manyheads.common.types import Batch
from manyheads.heads.effects.answer_items import (
    SAME,
    TOP,
    Item,
    likeliest,
    nearest,
    output_items,
    span_items,
    telling_tokens,
)
from manyheads.heads.effects.answers import Answer, answer, hidden, ids_of, kind_of
from manyheads.heads.model_outputs import main_tensor, read_output

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False)
class Question:
    """What a model is asked about an input, and how the answer is read from what it returns.

    kind: ``next``, ``mask``, ``class``, ``amount``, ``answer``, ``transcript`` or ``neighbours``.
    batch: what the model is to be run on: the input, perhaps with a token masked.
    position: of the token that is masked; -1 for none.
    tokens: which tokens to name, where each has a class of its own.
    neighbours: the texts that can be named, and their embeddings (n, width).
    """

    kind: str
    model: nn.Module
    batch: Batch
    tokenizer: PreTrainedTokenizerBase | None = None
    position: int = -1
    tokens: Sequence[int] | None = None
    neighbours: tuple[Sequence[str], Tensor] | None = None

    def answer(self, result: object, row: int = 0) -> list[Item]:
        """What it says about one sequence of a batch: words with probabilities, texts with cosines."""
        if self.neighbours is not None:
            texts, others = self.neighbours
            return nearest(
                read_output(result, self.model).value[row : row + 1].to(others), others, texts, TOP
            )
        ids = ids_of(self.batch)
        if self.kind == "answer" and ids is not None:
            named = read_output(result, self.model).named
            return span_items(named["start_logits"][row], named["end_logits"][row], ids[0], self.tokenizer)
        logits = main_tensor(result)[1][row].float()
        if self.kind in ("class", "amount", "transcript"):
            return output_items(self.kind, self.model, logits, self.tokenizer, ids, self.tokens)
        logits = logits[self.position].clone()  # -1: after the last token
        if self.position >= 0 and self.tokenizer is not None:
            logits[self.tokenizer.mask_token_id] = -torch.inf
        return likeliest(logits, self.tokenizer, TOP)


def ask(
    model: nn.Module,
    batch: Batch,
    tokenizer: PreTrainedTokenizerBase | None = None,
    neighbours: tuple[Sequence[str], Tensor] | None = None,
    result: object = None,
) -> tuple[Answer | None, Question | None]:
    """What a model says about an input of one sequence, and the question to ask again; None if neither.

    A translation is written token by token, so it is not asked again. ``result`` is what the model returned
    for the batch, where it has run already.

    Examples
    --------
    >>> from manyheads.nn.transformers import Decoder
    >>> model = Decoder(12, heads=3, layers=1, vocabulary=101).eval()
    >>> reply, question = ask(model, torch.randint(101, (1, 5)))
    >>> reply["kind"], len(reply["items"]), question.answer(model(question.batch)) == reply["items"]
    ('next', 5, True)
    """
    kind = kind_of(model, batch)
    if kind == "translation":
        return answer(model, tokenizer, batch, kind=kind), None
    if result is None:
        result = _run(model, batch)
    question = _question(kind, model, batch, tokenizer, neighbours, result)
    if question is None:
        return None, None
    if question.batch is not batch:  # a token is masked
        result = _run(model, question.batch)
    reply: Answer = {"kind": question.kind, "items": question.answer(result)}
    if not reply["items"]:
        return None, None
    if question.position >= 0:
        reply["place"] = question.position
    return reply, question


def _question(
    kind: str | None,
    model: nn.Module,
    batch: Batch,
    tokenizer: PreTrainedTokenizerBase | None,
    neighbours: tuple[Sequence[str], Tensor] | None,
    result: object,
) -> Question | None:
    if kind == "mask":
        changed, position = hidden(batch, tokenizer)
        return None if position is None else Question(kind, model, changed, tokenizer, position)
    if kind == "neighbours":
        return (
            Question(kind, model, batch, neighbours=_others(model, result, *neighbours))
            if neighbours
            else None
        )
    ids, logits = ids_of(batch), main_tensor(result)[1][0]
    if kind == "class" and logits.dim() == 2:  # a class for each token
        if ids is None or ids.shape[1] != len(logits):
            return None
        return Question(kind, model, batch, tokenizer, tokens=telling_tokens(logits, tokenizer, ids))
    return None if kind is None else Question(kind, model, batch, tokenizer)


def _others(
    model: nn.Module, result: object, texts: Sequence[str], embeddings: Tensor
) -> tuple[list[str], Tensor]:
    """The neighbours without the input itself, which a silenced head would move away from itself."""
    embedding = read_output(result, model).value[:1].to(embeddings)
    apart = nn.functional.cosine_similarity(embedding, embeddings) < 1 - SAME
    return [text for text, other in zip(texts, apart.tolist(), strict=True) if other], embeddings[apart]


def _run(model: nn.Module, batch: Batch) -> object:
    with torch.no_grad():
        return run(model, batch)
