"""One sentence on its way through a BERT encoder, step by step, with our attention in the place of its own.

Every number of the way is here to be shown, and every layer's result is held against what the model computes
by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from manyheads.heads.maps import maps
from manyheads.heads.watch import watch
from manyheads.nn.attention import attention
from manyheads.nn.multihead import MultiHeadAttention


@dataclass(frozen=True, eq=False)
class Layer:
    """What one layer made of the sentence."""

    query: Tensor  # (heads, length, width), as are key, value and outputs
    key: Tensor
    value: Tensor
    weights: Tensor  # (heads, length, length)
    outputs: Tensor
    joined: Tensor  # (length, d_model), as are projected and hidden
    projected: Tensor
    hidden: Tensor
    seen: Tensor  # (heads, length, length): the model's own weights
    effective_keys: Tensor  # (heads,)
    difference: float  # the largest between hidden and the model's own
    map_difference: float  # the largest between weights and seen


@dataclass(frozen=True, eq=False)
class Pipeline:
    """From a sentence to its embedding."""

    text: str
    tokens: list[str]
    known: Tensor  # (length,): neither [CLS] and [SEP] nor unknown to the tokenizer
    ids: Tensor  # (length,)
    words: Tensor  # (length, d_model), as are positions and normed
    positions: Tensor
    normed: Tensor
    layers: list[Layer]
    sentence: Tensor  # (d_model,)
    difference: float  # the largest between sentence and the model's own


@torch.no_grad()
def pipeline(model: Any, tokenizer: Any, text: str) -> Pipeline:
    """Send a sentence through a BERT encoder (transformers' BertModel, in eval mode), keeping every step.

    >>> from manyheads.models.embedded import load
    >>> way = pipeline(*load(), "Heads attend.")
    >>> way.tokens
    ['[CLS]', 'heads', 'attend', '.', '[SEP]']
    >>> len(way.layers), way.layers[0].weights.shape, way.sentence.shape
    (6, torch.Size([12, 5, 5]), torch.Size([384]))
    >>> max(layer.difference for layer in way.layers) < 1e-4
    True
    """
    batch = read(tokenizer, text, model.config.max_position_embeddings)
    table, ids = model.embeddings, batch["input_ids"][0]
    words = table.word_embeddings(ids)
    positions = table.position_embeddings(torch.arange(len(ids)))
    segment = table.token_type_embeddings(torch.zeros_like(ids))
    x = normed = table.LayerNorm(words + positions + segment)
    heads = range(model.config.num_attention_heads)
    every: dict[int | str, range] = dict.fromkeys(range(model.config.num_hidden_layers), heads)
    with watch(model) as watched:
        own = model(**batch, output_hidden_states=True)
    seen = maps(model, batch, every, size=None)
    entropy = watched.table["entropy"].view(len(every), len(heads))
    layers = []
    for n, block in enumerate(model.encoder.layer):
        site = watched.sites[n].name
        layer = _layer(block, x, own.hidden_states[n + 1][0], seen[site].weights[0], entropy[n].exp())
        layers.append(layer)
        x = layer.hidden
    sentence = F.normalize(x.mean(0), dim=0)
    difference = (sentence - F.normalize(own.last_hidden_state[0].mean(0), dim=0)).abs().max().item()
    tokens = tokenizer.convert_ids_to_tokens(ids.tolist())
    place = torch.arange(len(ids))
    known = (place > 0) & (place < len(ids) - 1) & (ids != tokenizer.unk_token_id)
    return Pipeline(text, tokens, known, ids, words, positions, normed, layers, sentence, difference)


class Link(NamedTuple):
    """One token looking at another."""

    layer: int
    head: int
    query: int
    key: int
    weight: float


def strongest_link(way: Pipeline) -> Link | None:
    """The largest weight between two different words that are not neighbours; None if there are none."""
    place, inside = torch.arange(len(way.tokens)), way.known
    far = (place[:, None] - place).abs() > 1
    different = way.ids[:, None] != way.ids
    wanted = far & different & inside & inside[:, None]
    if not wanted.any():
        return None
    weights = torch.stack([layer.seen for layer in way.layers]) * wanted  # (layers, heads, length, length)
    found = torch.unravel_index(weights.argmax(), weights.shape)
    layer, head, query, key = (int(index) for index in found)
    return Link(layer, head, query, key, weights[layer, head, query, key].item())


def read(tokenizer: Any, text: str, longest: int) -> dict[str, Tensor]:
    """The batch that the model takes, ids (1, length); ValueError for nothing and for too much."""
    if not text.strip():
        raise ValueError("sentence: expected some text, got none")
    batch = dict(tokenizer([text], return_tensors="pt", verbose=False))
    length = batch["input_ids"].shape[1]
    if length > longest:
        raise ValueError(
            f"sentence: it has {length} tokens, the model reads at most {longest}; give a shorter one"
        )
    return batch


def carry(block: Any) -> MultiHeadAttention:
    """Our attention with the weights of a BERT layer."""
    own = block.attention.self
    ours = MultiHeadAttention(own.query.in_features, own.num_attention_heads)
    pairs = ((ours.query, own.query), (ours.key, own.key), (ours.value, own.value))
    for mine, theirs in (*pairs, (ours.output, block.attention.output.dense)):
        mine.load_state_dict(theirs.state_dict())
    return ours.eval()


def _layer(block: Any, x: Tensor, expected: Tensor, seen: Tensor, effective_keys: Tensor) -> Layer:
    mha = carry(block)
    q, k, v = (_split(projection(x), mha.heads) for projection in (mha.query, mha.key, mha.value))
    outputs = attention(q[None], k[None], v[None])[0]  # each head alone: (heads, length, width)
    joined = outputs.transpose(0, 1).flatten(1)
    projected, weights = (result[0] for result in mha(x[None], return_weights=True))
    attended = block.attention.output.LayerNorm(x + projected)
    hidden = block.output(block.intermediate(attended), attended)  # feed-forward, residual, norm
    difference, map_difference = (
        (a - b).abs().max().item() for a, b in ((hidden, expected), (weights, seen))
    )
    return Layer(
        q,
        k,
        v,
        weights,
        outputs,
        joined,
        projected,
        hidden,
        seen,
        effective_keys,
        difference,
        map_difference,
    )


def _split(x: Tensor, heads: int) -> Tensor:
    """(length, heads * width) -> (heads, length, width)."""
    heads_first: Tensor = x.unflatten(1, (heads, -1)).transpose(0, 1)
    return heads_first
