"""answer: what a model says about an input, in words: next tokens, a filled mask, a class, a translation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NotRequired, TypedDict

import torch
from torch import Tensor, nn

from manyheads.common.devices import batches_to_device, device_of, to_device
from manyheads.common.types import Batch
from manyheads.heads.effects.answer_items import (
    TOP,
    Item,
    likeliest,
    nearest,
    output_items,
    span_items,
    token_text,
)
from manyheads.heads.effects.translations import can_write, translation
from manyheads.heads.importance.losses import causal, classification, fitting, masked, seq2seq
from manyheads.heads.model_outputs import is_span, main_tensor, read_output
from manyheads.heads.observer import Forward, observed
from manyheads.models.task_head import task_kind
from manyheads.models.text_config import vocabulary_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_IDS = ("input_ids", "ids", "x", "source")


class Answer(TypedDict):
    """What a model says about an input, as the page shows it; see `answer`."""

    kind: str
    items: list[Item]
    place: NotRequired[int]


@dataclass(frozen=True, eq=False)
class Sentences:
    """Sentences to find the neighbours of an input among: texts, and the same in batches for the model.

    embeddings: (texts, width) as the model gives them, where they were computed before.
    """

    texts: Sequence[str]
    batches: Sequence[Batch]
    embeddings: Tensor | None = None


def kind_of(model: nn.Module, batch: Batch) -> str | None:
    """What a model says about a batch: ``next``, ``mask``, ``class``, ``amount``, ``answer``,
    ``transcript``, ``translation`` or ``neighbours``; None for outputs that cannot be put into words.

    The batch needs two tokens or more: one token alone does not show whether attention is causal.

    Examples
    --------
    >>> from manyheads.nn.transformers import Decoder, Encoder
    >>> kind_of(Decoder(12, heads=3, layers=1, vocabulary=101), torch.randint(101, (1, 5)))
    'next'
    >>> kind_of(Encoder(d_model=12, heads=3, layers=1, vocabulary=101), torch.randint(101, (1, 5)))
    'neighbours'
    """
    device = device_of(model)
    with observed(model) as observer:
        forward = observer.forward(to_device(batch, device))
        loss = fitting(forward.result, model, observer.sites)
    if is_span(forward.result):
        return "answer" if ids_of(batch) is not None else None
    value = main_tensor(forward.result)[1]
    if task_kind(model) == "ctc":
        return "transcript" if value.dim() == 3 else None
    if forward.output.amounts:
        return "amount"
    if loss is seq2seq:
        return "translation" if can_write(model) else None
    if loss is causal:
        return "next"
    if loss is masked and value.dim() == 3:
        return "mask" if value.shape[-1] == vocabulary_of(model) else "class"
    if loss is classification or "logits" in (forward.result if isinstance(forward.result, Mapping) else ()):
        return "class" if value.dim() == 2 else None
    return "neighbours" if ids_of(batch) is not None else None


def answer(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase | None,
    batch: Batch,
    *,
    kind: str | None = None,
    sentences: Sentences | None = None,
    result: object = None,
    top: int = TOP,
) -> Answer | None:
    """What the model says about the first sequence of a batch: ``{"kind": ..., "items": [[text, number]]}``.

    Under `silence` it is what the model says without those heads.

    Parameters
    ----------
    model: any torch.nn.Module; run in eval mode, without gradients.
    tokenizer: the one that encoded the batch, to turn ids into words; None for images.
    batch: as the model takes it.
    kind: as `kind_of` returns it; without it, the model runs once more to find out.
    sentences: to look for neighbours among.
    result: what the model returned for this batch, of one sequence without padding, if it has run already.
    top: how many items, at most.

    Returns
    -------
    Items, the likeliest first: ``next`` and ``mask`` tokens, ``class`` labels, and parts of the input that
    are the ``answer`` to a question, with probabilities; the ``amount`` of a regression; the nearest
    ``neighbours`` with cosines; one ``translation`` or ``transcript`` with the mean probability of its tokens
    (the geometric one). For ``mask``, ``"place"`` is the position of the token that was filled in: the first
    masked one, or else the last word, which is then masked. None where the output cannot be put into words.

    Examples
    --------
    >>> from manyheads.models import embedded
    >>> model, tokenizer = embedded.load()
    >>> texts = ["Bread is baked in an oven.", "The train left the station.", "A violin has four strings."]
    >>> sentences = Sentences(texts, [tokenizer(texts, padding=True, return_tensors="pt")])
    >>> batch = tokenizer("We took the railway.", return_tensors="pt")
    >>> reply = answer(model, tokenizer, batch, sentences=sentences)
    >>> reply["kind"], reply["items"][0][0]
    ('neighbours', 'The train left the station.')
    """
    device = device_of(model)
    batch = to_device(batch, device)
    kind = kind or kind_of(model, batch)
    with torch.no_grad():
        if kind == "translation" and isinstance(batch, Mapping):
            return {"kind": kind, "items": [translation(model, tokenizer, batch)]}
        with observed(model) as observer:

            def forward_of(inputs: Batch) -> Forward:
                if result is None or inputs is not batch:
                    return observer.forward(inputs)
                return Forward(result, read_output(result, model), None, {})

            if kind == "next":
                forward = forward_of(batch)
                logits = forward.output.value[0, _last(forward)]
                return {"kind": kind, "items": likeliest(logits, tokenizer, top)}
            if kind == "mask":
                masked_batch, position = hidden(batch, tokenizer)
                if position is None or tokenizer is None:
                    return None
                logits = forward_of(masked_batch).output.value[0, position].clone()
                logits[tokenizer.mask_token_id] = -torch.inf
                return {"kind": kind, "items": likeliest(logits, tokenizer, top), "place": position}
            ids = ids_of(batch)
            if kind == "answer" and ids is not None:
                named = forward_of(batch).output.named
                both = named["start_logits"][0], named["end_logits"][0]
                return {"kind": kind, "items": span_items(*both, ids[0], tokenizer, top)}
            if kind in ("class", "amount", "transcript"):
                logits = main_tensor(forward_of(batch).result)[1][0]
                return {"kind": kind, "items": output_items(kind, model, logits, tokenizer, ids, top=top)}
            if kind == "neighbours" and sentences is not None:
                embedding = forward_of(batch).output.value[:1]
                others = sentences.embeddings
                if others is None:
                    parts = [
                        observer.forward(each).output.value
                        for each in batches_to_device(sentences.batches, device)
                    ]
                    others = torch.cat(parts)
                return {"kind": kind, "items": nearest(embedding, others, sentences.texts, top)}
    return None


def _last(forward: Forward) -> int:
    """The position of the first sequence's last token."""
    if forward.output.real is None:
        return -1
    real = forward.output.real if forward.real is None else forward.real
    return int(real[0].nonzero()[-1])


