"""MultiHeadAttention from torch's nn.MultiheadAttention and back, weight by weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from manyheads.nn.multihead import MultiHeadAttention


def from_torch(module: nn.MultiheadAttention) -> MultiHeadAttention:
    """See `MultiHeadAttention.from_torch`."""
    if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        raise ValueError("module: add_bias_kv and add_zero_attn have no counterpart in MultiHeadAttention")
    weight = module.out_proj.weight
    options: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
    bias = module.in_proj_bias is not None
    ours = MultiHeadAttention(
        module.embed_dim,
        module.num_heads,
        d_context=module.kdim,
        bias=bias,
        dropout=module.dropout,
        **options,
    )
    if module.vdim != module.kdim:
        ours.value = nn.Linear(module.vdim, module.embed_dim, bias=bias, **options)
    with torch.no_grad():
        for n, (projection, part) in enumerate(zip(_inputs(ours), _in_weights(module), strict=True)):
            projection.weight.copy_(part)
            if bias:
                projection.bias.copy_(module.in_proj_bias.chunk(3)[n])
        ours.output.load_state_dict(module.out_proj.state_dict())
    return ours.train(module.training)


def to_torch(module: MultiHeadAttention) -> nn.MultiheadAttention:
    """See `MultiHeadAttention.to_torch`."""
    width = module.d_model // module.heads
    reasons = {
        "kv_heads differ from heads": module.kv_heads != module.heads,
        "d_key or d_value is not d_model / heads": (module.d_key, module.d_value) != (width, width)
        or module.d_model % module.heads,
        "it normalises queries and keys": module.query_norm is not None,
        "it has rotary positions": module.rotary is not None,
        "it has a window or a chunk": module.window is not None or module.chunk is not None,
    }
    against = [reason for reason, holds in reasons.items() if holds]
    if against:
        raise ValueError(f"nn.MultiheadAttention cannot say what this module does: {'; '.join(against)}")
    weight = module.output.weight
    bias = module.output.bias is not None
    theirs = nn.MultiheadAttention(
        module.d_model, module.heads, module.dropout, bias=bias, kdim=module.key.in_features,
        vdim=module.value.in_features, batch_first=True, device=weight.device, dtype=weight.dtype,
    )  # fmt: skip
    with torch.no_grad():
        for part, projection in zip(_in_weights(theirs), _inputs(module), strict=True):
            part.copy_(projection.weight)
        if theirs.in_proj_bias is not None:
            theirs.in_proj_bias.copy_(torch.cat([projection.bias for projection in _inputs(module)]))
        theirs.out_proj.load_state_dict(module.output.state_dict())
    return theirs.train(module.training)


def _inputs(module: MultiHeadAttention) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    return module.query, module.key, module.value


def _in_weights(module: nn.MultiheadAttention) -> tuple[Tensor, ...]:
    """The query, key and value weights, as views, however torch packed them."""
    packed: Tensor | None = module.in_proj_weight
    separate = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
    return separate if packed is None else packed.chunk(3)
