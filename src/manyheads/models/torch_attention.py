"""TorchAttention: the replacement of an nn.MultiheadAttention whose heads were changed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from manyheads.nn.mask import Mask, as_mask
from manyheads.nn.multihead import MultiHeadAttention


class TorchAttention(MultiHeadAttention):
    """`MultiHeadAttention` with the call signature of `nn.MultiheadAttention`, and fewer or more heads.

    Masks are torch's: True hides. An ``attn_mask`` (batch * heads, queries, keys) is for the original heads;
    the parts of those that were cut are ignored, and an added head has that of the head it was added behind.

    Examples
    --------
    >>> theirs = nn.MultiheadAttention(6, num_heads=2, batch_first=True)
    >>> x = torch.randn(3, 5, 6)
    >>> torch.allclose(TorchAttention.like(theirs)(x, x, x)[0], theirs(x, x, x)[0], atol=1e-6)
    True
    """

    # What nn.TransformerEncoderLayer checks before it takes its fast path, which would not call this.
    _qkv_same_embed_dim = False
    in_proj_weight = in_proj_bias = None

    batch_first: bool
    _heads_before: int
    kept: list[int]

    @classmethod
    def like(cls, module: nn.Module) -> TorchAttention:
        """The same function as an `nn.MultiheadAttention`."""
        if not isinstance(module, nn.MultiheadAttention):
            raise TypeError(f"module: expected nn.MultiheadAttention, got {type(module).__name__}")
        ours = MultiHeadAttention.from_torch(module)
        ours.__class__ = cls
        assert isinstance(ours, TorchAttention)
        ours.batch_first, ours._heads_before = module.batch_first, module.num_heads
        ours.kept = list(range(module.num_heads))
        return ours

    @property
    def num_heads(self) -> int:
        """The number of heads, by torch's name."""
        return self.heads

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As `nn.MultiheadAttention.forward`. ``is_causal`` is a hint beside a mask, as it is there."""
        single = query.dim() == 2
        axis = 0 if single else 1
        if single or not self.batch_first:
            query, key, value = (x.unsqueeze(0) if single else x.transpose(0, 1) for x in (query, key, value))
        mask = self._mask(query.shape[0], key_padding_mask, attn_mask)
        output = super().forward(query, key, value, mask, return_weights=need_weights)
        weights = None
        if need_weights:
            output, weights = output
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights.squeeze(0) if single else weights
        if single or not self.batch_first:
            output = output.squeeze(0) if single else output.transpose(0, axis)
        return output, weights

    def _mask(self, batch: int, padding: Tensor | None, mask: Tensor | None) -> Mask:
        """Torch's two masks as one of ours."""
        conditions = Mask()
        if padding is not None:
            padding = padding if padding.dim() == 2 else padding.unsqueeze(0)
            conditions = conditions & as_mask(_allowed(padding)[:, None, None])
        if mask is not None:
            if mask.dim() == 3:
                mask = mask.view(batch, self._heads_before, *mask.shape[1:])
                mask = mask.index_select(1, torch.tensor(self.kept, device=mask.device))
            conditions = conditions & as_mask(_allowed(mask))
        return conditions


def _allowed(mask: Tensor) -> Tensor:
    return ~mask if mask.dtype == torch.bool else mask
