"""What a model says about an input, in words: next tokens, a filled mask, a class, a text, its neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from manyheads.heads.importance import losses
from manyheads.heads.importance.outputs import main_tensor, read
from manyheads.heads.sites import Site
from manyheads.view.document.tokens import visible

ITEMS = 5
_KINDS = {
    losses.embedding: "neighbours",
    losses.classification: "class",
    losses.seq2seq: "translation",
    losses.causal: "next",
    losses.masked: "mask",
}


@dataclass(frozen=True, eq=False)
class Question:
    """What a model is asked about an input, and how its answer is read.

    kind: ``next``, ``mask``, ``class``, ``translation`` or ``neighbours``.
    batch: what the model is to be run on: the input, perhaps with a token masked.
    place: the token that is masked; -1 for none.
    tokenizer, labels: words for numbers.
    names, embeddings: the neighbours that can be named, (n,) and (n, width).
    own: the name of the input itself, which is no neighbour.
    """

    kind: str
    batch: Any
    place: int = -1
    tokenizer: Any = None
    labels: Mapping[int, str] | None = None
    names: Sequence[str] = ()
    embeddings: Tensor | None = None
    own: str = ""

    def answer(self, result: Any, model: nn.Module, row: int = 0) -> list[list[Any]]:
        """The likeliest words with their probabilities, or the nearest texts with their cosines."""
        if self.kind == "neighbours":
            assert self.embeddings is not None
            own = read(result, model).value[row].float().cpu()
            cosine = nn.functional.cosine_similarity(own[None], self.embeddings, dim=-1)
            order = cosine.argsort(descending=True, stable=True).tolist()
            best = [i for i in order if self.names[i] != self.own][:ITEMS]
            return [[self.names[i], round(cosine[i].item(), 4)] for i in best]
        logits = main_tensor(result)[1][row].float()
        if self.kind == "translation":
            chances, ids = logits.softmax(-1).max(-1)
            return [[_words(self.tokenizer, ids.tolist()), round(chances.mean().item(), 4)]]
        logits = logits if self.kind == "class" else logits[self.place]  # -1: after the last token
        chances, ids = logits.softmax(-1).topk(min(ITEMS, logits.shape[-1]))
        return [
            [self._word(int(i)), round(chance, 4)] for chance, i in zip(chances.tolist(), ids, strict=True)
        ]

    def _word(self, i: int) -> str:
        if self.kind == "class":
            return visible(str((self.labels or {}).get(i, i)))
        return _words(self.tokenizer, [i])


def question(
    model: nn.Module,
    batch: Any,
    result: Any,
    sites: Iterable[Site],
    *,
    tokenizer: Any = None,
    ids: Sequence[int] | None = None,
    neighbours: tuple[Sequence[str], Tensor] | None = None,
    own: str = "",
) -> Question | None:
    """What a model can be asked, judging by what it returned and how it attends; None if nothing.

    Parameters
    ----------
    model, batch, result: the model, an input of one sequence, and what the model returned for it.
    sites: of the model.
    tokenizer: for words.
    ids: the tokens of the input.
    neighbours: names and embeddings (n, width) of other inputs.
    own: the name of this input, if it is among them.

    Examples
    --------
    >>> import torch
    >>> asked = question(nn.Identity(), None, {"logits": torch.tensor([[3.0, 1.0]])}, [])
    >>> asked.kind, asked.answer({"logits": torch.tensor([[3.0, 1.0]])}, nn.Identity())
    ('class', [['0', 0.8808], ['1', 0.1192]])
    """
    kind = _KINDS[losses.fitting(result, model, sites)]
    if kind == "neighbours":
        if neighbours is None or not len(neighbours[0]):
            return None
        names, embeddings = neighbours
        return Question(kind, batch, names=names, embeddings=embeddings.float().cpu(), own=own)
    if kind == "class":
        labels = getattr(getattr(model, "config", None), "id2label", None)
        return Question(kind, batch, labels=labels if isinstance(labels, Mapping) else None)
    if kind == "mask":
        return _masked(batch, tokenizer, list(ids or []))
    return Question(kind, batch, tokenizer=tokenizer)


def _masked(batch: Any, tokenizer: Any, ids: list[int]) -> Question | None:
    """Hide a token in the middle, unless the text has a mask already."""
    mask = getattr(tokenizer, "mask_token_id", None)
    if mask is None or not isinstance(batch, Mapping) or "input_ids" not in batch or not ids:
        return None
    if mask in ids:
        return Question("mask", batch, ids.index(mask), tokenizer)
    special = set(getattr(tokenizer, "all_special_ids", None) or [])
    may = [place for place, i in enumerate(ids) if i not in special]
    if not may:
        return None
    place = may[len(may) // 2]
    hidden = batch["input_ids"].clone()
    hidden[:, place] = mask
    return Question("mask", {**batch, "input_ids": hidden}, place, tokenizer)


def _words(tokenizer: Any, ids: list[int]) -> str:
    if tokenizer is None or not hasattr(tokenizer, "decode"):
        return " ".join(map(str, ids))
    return visible(str(tokenizer.decode(ids)), 400)
