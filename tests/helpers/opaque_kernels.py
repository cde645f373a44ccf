"""Attention kernels that torch's function mode cannot see into, on the CPU, and functions around them with
the signatures of those that people use.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, modeling_flash_attention_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS


def _formula(q, k, v, mask, causal, before, after, scale, softcap, sinks):
    """(batch, heads, length, width) by the textbook, with flash-attention's settings."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.mT * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    rows, columns = scores.shape[-2:]
    ahead = torch.arange(columns) - torch.arange(rows)[:, None] - (columns - rows)
    hidden = torch.zeros(rows, columns, dtype=torch.bool)
    hidden |= (ahead > 0) if causal else hidden
    hidden |= (ahead < -before) if before >= 0 else hidden
    hidden |= (ahead > after) if after >= 0 else hidden
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v
    return scores.softmax(-1).nan_to_num(0.0) @ v


@torch.library.custom_op("manyheads_tests::opaque", mutates_args=())
def opaque(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    before: int,
    after: int,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """A kernel without a gradient."""
    return _formula(q, k, v, mask, causal, before, after, scale, softcap, sinks).contiguous()


@torch.library.custom_op("manyheads_tests::trainable", mutates_args=())
def trainable(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """A kernel with a gradient."""
    return _formula(q, k, v, mask, causal, -1, -1, scale, 0.0, None).contiguous()


def _keep(ctx, inputs, output):
    q, k, v, mask, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, mask)


def _backward(ctx, gradient):
    q, k, v, mask = ctx.saved_tensors
    with torch.enable_grad():
        parts = [x.detach().requires_grad_() for x in (q, k, v)]
        out = _formula(*parts, mask, ctx.causal, -1, -1, ctx.scale, 0.0, None)
    return *torch.autograd.grad(out, parts, gradient), None, None, None


trainable.register_autograd(_backward, setup_context=_keep)


def backend(module, query, key, value, attention_mask, scaling=None, is_causal=None, **others):
    """A function on transformers' attention interface; it takes the masks of sdpa."""
    causal = (
        getattr(module, "is_causal", True) if is_causal is None else is_causal
    ) and attention_mask is None
    bias = others.get("position_bias")
    if bias is not None:
        whole = bias if attention_mask is None else torch.where(attention_mask, bias, -torch.inf)
        attention_mask = whole
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    cap, sinks = others.get("softcap") or 0.0, others.get("s_aux")
    out = opaque(query, key, value, attention_mask, bool(causal), -1, -1, scale, cap, sinks)
    return out.transpose(1, 2).contiguous(), None


def trainable_backend(module, query, key, value, attention_mask, scaling=None, is_causal=None, **others):
    """The same, with a gradient."""
    causal = (
        getattr(module, "is_causal", True) if is_causal is None else is_causal
    ) and attention_mask is None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = trainable(query, key, value, attention_mask, bool(causal), scale)
    return out.transpose(1, 2).contiguous(), None


def register_backend(name: str, function) -> str:
    """Register a backend under a name, with sdpa's masks."""
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    return name


OPAQUE = register_backend("manyheads_tests_opaque", backend)
TRAINABLE = register_backend("manyheads_tests_trainable", trainable_backend)


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False, s_aux=None,
):  # fmt: skip
    """flash-attention's, (batch, length, heads, width)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    before, after = window_size
    after = -1 if causal else after
    return opaque(q, k, v, None, causal, before, after, scale, softcap or 0.0, s_aux).transpose(1, 2)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
    causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, s_aux=None, **others,
):  # fmt: skip
    """flash-attention's for packed sequences, (tokens, heads, width)."""
    pieces = []
    for n in range(len(cu_seqlens_q) - 1):
        rows, columns = (slice(int(c[n]), int(c[n + 1])) for c in (cu_seqlens_q, cu_seqlens_k))
        part = q[None, rows], k[None, columns], v[None, columns]
        settings = 0.0, softmax_scale, causal, window_size, softcap, alibi_slopes
        pieces.append(flash_attn_func(*part, *settings, s_aux=s_aux)[0])
    return torch.cat(pieces)


@contextmanager
def flash_package(monkeypatch) -> Iterator[types.ModuleType]:
    """A package flash_attn; its functions are other objects each time."""
    package = types.ModuleType("flash_attn")
    for function in (flash_attn_func, flash_attn_varlen_func):
        twin = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__
        )
        setattr(package, function.__name__, twin)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    yield package


def flash_backend(monkeypatch) -> None:
    """Let transformers' flash_attention_2 run on the CPU, by the functions above."""
    utils = modeling_flash_attention_utils
    names = ("dropout_p", "window_size", "softcap", "s_aux", "max_seqlen_q", "max_seqlen_k")
    supported = dict.fromkeys(
        (*names, "deterministic", "learnable_sink", "block_table", "page_table", "cache_seqlens"), False
    ) | dict.fromkeys(names, True)
    functions = flash_attn_func, flash_attn_varlen_func, None, utils._pad_input, utils._unpad_input
    process = partial(utils._process_flash_attention_kwargs, supports_mapping=supported)
    monkeypatch.setattr(utils, "lazy_import_flash_attention", lambda *a, **k: (functions, (process, process)))


def use(model: torch.nn.Module, name: str) -> torch.nn.Module:
    """Set a model's backend without asking whether a package is installed."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:
            config._attn_implementation_internal = name
            text = getattr(config, "text_config", None)
            if text is not None:
                text._attn_implementation_internal = name
    return model
