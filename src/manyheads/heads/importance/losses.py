"""The built-in losses, and how they read what they need from a batch.

A loss takes what the model returned and the batch, and returns one number, or one for each sequence. Any
function of that kind can be given instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.capture.site import Site
from manyheads.common.labelled_batch import LabelledBatch
from manyheads.common.types import Batch
from manyheads.data.labelled.losses import IGNORED, token_cross_entropy
from manyheads.heads.model_outputs import is_span, main_tensor, read_output

Loss = Callable[[Any, Any], Tensor]
TEMPERATURE = 0.05
# Names of the token ids that a model reads, and that its decoder reads: in transformers, then in manyheads.
READ = ("input_ids", "x", "ids")
WRITTEN = ("decoder_input_ids", "target")


def causal(result: object, batch: Batch | None) -> Tensor:
    """Cross-entropy of each next token, (batch,): of ``labels``, or of ``input_ids`` that are no padding.

    >>> causal({"logits": torch.zeros(2, 5, 7)}, {"input_ids": torch.ones(2, 5, dtype=torch.long)})
    tensor([1.9459, 1.9459])
    """
    labels = _tensor_named(batch, "labels")
    if labels is None:
        labels = _ids(batch, "causal", first=True)
        real = _real(batch, labels)
        if real is not None and real.shape == labels.shape:
            labels = labels.masked_fill(~real, IGNORED)
    return _cross_entropy(_logits(result, "causal", 3)[:, :-1], labels[:, 1:], "causal")


def masked(result: object, batch: Batch | None) -> Tensor:
    """Cross-entropy of the tokens that were masked, (batch,): ``labels`` has their ids, and -100 elsewhere.

    >>> masked({"logits": torch.zeros(1, 3, 7)}, {"labels": torch.tensor([[-100, 4, -100]])})
    tensor([1.9459])
    """
    return _cross_entropy(_logits(result, "masked", 3), _labels(batch, "masked"), "masked")


def classification(result: object, batch: Batch | None) -> Tensor:
    """Cross-entropy of each sequence's class, (batch,): ``labels`` are (batch,).

    >>> classification({"logits": torch.zeros(2, 3)}, {"labels": torch.tensor([0, 2])})
    tensor([1.0986, 1.0986])
    """
    logits, labels = _logits(result, "classification", 2), _labels(batch, "classification")
    return _cross_entropy(logits.unsqueeze(1), labels.reshape(-1, 1), "classification")


def seq2seq(result: object, batch: Batch | None) -> Tensor:
    """Cross-entropy of each token written, (batch,): of ``labels``, or of what the decoder reads next.

    >>> target = torch.ones(2, 5, dtype=torch.long)
    >>> seq2seq({"logits": torch.zeros(2, 5, 7)}, {"decoder_input_ids": target})
    tensor([1.9459, 1.9459])
    """
    logits, labels = _logits(result, "seq2seq", 3), _tensor_named(batch, "labels")
    if labels is not None:
        return _cross_entropy(logits, labels, "seq2seq")
    read_next = _ids(batch, "seq2seq", first=False)
    real = _real(batch, read_next, "decoder_attention_mask", "target_lengths")
    if real is not None:
        read_next = read_next.masked_fill(~real, IGNORED)
    return _cross_entropy(logits[:, :-1], read_next[:, 1:], "seq2seq")


def embedding(result: object, batch: Batch | None) -> Tensor:
    """How hard it is to separate the sentences of a batch by their embeddings; one number, no labels.

    Each sentence is to be found among all by the cosine of its embedding with itself and the others: the
    cross-entropy of softmax(cosine / 0.05). Zero when all stand at right angles; heads that make sentences
    different lower it.

    >>> embedding(torch.eye(3), None) < 1e-7
    tensor(True)
    """
    value = read_output(result, nn.Identity(), _real(batch)).value
    if len(value) < 2:
        raise ValueError(
            "batches: loss 'embedding' compares the sentences of a batch; expected at least 2 in each"
        )
    unit = F.normalize(value, dim=-1)
    return F.cross_entropy(unit @ unit.T / TEMPERATURE, torch.arange(len(value), device=value.device))


def labels(result: object, batch: Batch | None) -> Tensor:
    """The loss of the task that the labels of a batch are for, (batch,): batches of `labelled` have them.

    >>> from manyheads.data.labelled.texts import TextClasses
    >>> task = object.__new__(TextClasses)
    >>> batch = LabelledBatch({"labels": torch.tensor([0, 2])}, task)
    >>> labels({"logits": torch.zeros(2, 3)}, batch)
    tensor([1.0986, 1.0986])
    """
    if not isinstance(batch, LabelledBatch):
        raise ValueError(
            "batches: loss 'labels' needs the batches of labelled(data, model, tokenizer), got "
            f"{_names(batch)}; take another loss, or --data with it"
        )
    return batch.task.loss(result, batch)


LOSSES: dict[str, Loss] = {
    "causal": causal,
    "masked": masked,
    "classification": classification,
    "seq2seq": seq2seq,
    "embedding": embedding,
    "labels": labels,
}


def find_loss(loss: str | Loss | None) -> Loss | None:
    """A loss by its name, or the function itself.

    >>> find_loss("causal") is causal
    True
    """
    if loss is None or callable(loss):
        return loss
    if loss not in LOSSES:
        raise ValueError(f"loss: expected one of {', '.join(LOSSES)}, or a function, got {loss!r}")
    return LOSSES[loss]


def loss_name(loss: Loss) -> str:
    """The name of a loss.

    >>> loss_name(causal)
    'causal'
    """
    return str(getattr(loss, "__qualname__", type(loss).__qualname__))


def fitting(result: object, model: nn.Module, sites: Iterable[Site]) -> Loss:
    """The loss that a model was probably trained with, by what it returned and how it attends.

    >>> fitting({"last_hidden_state": torch.zeros(2, 5, 3)}, nn.Identity(), []) is embedding
    True
    """
    output = read_output(result, model)
    if is_span(result) or output.amounts:
        return labels
    if output.real is None:
        return embedding
    if main_tensor(result)[1].dim() == 2:
        return classification
    kinds = {site.kind for site in sites}
    if "cross" in kinds:
        return seq2seq
    return causal if kinds == {"causal"} else masked


def units(loss: Loss, result: object, batch: Batch | None) -> Tensor:
    """The value of a loss: one for each sequence (batch,), or one for all (1,).

    >>> units(lambda result, batch: result.mean(), torch.ones(2, 3), None)
    tensor([1.])
    """
    value = loss(result, batch)
    if not isinstance(value, Tensor) or value.dim() > 1 or not value.is_floating_point():
        got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"loss: expected a number or one for each sequence, (batch,), got {got}")
    return value.reshape(-1)


def hide_tokens(
    batch: Mapping[str, Tensor], mask_token: int, special: Iterable[int], generator: torch.Generator
) -> dict[str, Tensor]:
    """A batch for the masked loss: 15% of its tokens, special ones never, replaced by the mask token.

    >>> batch = {"input_ids": torch.arange(40).view(2, 20), "attention_mask": torch.ones(2, 20)}
    >>> hidden = hide_tokens(batch, 99, [0], torch.Generator().manual_seed(0))
    >>> (hidden["input_ids"] == 99).equal(hidden["labels"] != -100), (hidden["labels"] != -100).sum()
    (True, tensor(5))
    """
    name = next((name for name in READ if name in batch), READ[0])
    ids = batch[name]
    maskable = ~torch.isin(ids, torch.tensor(sorted(special), dtype=ids.dtype))
    real = _real(batch, ids)
    if real is not None:
        maskable &= real
    hidden = maskable & (torch.rand(ids.shape, generator=generator) < 0.15)
    return {
        **batch,
        name: ids.masked_fill(hidden, mask_token),
        "labels": ids.masked_fill(~hidden, IGNORED),
    }


def _cross_entropy(logits: Tensor, labels: Tensor, name: str) -> Tensor:
    """The mean over the labelled tokens of each sequence, (batch,); zero for one without any."""
    if logits.shape[:2] != labels.shape:
        raise ValueError(
            f"batches: loss {name!r} got labels {tuple(labels.shape)} for logits "
            f"{tuple(logits.shape)}; expected one label for each token"
        )
    if labels.is_floating_point():
        raise ValueError(f"batches: loss {name!r} expected whole numbers as labels, got {labels.dtype}")
    if not (labels != IGNORED).any():
        raise ValueError(
            f"batches: loss {name!r} found no label in a batch that counts; expected at least one"
        )
    return token_cross_entropy(logits, labels)


def _logits(result: object, name: str, axes: int) -> Tensor:
    what, value = main_tensor(result)
    expected = "(batch, classes)" if axes == 2 else "(batch, length, vocabulary)"
    if what == "last_hidden_state" or value.dim() != axes:
        raise ValueError(
            f"model: loss {name!r} needs logits {expected}, but the model returned {what or 'a tensor'} "
            f"{tuple(value.shape)}; load it with its head, or take another loss"
        )
    return value


def _tensor_named(batch: Batch | None, name: str) -> Tensor | None:
    tensor = batch.get(name) if isinstance(batch, Mapping) else None
    return tensor if isinstance(tensor, Tensor) else None


def _real(
    batch: Batch | None, ids: Tensor | None = None, mask: str = "attention_mask", lengths: str = "lengths"
) -> Tensor | None:
    """Which tokens are not padding, (batch, length), by a mask or by the lengths of sequences."""
    real, ends = _tensor_named(batch, mask), _tensor_named(batch, lengths)
    if real is not None:
        return real != 0
    if ends is None or ids is None:
        return None
    return torch.arange(ids.shape[1], device=ends.device) < ends.unsqueeze(1)


def _labels(batch: Batch | None, name: str) -> Tensor:
    labels = _tensor_named(batch, "labels")
    if labels is None:
        hint = "; losses.hide_tokens makes them, and so does --loss masked" if name == "masked" else ""
        raise ValueError(f"batches: loss {name!r} needs 'labels' in each batch, got {_names(batch)}{hint}")
    return labels


def _ids(batch: Batch | None, name: str, first: bool) -> Tensor:
    """The token ids of a batch that has no labels."""
    items: list[object]
    if isinstance(batch, Mapping):
        items, position = [_tensor_named(batch, key) for key in (READ if first else WRITTEN)], 0
    else:
        items, position = list(batch) if isinstance(batch, tuple | list) else [batch], 0 if first else 1
    integers = [item for item in items if isinstance(item, Tensor) and item.dim() == 2]
    integers = [item for item in integers if not item.is_floating_point() and item.dtype != torch.bool]
    if len(integers) <= position:
        ids = (READ if first else WRITTEN)[0]
        raise ValueError(
            f"batches: loss {name!r} needs 'labels' or {ids!r} in each batch, got {_names(batch)}"
        )
    return integers[position]


def _names(batch: Batch | None) -> str:
    return ", ".join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
