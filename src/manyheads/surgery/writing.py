"""A few tokens, written with the cache: what models that write are compared by, besides their output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.nn.transformers import Decoder, Seq2Seq

STEPS = 3


def written(model: nn.Module, batch: Any) -> list[Tensor] | None:
    """The logits (1, vocabulary) of some tokens that a model writes greedily, with its cache, after the first
    sequence of a batch; None for models that do not write, or not from this.

    >>> model = Decoder(12, heads=3, layers=2, vocabulary=17).eval()
    >>> [tuple(logits.shape) for logits in written(model, torch.randint(17, (2, 5)))]
    [(1, 17), (1, 17), (1, 17)]
    """
    with torch.no_grad():
        if isinstance(model, Decoder | Seq2Seq):
            return _ours(model, batch)
        able = getattr(model, "can_generate", None)
        if isinstance(batch, Mapping) and callable(able) and able():
            return _theirs(model, batch)
    return None


def _ours(model: Decoder | Seq2Seq, batch: Any) -> list[Tensor] | None:
    given = batch[0] if isinstance(batch, tuple | list) else batch
    if not isinstance(given, Tensor) or (isinstance(model, Seq2Seq) and model.decoder.embedding is None):
        return None
    if isinstance(model, Seq2Seq):
        decoder, ids = model.decoder, torch.zeros(1, 1, dtype=torch.long, device=given.device)
        cache = decoder.new_cache(STEPS, model.encoder(given[:1]))
    else:
        first: Any = model.blocks[0]
        if model.embedding is None or first.cross_attention is not None:
            return None
        decoder, ids = model, given[:1]
        if decoder.max_length is not None:
            ids = ids[:, : decoder.max_length - STEPS + 1]
        cache = decoder.new_cache(ids.shape[1] + STEPS - 1)
    found = []
    for _ in range(STEPS):
        found.append(decoder(ids, cache=cache, last=True)[:, -1])
        ids = found[-1].argmax(-1, keepdim=True)
    return found


def _theirs(model: Any, batch: Mapping[str, Any]) -> list[Tensor] | None:
    given = {  # one sequence: padding on the right is no start for generation
        name: value[:1] if isinstance(value, Tensor) else value
        for name, value in batch.items()
        if not name.startswith("decoder_")
    }
    result = model.generate(
        **given, max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False, num_beams=1, use_cache=True,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return list(result.logits)
