"""MultiHeadAttention: project, split into heads, attend, concatenate, project back."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.common.types import Arguments, Keywords
from manyheads.nn.attention import Kernel, attention, check_kernel, check_mask, joined_mask
from manyheads.nn.cache import KVCache
from manyheads.nn.mask import Mask
from manyheads.nn.positions import Rotary
from manyheads.nn.reference import weights as attention_weights
from manyheads.nn.statistics import statistics


class MultiHeadAttention(nn.Module):
    """Multi-head attention: ``output(concat_h softmax(q_h k_h^T / sqrt(d_key)) v_h)``.

    Parameters
    ----------
    d_model: width of the queries that come in and of the output.
    heads: number of query heads.
    kv_heads: number of key and value heads, a divisor of ``heads``; fewer of them are shared by groups of
        query heads (grouped-query attention), 1 is multi-query attention. Default: ``heads``.
    d_key, d_value: width of one head's keys and values. Default: ``d_model // heads``.
    d_context: width of the keys and values that come in, for cross-attention from another model.
        Default: ``d_model``.
    bias: whether the four projections have biases.
    dropout: on the attention weights, while training.
    qk_norm: normalise queries and keys (root mean square, a learned gain) before they meet.
    rotary: a `Rotary` that rotates queries and keys by their positions.
    window, chunk: restrict attention to positions less than ``window`` away, or to pieces of ``chunk``.
    kernel: see `attention`.

    The projections are ``query``, ``key``, ``value`` and ``output``, plain `nn.Linear` modules; rows
    ``h * d_key`` to ``(h + 1) * d_key`` of ``query.weight`` are head h's. They are initialised so that the
    variance of the output does not depend on the number of heads.

    Examples
    --------
    >>> mha = MultiHeadAttention(64, heads=8)
    >>> x = torch.randn(2, 5, 64)
    >>> mha(x).shape
    torch.Size([2, 5, 64])
    >>> output, weights = mha(x, causal=True, return_weights=True)
    >>> weights.shape
    torch.Size([2, 8, 5, 5])

    See Also
    --------
    attention : the function on tensors that are already split into heads.
    TransformerBlock : attention and a feed-forward network, with norms and residuals.

    References
    ----------
    Vaswani et al. 2017, Attention is all you need.
    Ainslie et al. 2023, GQA: training generalized multi-query transformer models from multi-head checkpoints.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        d_key: int | None = None,
        d_value: int | None = None,
        d_context: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        qk_norm: bool = False,
        rotary: Rotary | None = None,
        window: int | None = None,
        chunk: int | None = None,
        kernel: Kernel = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        d_context = d_model if d_context is None else d_context
        sizes = {"d_model": d_model, "heads": heads, "kv_heads": kv_heads, "d_context": d_context}
        sizes |= {name: size for name, size in (("d_key", d_key), ("d_value", d_value)) if size is not None}
        for name, size in sizes.items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}: expected a whole number of at least 1, got {size!r}")
        if heads % kv_heads:
            raise ValueError(f"kv_heads: {kv_heads} key heads do not divide {heads} heads")
        if (d_key is None or d_value is None) and d_model % heads:
            raise ValueError(
                f"heads: {heads} heads do not divide d_model {d_model}; "
                "choose another number, or give d_key and d_value"
            )
        d_key = d_model // heads if d_key is None else d_key
        d_value = d_model // heads if d_value is None else d_value
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout: expected 0 <= dropout < 1, got {dropout}")
        if rotary is not None and rotary.width > d_key:
            raise ValueError(f"rotary: it rotates {rotary.width} channels, a head has d_key {d_key}")
        joined_mask(None, False, window, chunk)  # raises on a window or chunk below 1
        check_kernel(kernel)
        self.d_model, self.heads, self.kv_heads = d_model, heads, kv_heads
        self.d_key, self.d_value = d_key, d_value
        self.dropout, self.window, self.chunk, self.kernel = dropout, window, chunk, kernel
        options: Keywords = {"bias": bias, "device": device, "dtype": dtype}
        self.query = nn.Linear(d_model, heads * d_key, **options)
        self.key = nn.Linear(d_context, kv_heads * d_key, **options)
        self.value = nn.Linear(d_context, kv_heads * d_value, **options)
        self.output = nn.Linear(heads * d_value, d_model, **options)
        options.pop("bias")
        self.query_norm = nn.RMSNorm(d_key, **options) if qk_norm else None
        self.key_norm = nn.RMSNorm(d_key, **options) if qk_norm else None
        self.rotary = rotary
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weights; biases are zero. See `docs/decisions.md` for why these variances."""
        for projection, gain in ((self.query, 0.5), (self.key, 0.5), (self.value, 1.0), (self.output, 1.0)):
            nn.init.normal_(projection.weight, std=(gain / projection.in_features) ** 0.5)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        mask: Mask | Tensor | None = None,
        *,
        causal: bool = False,
        cache: KVCache | None = None,
        return_weights: bool = False,
        return_statistics: bool | Literal["core", "full"] = False,
    ) -> Any:
        """Attend.

        Parameters
        ----------
        query: (batch, queries, d_model).
        key: (batch, keys, d_context). Default: ``query``.
        value: (batch, keys, d_context). Default: ``key``.
        mask: a `Mask`, or a tensor that broadcasts to (batch, heads, queries, keys): boolean, True may
            attend; floating, added.
        causal: no query sees past its own position; the last query is aligned with the last key.
        cache: keys and values of earlier tokens, grown in place by this call; or what `remember` made.
        return_weights: also return the weights (batch, heads, queries, keys), before dropout.
        return_statistics: also return what `statistics` measures: True or "core", or "full".

        Returns
        -------
        The output (batch, queries, d_model); with ``return_weights`` or ``return_statistics`` a tuple of
        the output, the weights, the statistics, as asked.
        """
        q, k, v = self.project_heads(query, key, value, cache)
        dropout = self.dropout if self.training else 0.0
        options: Keywords = {"mask": mask, "causal": causal, "window": self.window, "chunk": self.chunk}
        extras: Arguments = ()
        if return_weights:
            conditions = check_mask(q, k, **options)
            p = attention_weights(q, k, conditions, self.d_key**-0.5, k.shape[2] - q.shape[2])
            out = F.dropout(p, dropout) @ v.repeat_interleave(self.heads // self.kv_heads, dim=1)
            extras += (p,)
        else:
            out = attention(q, k, v, **options, dropout=dropout, kernel=self.kernel)
        if return_statistics:
            statistics_set = "core" if return_statistics is True else return_statistics
            extras += (statistics(q, k, **options, statistics=statistics_set),)
        output = self.output(out.transpose(1, 2).flatten(2))
        return (output, *extras) if extras else output

    def remember(self, key: Tensor, value: Tensor | None = None) -> KVCache:
        """Project a memory (batch, keys, d_context) once; ``mha(query, cache=...)`` then reads it each step.

        >>> mha = MultiHeadAttention(16, heads=2, d_context=24)
        >>> with torch.no_grad():
        ...     cache = mha.remember(torch.randn(3, 7, 24))
        ...     mha(torch.randn(3, 1, 16), cache=cache).shape
        torch.Size([3, 1, 16])
        """
        if self.rotary is not None:
            raise ValueError("rotary: it rotates by positions in one sequence, but a memory is another one")
        k, v = self.keys_values(key, value, 0)
        cache = KVCache(k.shape[2])
        cache.belongs_to(self)
        cache.append(k, v)
        cache.fixed = True
        return cache

    def project_heads(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each (batch, heads, length, width), those in the cache included."""
        _check("query", query, self.query)
        if cache is not None:
            cache.belongs_to(self)
        fixed = cache is not None and cache.fixed
        start = cache.length if cache is not None and not fixed else 0
        q = self._split(self.query(query), self.query_norm, start)
        if cache is not None and fixed:
            if key is not None:
                raise ValueError(
                    "key: the cache already holds the memory that remember() projected; give one or the other"
                )
            k, v = cache.held()
        else:
            k, v = self.keys_values(query if key is None else key, value, start)
        if k.shape[0] != q.shape[0]:
            raise ValueError(f"key: expected the batch of query, {q.shape[0]}, got {k.shape[0]}")
        if cache is not None and not fixed:
            k, v = cache.append(k, v)
        return q, k, v

    def keys_values(self, key: Tensor, value: Tensor | None, start: int) -> tuple[Tensor, Tensor]:
        """Keys and values (batch, kv_heads, length, width) of what comes in; ``start`` is its position."""
        value = key if value is None else value
        _check("key", key, self.key)
        _check("value", value, self.value)
        batch, length, _ = key.shape
        if value.shape[:2] != key.shape[:2]:
            raise ValueError(
                f"value: expected the batch and length of key, {(batch, length)}, "
                f"got {tuple(value.shape[:2])}"
            )
        v = self.value(value).view(batch, length, self.kv_heads, self.d_value).transpose(1, 2)
        return self._split(self.key(key), self.key_norm, start), v

    def _split(self, x: Tensor, norm: nn.RMSNorm | None, start: int) -> Tensor:
        """(batch, length, heads * d_key) -> (batch, heads, length, d_key), normalised and turned if asked."""
        batch, length, width = x.shape
        x = x.view(batch, length, width // self.d_key, self.d_key)
        if norm is not None:
            dtype = x.dtype
            x = norm(x.to(norm.weight.dtype)).to(dtype)  # under autocast x is narrower than the norm
        x = x.transpose(1, 2)
        return x if self.rotary is None else self.rotary(x, offset=start)

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> MultiHeadAttention:
        """The same function as an `nn.MultiheadAttention`, with copied weights, batch first.

        >>> theirs = nn.MultiheadAttention(16, 4, batch_first=True)
        >>> ours, x = MultiHeadAttention.from_torch(theirs), torch.randn(2, 3, 16)
        >>> torch.allclose(ours(x), theirs(x, x, x)[0], atol=1e-6)
        True
        """
        if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
            raise ValueError(
                "module: add_bias_kv and add_zero_attn have no counterpart in MultiHeadAttention"
            )
        weight = module.out_proj.weight
        options: Keywords = {"device": weight.device, "dtype": weight.dtype}
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

    def to_torch(self) -> nn.MultiheadAttention:
        """The same function as an `nn.MultiheadAttention` (batch_first); ValueError where that cannot be."""
        width = self.d_model // self.heads
        reasons = {
            "kv_heads differ from heads": self.kv_heads != self.heads,
            "d_key or d_value is not d_model / heads": (self.d_key, self.d_value) != (width, width)
            or self.d_model % self.heads,
            "it normalises queries and keys": self.query_norm is not None,
            "it has rotary positions": self.rotary is not None,
            "it has a window or a chunk": self.window is not None or self.chunk is not None,
        }
        obstacles = [reason for reason, applies in reasons.items() if applies]
        if obstacles:
            raise ValueError(f"nn.MultiheadAttention cannot express this module: {'; '.join(obstacles)}")
        weight = self.output.weight
        bias = self.output.bias is not None
        theirs = nn.MultiheadAttention(
            self.d_model, self.heads, self.dropout, bias=bias, kdim=self.key.in_features,
            vdim=self.value.in_features, batch_first=True, device=weight.device, dtype=weight.dtype,
        )  # fmt: skip
        with torch.no_grad():
            for part, projection in zip(_in_weights(theirs), _inputs(self), strict=True):
                part.copy_(projection.weight)
            if theirs.in_proj_bias is not None:
                theirs.in_proj_bias.copy_(torch.cat([projection.bias for projection in _inputs(self)]))
            theirs.out_proj.load_state_dict(self.output.state_dict())
        return theirs.train(self.training)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, kv_heads={self.kv_heads}, d_key={self.d_key}, d_value={self.d_value}"


def _check(name: str, x: Tensor, projection: nn.Linear) -> None:
    width = projection.in_features
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor (batch, length, {width}), got {type(x).__name__}")
    if x.dim() != 3 or x.shape[2] != width:
        raise ValueError(f"{name}: expected (batch, length, {width}), got {tuple(x.shape)}")
    dtype = projection.weight.dtype
    if x.dtype != dtype and not (x.is_floating_point() and torch.is_autocast_enabled(x.device.type)):
        raise TypeError(f"{name}: expected the dtype of the module, {dtype}, got {x.dtype}")


def _inputs(module: MultiHeadAttention) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    return module.query, module.key, module.value


def _in_weights(module: nn.MultiheadAttention) -> tuple[Tensor, ...]:
    """The query, key and value weights, as views, however torch packed them."""
    packed: Tensor | None = module.in_proj_weight
    separate = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
    return separate if packed is None else packed.chunk(3)
