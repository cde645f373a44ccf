"""Models of manyheads as plain data and back, so that they load without a factory."""

from __future__ import annotations

from typing import Any

from torch import nn

from manyheads.common.types import Keywords
from manyheads.nn.blocks import ACTIVATIONS, TransformerBlock
from manyheads.nn.multihead import MultiHeadAttention
from manyheads.nn.positions import LearnedPositions, Rotary, SinusoidalPositions
from manyheads.nn.stack import Stack
from manyheads.nn.transformers import Decoder, Encoder, Seq2Seq

CLASSES: dict[str, type[nn.Module]] = {
    cls.__name__: cls for cls in (MultiHeadAttention, TransformerBlock, Encoder, Decoder, Seq2Seq)
}
Before = dict[str, list[int]]  # site -> heads and key heads before anything was cut


def describe(model: nn.Module, before: Before) -> dict[str, object] | None:
    """The arguments that make a model like this one, uncut; None when it is not ours or cannot be written.

    >>> describe(MultiHeadAttention(6, 2), {})["heads"]
    2
    """
    if type(model) is MultiHeadAttention:
        return _attention(model, before.get("", [model.heads, model.kv_heads])) | _rotary(model)
    if type(model) is TransformerBlock:
        return _block(model, before, "")
    if type(model) in (Encoder, Decoder) and isinstance(model, Stack):
        return _stack(model, before, "")
    if type(model) is Seq2Seq:
        return _seq2seq(model, before)
    return None


def build(name: str, options: Keywords) -> nn.Module:
    """The model of that class with these arguments.

    >>> build("MultiHeadAttention", {"d_model": 6, "heads": 2}).heads
    2
    """
    if name not in CLASSES:
        raise ValueError(f"heads.json: {name!r} is not a model of manyheads; known are {', '.join(CLASSES)}")
    options = dict(options)
    for key in ("rotary", "positions"):
        if isinstance(options.get(key), dict):
            options[key] = Rotary(**options[key])
    return CLASSES[name](**options)


def _attention(module: MultiHeadAttention, heads: list[int]) -> dict[str, object]:
    return {
        "d_model": module.d_model, "heads": heads[0], "kv_heads": heads[1], "d_key": module.d_key,
        "d_value": module.d_value, "bias": module.query.bias is not None, "dropout": module.dropout,
        "qk_norm": module.query_norm is not None, "window": module.window, "chunk": module.chunk,
        "kernel": module.kernel, "d_context": module.key.in_features,
    }  # fmt: skip


def _rotary(module: MultiHeadAttention) -> dict[str, object]:
    rotary = module.rotary
    if rotary is None:
        return {}
    return {"rotary": {"width": rotary.width, "base": rotary.base, "interleaved": rotary.interleaved}}


def _block(block: TransformerBlock, before: Before, path: str) -> dict[str, object] | None:
    forward = block.feed_forward
    activation = next((name for name, f in ACTIVATIONS.items() if f is forward.activation), None)
    if activation is None:
        return None
    name = f"{path}.attention" if path else "attention"
    attention = block.attention
    options = _attention(attention, before.get(name, [attention.heads, attention.kv_heads])) | _rotary(
        attention
    )
    options["attention_dropout"] = options.pop("dropout")
    options.pop("d_context")
    cross = block.cross_attention
    if cross is not None:
        options |= {"cross": True, "d_context": cross.key.in_features}
    norm: Any = block.attention_norm
    return options | {
        "d_hidden": forward.up.out_features, "activation": activation, "gated": forward.gate is not None,
        "norm": block.norm, "rms_norm": isinstance(norm, nn.RMSNorm), "norm_eps": norm.eps,
        "residual": block.residual, "dropout": block.dropout.p, "checkpoint": block.checkpoint,
    }  # fmt: skip


def _stack(stack: Stack, before: Before, path: str) -> Keywords | None:
    block: Any = stack.blocks[0]
    options = _block(block, before, f"{path}.blocks.0" if path else "blocks.0")
    if options is None:
        return None
    positions: Any = options.pop("rotary", "none")
    if isinstance(stack.positions, SinusoidalPositions):
        positions = "sinusoidal"
    elif isinstance(stack.positions, LearnedPositions):
        positions = "learned"
    elif stack.alibi is not None:
        positions = "alibi"
    options |= {"layers": len(stack.blocks), "positions": positions, "max_length": stack.max_length}
    options["vocabulary"] = None if stack.embedding is None else stack.embedding.num_embeddings
    if isinstance(stack, Decoder):
        options["tied"] = stack.output is None
    return options


def _seq2seq(model: Seq2Seq, before: Before) -> dict[str, object] | None:
    encoder, decoder = _stack(model.encoder, before, "encoder"), _stack(model.decoder, before, "decoder")
    if encoder is None or decoder is None:
        return None
    shared = model.decoder.embedding is model.encoder.embedding
    return encoder | {
        "decoder_layers": decoder["layers"],
        "tied": decoder["tied"],
        "target_vocabulary": None if shared else decoder["vocabulary"],
    }
