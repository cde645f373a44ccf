"""Outputs of a model in words: from logits and token ids to texts, each with its probability."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from manyheads.models.task_head import class_names

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOP = 5
LONGEST_ANSWER = 30  # tokens of an answer that is a part of the input
SAME = 1e-6  # a sentence this near is the input itself
_SIGNS = {"\n": "⏎", "\r": "⏎", "\t": "⇥"}

Item = list[str | float]  # a text, and its probability or cosine


def likeliest(logits: Tensor, tokenizer: PreTrainedTokenizerBase | None, top: int) -> list[Item]:
    """The most probable tokens of logits (vocabulary,)."""
    probabilities, ids = logits.float().softmax(-1).topk(min(top, logits.shape[-1]))
    pairs = zip(ids.tolist(), probabilities.tolist(), strict=True)
    return [[token_text(tokenizer, number), round(p, 6)] for number, p in pairs]


def output_items(
    kind: str,
    model: nn.Module,
    logits: Tensor,
    tokenizer: PreTrainedTokenizerBase | None,
    ids: Tensor | None,
    positions: Sequence[int] | None = None,
    top: int = TOP,
) -> list[Item]:
    """What logits of one input say: its classes or amounts, the classes of its tokens, or a transcript.

    Logits are (classes,) or (tokens, classes); ``positions`` are the tokens to name, `telling_tokens` by
    default.
    """
    if kind == "transcript":
        return [transcript(model, logits, tokenizer)]
    if logits.dim() == 1:
        return class_items(model, logits, top)
    if ids is None or ids.shape[1] != len(logits):
        return []
    labels = class_names(model)
    positions = telling_tokens(logits, tokenizer, ids, top) if positions is None else positions
    best, chosen = (x.tolist() for x in logits.float().softmax(-1).max(-1))
    names = {
        i: f"{token_text(tokenizer, int(ids[0, i]))}: {labels.get(chosen[i], chosen[i])}" for i in positions
    }
    return [[name, round(best[i], 6)] for i, name in names.items()]


def class_items(model: nn.Module, logits: Tensor, top: int = TOP) -> list[Item]:
    """The likeliest classes of logits (classes,), by name; of a regression, its amounts.

    >>> from manyheads.tasks.dna import SequenceClassifier
    >>> model = SequenceClassifier(["no", "yes"], vocabulary=7, d_model=4, heads=2, layers=1)
    >>> class_items(model, torch.tensor([0.0, 2.0]))
    [['yes', 0.880797], ['no', 0.119203]]
    """
    labels = class_names(model)
    problem = getattr(getattr(model, "config", None), "problem_type", None)
    if len(logits) == 1 or problem == "regression":
        return [[str(labels.get(n, n)), round(x, 6)] for n, x in enumerate(logits.float().tolist()[:top])]
    is_multi_label = problem == "multi_label_classification"
    p = logits.float().sigmoid() if is_multi_label else logits.float().softmax(-1)
    probabilities, classes = p.topk(min(top, len(p)))
    pairs = zip(classes.tolist(), probabilities.tolist(), strict=True)
    return [[str(labels.get(number, number)), round(x, 6)] for number, x in pairs]


def telling_tokens(
    logits: Tensor, tokenizer: PreTrainedTokenizerBase | None, ids: Tensor, top: int = TOP
) -> list[int]:
    """The first tokens whose class is not the most frequent one; the first words where all have the same.

    >>> telling_tokens(torch.tensor([[2.0, 0.0], [0.0, 2.0], [2.0, 0.0]]), None, torch.tensor([[5, 6, 7]]))
    [1]
    """
    chosen = logits.argmax(-1).tolist()
    usual = Counter(chosen).most_common(1)[0][0]
    special = set(getattr(tokenizer, "all_special_ids", None) or [])
    ordinary = [i for i, number in enumerate(ids[0].tolist()) if number not in special]
    return ([i for i, label in enumerate(chosen) if label != usual] or ordinary)[:top]


def transcript(model: nn.Module, logits: Tensor, tokenizer: PreTrainedTokenizerBase | None) -> Item:
    """What logits (frames, letters) of connectionist temporal classification spell, and how sure they are.

    The likeliest letter of each frame counts, repeats are joined and blanks are left out.

    >>> logits = torch.tensor([[0.0, 9.0, 0.0], [0.0, 9.0, 0.0], [9.0, 0.0, 0.0], [0.0, 0.0, 9.0]])
    >>> transcript(nn.Identity(), logits, None)[0]                                     # 0 is no letter
    '1 2'
    """
    blank = int(getattr(getattr(model, "config", None), "pad_token_id", None) or 0)
    best, chosen = logits.float().log_softmax(-1).max(-1)
    letters = [n for n in torch.unique_consecutive(chosen).tolist() if n != blank]
    decode: Any = getattr(tokenizer, "decode", None)
    text = " ".join(map(str, letters))
    if decode is not None:  # repeats were joined where blanks could still be seen
        text = decode(letters, skip_special_tokens=True, group_tokens=False)
    letter_scores = best[chosen != blank] if letters else best
    return [with_signs(str(text).strip()) or "–", round(math.exp(float(letter_scores.mean())), 6)]


def span_items(
    start: Tensor, end: Tensor, ids: Tensor, tokenizer: PreTrainedTokenizerBase | None, top: int = TOP
) -> list[Item]:
    """The likeliest parts of an input of token ids (tokens,) as answers, from where they start and end.

    Answers are in the context: the last tokens of the input between two special ones.

    >>> start, end = torch.tensor([0.0, 9.0, 0.0]), torch.tensor([0.0, 0.0, 9.0])
    >>> text, p = span_items(start, end, torch.tensor([5, 6, 7]), None)[0]
    >>> text, round(p, 3)
    ('6 7', 1.0)
    """
    joint = start.float().softmax(-1).unsqueeze(1) * end.float().softmax(-1).unsqueeze(0)  # (starts, ends)
    special = set(getattr(tokenizer, "all_special_ids", None) or [])
    ordinary = [i for i, number in enumerate(ids.tolist()) if number not in special]
    first_of_context = next((i for i in reversed(ordinary) if i - 1 not in ordinary), 0)
    inside = torch.zeros(len(start), dtype=torch.bool, device=start.device)
    inside[[i for i in ordinary if i >= first_of_context]] = True
    likely = torch.ones_like(joint).triu().tril(LONGEST_ANSWER - 1) * joint * (inside.unsqueeze(1) & inside)
    probabilities, chosen = likely.flatten().topk(min(top, likely.numel()))
    items: list[Item] = []
    for p, number in zip(probabilities.tolist(), chosen.tolist(), strict=True):
        if p == 0:
            break
        first, last = divmod(number, len(start))
        part = ids[first : last + 1].tolist()
        text = tokenizer.decode(part) if tokenizer is not None else " ".join(map(str, part))
        items.append([with_signs(str(text).strip()), round(p, 6)])
    return items


def nearest(embedding: Tensor, others: Tensor, texts: Sequence[str], top: int) -> list[Item]:
    """The sentences of the highest cosine with the input, without the input itself."""
    cosines = nn.functional.cosine_similarity(embedding.double(), others.double())
    order = [i for i in cosines.argsort(descending=True).tolist() if cosines[i] < 1 - SAME]
    return [[texts[i], round(float(cosines[i]), 6)] for i in order[:top]]


def token_text(tokenizer: PreTrainedTokenizerBase | None, number: int) -> str:
    """One token as text; its own name where it is only a part of a character.

    >>> token_text(None, 7)
    '7'
    """
    if tokenizer is None:
        return str(number)
    text = str(tokenizer.decode([number])) if hasattr(tokenizer, "decode") else ""
    if (not text or "\ufffd" in text) and hasattr(tokenizer, "convert_ids_to_tokens"):
        text = str(tokenizer.convert_ids_to_tokens(number))
    return with_signs(text) or str(number)


def with_signs(text: str) -> str:
    """A token's text with visible signs for line breaks, tabs and lone spaces.

    >>> [with_signs(text) for text in (" cat", " ", "a\\n")]
    [' cat', '␣', 'a⏎']
    """
    for character, sign in _SIGNS.items():
        text = text.replace(character, sign)
    return text if text.strip() else "␣" * len(text)
