"""Position encodings.

Attention itself does not depend on the order of tokens. Four ways to encode it, all used by `Encoder`,
`Decoder` and `Seq2Seq` through ``positions="sinusoidal" | "learned" | "rotary" | "alibi" | "none"``:

- sinusoidal and learned positions are vectors added to the tokens once, before the first block;
- rotary positions rotate every query and key by an angle that grows with the position (in each attention);
- ALiBi lowers each score by a slope times the distance (`manyheads.mask.alibi`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["LearnedPositions", "Rotary", "SinusoidalPositions", "sinusoidal"]


def sinusoidal(positions: int | Tensor, d_model: int, *, base: float = 10000.0) -> Tensor:
    """Sinusoidal position vectors.

    Channel 2c of position p is sin(p / base^(2c / d_model)), channel 2c + 1 the cosine of the same angle.

    Parameters
    ----------
    positions
        A length, for the positions 0 to length - 1, or a tensor of positions of any shape.
    d_model
        Width of a vector; may be odd.
    base
        The slowest wave is about 2 pi base positions long.

    Returns
    -------
    Tensor
        ``(*positions.shape, d_model)``, float32 (float64 when the positions are float64).

    Examples
    --------
    >>> sinusoidal(5, 4).shape
    torch.Size([5, 4])
    >>> sinusoidal(torch.tensor([[0], [3]]), 4).shape
    torch.Size([2, 1, 4])

    See Also
    --------
    SinusoidalPositions : adds them to tokens.
    LearnedPositions, Rotary : other position encodings.

    References
    ----------
    Vaswani et al. 2017, Attention is all you need.
    """
    if isinstance(positions, Tensor):
        position = positions if positions.is_floating_point() else positions.float()
    else:
        position = torch.arange(positions, dtype=torch.float32)
    angle = position[..., None] * _frequencies((d_model + 1) // 2, d_model, base, position)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)[..., :d_model]


def _frequencies(count: int, width: int, base: float, like: Tensor) -> Tensor:
    """base^(-2c / width) for c = 0 to count - 1, in the dtype and on the device of `like`: (count,)."""
    return base ** (torch.arange(count, dtype=like.dtype, device=like.device) * (-2 / width))


class Rotary(nn.Module):
    """Rotary position embedding: rotates pairs of channels of queries and keys by position times a frequency.

    After rotating both, q_i . k_j depends on the distance i - j only. There are no parameters and no tables:
    the angles are computed when needed, so any length works and nothing has to be saved, moved or converted.

    Parameters
    ----------
    width
        Number of leading channels of a head that rotate (even); channels past it pass through unchanged.
    base
        The slowest pair rotates once in about 2 pi base positions.
    interleaved
        Which channels form a pair: ``False`` pairs c with c + width / 2 (as Llama does), ``True`` pairs 2c
        with 2c + 1 (as GPT-J and the paper do).

    See Also
    --------
    sinusoidal, SinusoidalPositions, LearnedPositions : other position encodings.

    References
    ----------
    Su et al. 2021, RoFormer: enhanced transformer with rotary position embedding.

    Examples
    --------
    >>> rotary = Rotary(8)
    >>> q = torch.randn(2, 3, 5, 8)                  # (batch, heads, length, width)
    >>> rotary(q).shape
    torch.Size([2, 3, 5, 8])
    >>> step = rotary(q[:, :, 4:], offset=4)          # the fifth token alone, as in step by step decoding
    >>> bool(torch.allclose(step, rotary(q)[:, :, 4:]))
    True
    """

    def __init__(self, width: int, base: float = 10000.0, interleaved: bool = False) -> None:
        super().__init__()
        if width < 2 or width % 2:
            raise ValueError(f"width: expected an even number of channels, 2 or more, got {width}")
        if base <= 0:
            raise ValueError(f"base: expected a positive number, got {base}")
        self.width = width
        self.base = base
        self.interleaved = interleaved

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        """Rotate ``x (batch, heads, length, width or more)``; row i is at position ``offset + i``."""
        if x.shape[-1] < self.width:
            raise ValueError(
                f"x: expected at least the {self.width} channels of a head that rotate, got {x.shape[-1]}"
            )
        return self.turned(x, *self.turns(offset, x.shape[-2], x))

    def turns(self, offset: int, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of ``length`` positions from ``offset`` on, (length, width / 2) each."""
        # float32 even for half precision: a bfloat16 angle is off by whole turns past a few hundred positions
        precise = torch.float64 if like.dtype == torch.float64 else torch.float32
        position = torch.arange(length, dtype=precise, device=like.device) + offset
        angle = position[:, None] * _frequencies(self.width // 2, self.width, self.base, position)
        return angle.cos().to(like.dtype), angle.sin().to(like.dtype)

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x (..., length, width or more)`` rotated by what `turns` returned."""
        turning = x[..., : self.width]
        if self.interleaved:
            a, b = turning.unflatten(-1, (-1, 2)).unbind(-1)
            turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
        else:
            a, b = turning.chunk(2, dim=-1)
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        if x.shape[-1] == self.width:
            return turned
        return torch.cat([turned, x[..., self.width :]], dim=-1)

    def extra_repr(self) -> str:
        return f"width={self.width}, base={self.base}, interleaved={self.interleaved}"


class SinusoidalPositions(nn.Module):
    """Adds `sinusoidal` vectors to tokens. No parameters, any length.

    Examples
    --------
    >>> add = SinusoidalPositions(6)
    >>> add(torch.zeros(2, 5, 6)).shape              # (batch, length, d_model)
    torch.Size([2, 5, 6])

    See Also
    --------
    sinusoidal : the vectors.
    LearnedPositions, Rotary : other position encodings.

    References
    ----------
    Vaswani et al. 2017, Attention is all you need.
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.d_model = d_model

    def forward(self, x: Tensor, offset: int = 0, left: Tensor | None = None) -> Tensor:
        """Add positions to ``x (batch, length, d_model)``; see `LearnedPositions.forward`."""
        position = _token_positions(x, offset, left)
        position = position.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        return x + sinusoidal(position, self.d_model).to(x.dtype)


class LearnedPositions(nn.Module):
    """Adds one learned vector per position to tokens, for up to `max_length` positions.

    Parameters
    ----------
    max_length
        How many positions there are; longer input is a ValueError.
    d_model
        Width of a vector.

    Examples
    --------
    >>> add = LearnedPositions(max_length=11, d_model=6)
    >>> add(torch.zeros(2, 5, 6)).shape              # (batch, length, d_model)
    torch.Size([2, 5, 6])
    >>> add.weight.shape
    torch.Size([11, 6])

    See Also
    --------
    SinusoidalPositions, Rotary : other position encodings.

    References
    ----------
    Gehring et al. 2017, Convolutional sequence to sequence learning.
    """

    def __init__(self, max_length: int, d_model: int) -> None:
        super().__init__()
        if max_length < 1:
            raise ValueError(f"max_length: expected at least 1, got {max_length}")
        self.max_length = max_length
        self.weight = nn.Parameter(torch.randn(max_length, d_model) * d_model**-0.5)

    def forward(self, x: Tensor, offset: int = 0, left: Tensor | None = None) -> Tensor:
        """Add positions to ``x (batch, length, d_model)``.

        Row i of a sequence is at position ``offset + i``; with ``left (batch,)``, the first ``left[b]`` rows
        of sequence b are padding and its first token is at position 0.
        """
        if offset + x.shape[1] > self.max_length:
            raise ValueError(
                f"length: expected at most the {self.max_length} learned positions (max_length), "
                f"got {offset + x.shape[1]}"
            )
        if left is None:  # a slice: its gradient is a sum, where that of an index is a scatter
            return x + self.weight[offset : offset + x.shape[1]].to(x.dtype)
        return x + self.weight[_token_positions(x, offset, left)].to(x.dtype)

    def extra_repr(self) -> str:
        return f"max_length={self.max_length}, d_model={self.weight.shape[1]}"


def _token_positions(x: Tensor, offset: int, left: Tensor | None) -> Tensor:
    """The position of every token of x (batch, length, d_model): (length,), or (batch, length) with left."""
    position = torch.arange(x.shape[1], device=x.device) + offset
    return position if left is None else (position - left[:, None]).clamp(min=0)
