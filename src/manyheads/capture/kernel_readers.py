"""Readers of the attention functions that models call: transformers' attention interface, flash-attention,
xFormers, torch's attention over packed sequences.

A reader takes the arguments of its function, by the function's own names for them, and returns
`AttentionArguments`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from manyheads.capture.kernel_arguments import (
    HEADS_FIRST,
    LENGTH_FIRST,
    PACKED,
    AttentionArguments,
    UnreadableError,
)
from manyheads.common.types import Keywords

# Where the functions are that ship with a reader: (module, name) -> the reader's name in this file.
READERS: dict[tuple[str, str], str] = {
    ("flash_attn", "flash_attn_func"): "read_flash",
    ("flash_attn", "flash_attn_qkvpacked_func"): "read_flash_joined",
    ("flash_attn", "flash_attn_kvpacked_func"): "read_flash_joined_keys",
    ("flash_attn", "flash_attn_varlen_func"): "read_flash_packed",
    ("flash_attn", "flash_attn_varlen_qkvpacked_func"): "read_flash_packed_joined",
    ("flash_attn", "flash_attn_varlen_kvpacked_func"): "read_flash_packed_joined_keys",
    ("flash_attn", "flash_attn_with_kvcache"): "read_flash_cache",
    ("flash_attn_interface", "flash_attn_func"): "read_flash",
    ("flash_attn_interface", "flash_attn_varlen_func"): "read_flash_packed",
    ("flash_attn_interface", "flash_attn_with_kvcache"): "read_flash_cache",
    ("flash_attn.cute", "flash_attn_func"): "read_flash",
    ("flash_attn.cute", "flash_attn_varlen_func"): "read_flash_packed",
    ("xformers.ops", "memory_efficient_attention"): "read_xformers",
    ("torch.nn.attention.varlen", "varlen_attn"): "read_torch_packed",
    ("torch.nn.attention.varlen", "varlen_attn_out"): "read_torch_packed_out",
}


def read_interface(
    module: object,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    cache: object = None,
    **others: object,
) -> AttentionArguments:
    """A function on transformers' attention interface: queries, keys and values (batch, heads, length,
    width), the output (batch, length, heads, width).

    A mask with four axes says everything; one with two is of the keys that are no padding, and causality
    and windows are arguments.
    """
    if cache is not None or others.get("block_table") is not None:
        raise UnreadableError("its keys are in a paged cache, which only the kernel reads")
    if attention_mask is not None and not isinstance(attention_mask, Tensor):
        raise UnreadableError(f"its mask is a {type(attention_mask).__name__}, which only the kernel reads")
    whole = attention_mask if attention_mask is not None and attention_mask.dim() == 4 else None
    real = attention_mask if attention_mask is not None and attention_mask.dim() == 2 else None
    if attention_mask is not None and whole is None and real is None:
        raise UnreadableError(f"its mask has {attention_mask.dim()} axes; expected 2 or 4")
    if whole is not None and whole.shape[-1] > key.shape[2] > 1:
        whole = whole[..., : key.shape[2]]
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    starts = key_starts = None
    if attention_mask is None:
        starts, key_starts = cu_seq_lens_q, cu_seq_lens_k
        if starts is None or key_starts is None:
            starts = key_starts = _starts(position_ids, query)
    window = None if sliding_window is None or whole is not None else (sliding_window - 1,) * 2
    if position_bias is not None:
        whole = position_bias if whole is None else _sum(whole, position_bias)
    return AttentionArguments(
        query=query, key=key, value=value, layout=HEADS_FIRST, output_layout=LENGTH_FIRST, starts=starts,
        key_starts=key_starts, mask=whole, real=real,
        causal=causal and (attention_mask is None or real is not None), window=window,
        scale=None if scaling is None else float(scaling), softcap=softcap, sinks=s_aux,
        dropout=float(dropout or 0.0),
    )  # fmt: skip


def _sum(mask: Tensor, bias: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, -torch.inf)
    return mask + bias


def _starts(position_ids: Tensor | None, query: Tensor) -> Tensor | None:
    """Where sequences begin in a row of positions that start again; None for a single sequence."""
    if position_ids is None or query.shape[0] != 1 or position_ids.shape != (1, query.shape[2]):
        return None
    positions = position_ids[0]
    first = (positions == positions.min()).nonzero()[:, 0]
    steps = torch.arange(len(positions), device=positions.device) + positions.min()
    if len(positions) == 1 or bool((steps == positions).all()) or int(first[0]) != 0:
        return None
    return torch.cat([first, first.new_tensor([len(positions)])])


def _window(window: Any) -> tuple[int, int] | None:
    """A window of flash-attention: None, or (before, after), each None or -1 for no end."""
    if window is None:
        return None
    before, after = (-1 if side is None else int(side) for side in window)
    return None if before < 0 and after < 0 else (before, after)


def read_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: object = (-1, -1),
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    **others: object,
) -> AttentionArguments:
    """flash_attn_func: (batch, length, heads, width)."""
    _refuse(others, "qv", "mask_mod", "score_mod", "page_table", "block_table", "attention_chunk")
    return AttentionArguments(
        query=q, key=k, value=v, layout=LENGTH_FIRST, causal=causal, window=_window(window_size),
        scale=softmax_scale, softcap=softcap or None, slopes=alibi_slopes, dropout=dropout_p,
        sinks=learnable_sink,
    )  # fmt: skip


def _refuse(others: dict[str, object], *names: str) -> None:
    """Raise for arguments that change what is computed in a way that cannot be read."""
    used = [name for name in names if isinstance(others.get(name), Tensor) or others.get(name)]
    if used:
        raise UnreadableError(f"it was called with {', '.join(used)}, which only the kernel reads")


def read_flash_joined(qkv: Tensor, **options: Any) -> AttentionArguments:
    """flash_attn_qkvpacked_func: (batch, length, 3, heads, width)."""
    q, k, v = qkv.unbind(2)
    return read_flash(q, k, v, **options)


def read_flash_joined_keys(q: Tensor, kv: Tensor, **options: Any) -> AttentionArguments:
    """flash_attn_kvpacked_func: the keys and values as (batch, length, 2, heads, width)."""
    k, v = kv.unbind(2)
    return read_flash(q, k, v, **options)


def read_flash_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    **options: Any,
) -> AttentionArguments:
    """flash_attn_varlen_func: (tokens, heads, width), with where sequences begin."""
    _refuse(options, "seqused_q", "seqused_k")
    if cu_seqlens_q is None or cu_seqlens_k is None:
        raise UnreadableError("it was called without cu_seqlens_q or cu_seqlens_k")
    alike = read_flash(q[None], k[None], v[None], **options)
    return replace(
        alike, query=q, key=k, value=v, layout=PACKED, starts=cu_seqlens_q, key_starts=cu_seqlens_k
    )


def read_flash_packed_joined(qkv: Tensor, cu_seqlens: Tensor, **options: object) -> AttentionArguments:
    """flash_attn_varlen_qkvpacked_func: (tokens, 3, heads, width)."""
    q, k, v = qkv.unbind(1)
    return read_flash_packed(q, k, v, cu_seqlens, cu_seqlens, **options)


def read_flash_packed_joined_keys(q: Tensor, kv: Tensor, **options: Any) -> AttentionArguments:
    """flash_attn_varlen_kvpacked_func: the keys and values as (tokens, 2, heads, width)."""
    k, v = kv.unbind(1)
    return read_flash_packed(q, k, v, **options)


def read_flash_cache(**options: object) -> AttentionArguments:
    """flash_attn_with_kvcache: the kernel writes to its cache, so that the keys are not in its arguments."""
    raise UnreadableError("its keys are in a cache that the kernel writes to")


def read_xformers(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    **others: Any,
) -> AttentionArguments:
    """memory_efficient_attention: (batch, length, heads, width), or three axes for a single head."""
    if query.dim() != 4:
        raise UnreadableError(f"its queries have {query.dim()} axes; expected (batch, length, heads, width)")
    options: Keywords = {"scale": scale, "dropout": p, "layout": LENGTH_FIRST}
    kind = type(attn_bias).__name__
    if isinstance(attn_bias, Tensor):
        options["mask"] = attn_bias
    elif kind in ("LowerTriangularMask", "LowerTriangularFromBottomRightMask"):
        if kind == "LowerTriangularMask" and query.shape[1] != key.shape[1]:
            raise UnreadableError("its causal mask is aligned at the first key, with fewer queries than keys")
        options["causal"] = True
    elif kind in ("BlockDiagonalMask", "BlockDiagonalCausalMask"):
        options["starts"] = attn_bias.q_seqinfo.seqstart
        options["key_starts"] = attn_bias.k_seqinfo.seqstart
        options["causal"] = kind == "BlockDiagonalCausalMask"
        if options["causal"] and not torch.equal(options["starts"], options["key_starts"]):
            raise UnreadableError(
                "its causal masks are aligned at the first key, with fewer queries than keys"
            )
    elif attn_bias is not None:
        raise UnreadableError(f"its mask is a {kind}, which only the kernel reads")
    return AttentionArguments(query=query, key=key, value=value, **options)


def read_torch_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: object = (-1, -1),
    **others: object,
) -> AttentionArguments:
    """torch.nn.attention.varlen.varlen_attn: (tokens, heads, width), with where sequences begin."""
    _refuse(others, "seqused_k", "block_table")
    return AttentionArguments(
        query=query, key=key, value=value, layout=PACKED, starts=cu_seq_q, key_starts=cu_seq_k,
        causal=is_causal, window=_window(window_size), scale=scale,
    )  # fmt: skip


def read_torch_packed_out(out: Tensor, **options: Any) -> AttentionArguments:
    """torch.nn.attention.varlen.varlen_attn_out: writes to its first argument."""
    return replace(read_torch_packed(**options), out=out)
