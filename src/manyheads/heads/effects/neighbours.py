"""Texts whose embeddings are the neighbours of an input's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from manyheads.common.run_batch import run
from manyheads.common.types import Batch
from manyheads.heads.effects.answers import ids_of
from manyheads.heads.model_outputs import read_output
from manyheads.heads.observer import observed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def embedded_texts(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase | None, batches: Sequence[Batch]
) -> tuple[list[str], Tensor] | None:
    """The texts of batches of one sequence, and their embeddings (texts, width).

    None without a tokenizer, without batches, and for a model that gives logits.

    >>> from manyheads.models.embedded import load
    >>> model, tokenizer = load()
    >>> batch = dict(tokenizer(["Heads attend."], return_tensors="pt"))
    >>> texts, values = embedded_texts(model, tokenizer, [batch])
    >>> texts, values.shape
    (['heads attend.'], torch.Size([1, 384]))
    """
    if tokenizer is None or not batches:
        return None
    texts, values = [], []
    with torch.no_grad():
        for batch in batches:
            output = read_output(run(model, batch), model)
            ids = ids_of(batch)
            if output.real is not None or ids is None:
                return None
            texts.append(str(tokenizer.decode(ids[0].tolist(), skip_special_tokens=True)).strip())
            values.append(output.value[:1].float())
    return texts, torch.cat(values)


def embeddings(model: nn.Module, batches: Sequence[Batch]) -> Tensor:
    """What a model of sentences gives for padded batches: (sequences, width).

    >>> from manyheads.nn.transformers import Encoder
    >>> model = Encoder(d_model=8, heads=2, layers=1, vocabulary=17)
    >>> embeddings(model, [torch.randint(17, (3, 5)), torch.randint(17, (1, 4))]).shape
    torch.Size([4, 8])
    """
    with observed(model) as observer:
        return torch.cat([observer.forward(batch).output.value for batch in batches])