def hidden(batch: Batch, tokenizer: PreTrainedTokenizerBase | None) -> tuple[Batch, int | None]:
    """The batch with a masked token in its first sequence, and its position; None if none can be masked."""
    ids, mask = ids_of(batch), getattr(tokenizer, "mask_token_id", None)
    if ids is None or mask is None:
        return batch, None
    positions = (ids[0] == mask).nonzero()
    if len(positions):
        return batch, int(positions[0])
    special = set(getattr(tokenizer, "all_special_ids", None) or [])
    # the last word, not the full stop after it
    ordinary = [i for i, number in enumerate(ids[0].tolist()) if number not in special]
    words = [i for i in ordinary if any(map(str.isalnum, token_text(tokenizer, int(ids[0, i]))))] or ordinary
    if not words:
        return batch, None
    changed = ids.clone()
    changed[0, words[-1]] = mask
    if isinstance(batch, Mapping):
        return {name: changed if item is ids else item for name, item in batch.items()}, words[-1]
    items = [changed if item is ids else item for item in batch] if not isinstance(batch, Tensor) else changed
    return items, words[-1]


def ids_of(batch: Batch) -> Tensor | None:
    """The token ids of a batch, (batch, length); None for images."""
    if isinstance(batch, Mapping):
        items = [batch[name] for name in _IDS if name in batch]
    else:
        items = list(batch) if isinstance(batch, tuple | list) else [batch]
    matrices = [x for x in items if isinstance(x, Tensor) and x.dim() == 2 and not x.is_floating_point()]
    return matrices[0] if matrices else None
