"""One sentence through a BERT encoder, step by step, with `MultiHeadAttention` in place of BERT's attention.

Every step is kept to be shown, and the result of every layer is compared with what the model itself computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from manyheads.common.language import words
from manyheads.heads.maps import maps
from manyheads.heads.watch import watch
from manyheads.models import embedded
from manyheads.nn.attention import attention
from manyheads.nn.multihead import MultiHeadAttention

if TYPE_CHECKING:
    from transformers import BertModel, PreTrainedTokenizerBase
    from transformers.models.bert.modeling_bert import BertLayer


@dataclass(frozen=True, eq=False)
class LayerSteps:
    """One layer of the encoder, with our attention in it."""

    query: Tensor  # (heads, length, width), as are key, value and outputs
    key: Tensor
    value: Tensor
    weights: Tensor  # (heads, length, length)
    outputs: Tensor
    joined: Tensor  # (length, d_model), as are projected and hidden
    projected: Tensor
    hidden: Tensor
    seen: Tensor  # (heads, length, length): the weights that the model itself used
    effective_keys: Tensor  # (heads,)
    difference: float  # the largest between hidden and the output of the model's layer
    map_difference: float  # the largest between weights and seen


@dataclass(frozen=True, eq=False)
class SentenceSteps:
    """From a sentence to its embedding.

    model: what the model is called; causal: whether its tokens attend to those before them only.
    """

    model: str
    causal: bool
    text: str
    tokens: list[str]
    is_word: Tensor  # (length,): False for [CLS], [SEP] and [UNK]
    ids: Tensor  # (length,)
    words: Tensor  # (length, d_model), as are positions and normed
    positions: Tensor
    normed: Tensor
    layers: list[LayerSteps]
    sentence: Tensor  # (d_model,)
    difference: float  # the largest between sentence and the model's embedding


@torch.no_grad()
def sentence_steps(
    model: BertModel, tokenizer: PreTrainedTokenizerBase, text: str, name: str = "MiniLM"
) -> SentenceSteps:
    """Send a sentence through BERT (transformers' BertModel, in eval mode), keeping every step.

    >>> from manyheads.models.embedded import load
    >>> steps = sentence_steps(*load(), "Heads attend.")
    >>> steps.tokens
    ['[CLS]', 'heads', 'attend', '.', '[SEP]']
    >>> len(steps.layers), steps.layers[0].weights.shape, steps.sentence.shape
    (6, torch.Size([12, 5, 5]), torch.Size([384]))
    >>> max(layer.difference for layer in steps.layers) < 1e-4
    True
    """
    batch = tokenized(tokenizer, text, model.config.max_position_embeddings)
    table, ids = model.embeddings, batch["input_ids"][0]
    words = table.word_embeddings(ids)
    positions = table.position_embeddings(torch.arange(len(ids)))
    segment = table.token_type_embeddings(torch.zeros_like(ids))
    x = normed = table.LayerNorm(words + positions + segment)
    heads = range(model.config.num_attention_heads)
    every: dict[int | str, range] = dict.fromkeys(range(model.config.num_hidden_layers), heads)
    causal = bool(model.config.is_decoder)
    with watch(model) as watched:
        result = model(**batch, output_hidden_states=True)
    seen = maps(model, batch, every, size=None)
    entropy = watched.table["entropy"].view(len(every), len(heads))
    layers = []
    blocks: list[BertLayer] = list(model.encoder.layer)  # type: ignore[arg-type]
    for n, block in enumerate(blocks):
        site = watched.sites[n].name
        expected = result.hidden_states[n + 1][0]
        layer = _layer(block, x, expected, seen[site].weights[0], entropy[n].exp(), causal)
        layers.append(layer)
        x = layer.hidden
    sentence = F.normalize(x.mean(0), dim=0)
    difference = (sentence - F.normalize(result.last_hidden_state[0].mean(0), dim=0)).abs().max().item()
    tokens = list(tokenizer.convert_ids_to_tokens(ids.tolist()))
    position = torch.arange(len(ids))
    is_word = (position > 0) & (position < len(ids) - 1) & (ids != tokenizer.unk_token_id)
    embedding = words, positions, normed
    return SentenceSteps(name, causal, text, tokens, is_word, ids, *embedding, layers, sentence, difference)


def embedded_steps(sentence: str | None = None) -> SentenceSteps:
    """The steps of a sentence, or of one of ours, through the embedded MiniLM; through the small model of
    this package if it is Chinese, or if MiniLM is not installed.
    """
    ours = words("The animal did not cross the street because it was too tired.")
    text = ours if sentence is None else sentence
    if is_chinese(text) or not embedded.is_installed():
        return sentence_steps(*embedded.load_small(), text, embedded.SMALL)
    return sentence_steps(*embedded.load(), text)


def is_chinese(text: str) -> bool:
    """Whether a text has Chinese characters.

    >>> is_chinese("我是秦始皇"), is_chinese("Heads attend.")
    (True, False)
    """
    return any("\u3400" <= letter <= "\u9fff" for letter in text)


class Link(NamedTuple):
    """The attention of one token to another."""

    layer: int
    head: int
    query: int
    key: int
    weight: float


def strongest_link(steps: SentenceSteps) -> Link | None:
    """The largest weight between two different words that are not neighbours; None if there are none."""
    position, is_word = torch.arange(len(steps.tokens)), steps.is_word
    far = (position[:, None] - position).abs() > 1
    different = steps.ids[:, None] != steps.ids
    candidates = far & different & is_word & is_word[:, None]
    if not candidates.any():
        return None
    weights = torch.stack([layer.seen for layer in steps.layers]) * candidates  # (layers, heads, L, L)
    layer, head, query, key = (int(i) for i in torch.unravel_index(weights.argmax(), weights.shape))
    return Link(layer, head, query, key, weights[layer, head, query, key].item())


def tokenized(tokenizer: PreTrainedTokenizerBase, text: str, longest: int) -> dict[str, Tensor]:
    """The batch that the model takes, ids (1, length); ValueError for an empty text and for a long one."""
    if not text.strip():
        raise ValueError("sentence: expected some text, got none")
    batch = dict(tokenizer([text], return_tensors="pt", verbose=False))
    length = batch["input_ids"].shape[1]
    if length > longest:
        raise ValueError(
            f"sentence: it has {length} tokens, the model reads at most {longest}; give a shorter one"
        )
    return batch


def copied_attention(block: BertLayer) -> MultiHeadAttention:
    """Our attention with the weights of a BERT layer."""
    bert: Any = block.attention.self
    mha = MultiHeadAttention(bert.query.in_features, bert.num_attention_heads)
    pairs = ((mha.query, bert.query), (mha.key, bert.key), (mha.value, bert.value))
    for target, source in (*pairs, (mha.output, block.attention.output.dense)):
        target.load_state_dict(source.state_dict())
    return mha.eval()


def _layer(
    block: BertLayer, x: Tensor, expected: Tensor, seen: Tensor, effective_keys: Tensor, causal: bool
) -> LayerSteps:
    mha = copied_attention(block)
    q, k, v = (_split(projection(x), mha.heads) for projection in (mha.query, mha.key, mha.value))
    outputs = attention(q[None], k[None], v[None], causal=causal)[
        0
    ]  # each head alone: (heads, length, width)
    joined = outputs.transpose(0, 1).flatten(1)
    projected, weights = (result[0] for result in mha(x[None], causal=causal, return_weights=True))
    attended = block.attention.output.LayerNorm(x + projected)
    hidden = block.output(block.intermediate(attended), attended)  # feed-forward, residual, norm
    difference, map_difference = (
        (a - b).abs().max().item() for a, b in ((hidden, expected), (weights, seen))
    )
    return LayerSteps(
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
