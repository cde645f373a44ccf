"""NoHeads: the module in the place of an attention module that lost all its heads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypedDict

import torch
from torch import Tensor, nn

from manyheads.common.compare_outputs import Captured
from manyheads.models.per_head_inputs import arguments
from manyheads.nn.cache import KVCache


class Options(TypedDict):
    """The arguments of `NoHeads`, as they are saved."""

    argument: str | int
    width: int
    outputs: int
    bias: bool
    layer: int | None
    batch_first: bool
    residual: str | int | None


class NoHeads(nn.Module):
    """The output of attention without heads: the bias of its output projection, or zeros.

    Parameters
    ----------
    argument: position or name of the argument (..., length, width) that has the length of the output.
    width: of the output; 0 where the output projection is in another module.
    outputs: length of the tuple that the module returns, the output first, None for the others; 0 for none.
    bias: whether the output projection had one.
    layer: the layer's number in a cache of transformers. Models read the number of past positions off the
        first layer's keys, so this one leaves a mark there.
    batch_first: of an nn.MultiheadAttention that this was.
    residual: position or name of an argument that the module adds to its output, as Bloom's does.

    Examples
    --------
    >>> layer = NoHeads(argument=0, width=6, outputs=2, bias=False)
    >>> output, weights = layer(torch.randn(2, 5, 4))
    >>> output.shape, weights
    (torch.Size([2, 5, 6]), None)
    """

    # What nn.TransformerEncoderLayer checks before it takes its fast path, which would not call this.
    _qkv_same_embed_dim = False
    in_proj_weight = in_proj_bias = None
    num_heads = heads = 0

    def __init__(
        self,
        argument: str | int,
        width: int,
        outputs: int,
        bias: bool,
        layer: int | None = None,
        batch_first: bool = True,
        residual: str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.argument, self.width, self.outputs = argument, width, outputs
        self.layer, self.batch_first, self.residual = layer, batch_first, residual
        self.bias = nn.Parameter(torch.zeros(width, dtype=dtype)) if bias else None

    def options(self) -> Options:
        """The arguments that make it again."""
        return {
            "argument": self.argument, "width": self.width, "outputs": self.outputs,
            "bias": self.bias is not None, "layer": self.layer, "batch_first": self.batch_first,
            "residual": self.residual,
        }  # fmt: skip

    def forward(self, *args: object, **kwargs: object) -> Tensor | tuple[Tensor | None, ...]:
        """The output for any arguments of the module."""
        received = dict(arguments(args, kwargs))
        x = received[self.argument]
        assert isinstance(x, Tensor)
        self._mark(x, received.values())
        shape = (*x.shape[:-1], self.width)
        output = x.new_zeros(shape) if self.bias is None else self.bias.expand(shape)
        if self.residual is not None:
            residual = received[self.residual]
            assert isinstance(residual, Tensor)
            output = output + residual
        return (output, *[None] * (self.outputs - 1)) if self.outputs else output

    def _mark(self, x: Tensor, received: Iterable[object]) -> None:
        mark = x.new_zeros(x.shape[0], 1, x.shape[-2], 1)
        for value in received:
            cache = getattr(value, "self_attention_cache", value)
            if isinstance(cache, KVCache):
                if not cache.fixed:
                    cache.append(mark, mark)
            elif self.layer is not None and hasattr(cache, "update") and hasattr(cache, "get_seq_length"):
                cache.update(mark, mark, self.layer)


def emptied(module: nn.Module, call: Captured, inside: bool, cross: bool, width: int) -> NoHeads:
    """The module that replaces one whose heads all go.

    call: a call of the module with its heads silent.
    inside: whether the output projection is in this module.
    cross: whether it attends to another sequence, which no cache of ours marks.
    width: of all heads' outputs together.
    """
    outputs = call.output if isinstance(call.output, tuple | list) else None
    output = call.output if outputs is None else outputs[0]
    if not isinstance(output, Tensor):
        raise ValueError(
            f"heads: cannot remove all heads of a {type(module).__name__} that returns no tensor"
        )
    argument, residual = _length_of(call, output.shape[:-1]), None
    is_constant = inside or not bool(output.any())
    row = output.reshape(-1, output.shape[-1])[0]
    if inside and not bool((output == row).all()):
        residual, row = _residual_and_bias(call, output)
        is_constant = residual is not None
    if argument is None or not is_constant or (not inside and output.shape[-1] != width):
        raise ValueError(
            f"heads: cannot remove all heads of {type(module).__name__}, which returns more than that; "
            "leave one"
        )
    number = getattr(module, "layer_idx", None)
    stub = NoHeads(
        argument,
        width=output.shape[-1] if inside else 0,
        outputs=0 if outputs is None else len(outputs),
        bias=inside and bool(row.any()),
        layer=number if isinstance(number, int) and not cross else None,
        batch_first=getattr(module, "batch_first", True),
        residual=residual,
        dtype=output.dtype,
    )
    if stub.bias is not None:
        with torch.no_grad():
            stub.bias.copy_(row)
    return stub.to(output.device).train(module.training)


def _residual_and_bias(call: Captured, output: Tensor) -> tuple[str | int | None, Tensor]:
    """The argument that a module adds to the bias of its output projection, and that bias."""
    for argument, value in arguments(call.args, call.kwargs):
        if isinstance(value, Tensor) and value.shape == output.shape:
            rows = (output - value).reshape(-1, output.shape[-1])
            if torch.allclose(rows, rows[:1].expand_as(rows), atol=1e-6 * float(output.abs().max())):
                mean = rows.mean(0)
                return argument, mean if float(mean.abs().max()) > 1e-6 else torch.zeros_like(mean)
    return None, output


def _length_of(call: Captured, shape: Sequence[int]) -> str | int | None:
    """The first argument of this shape but for its width."""
    for argument, value in arguments(call.args, call.kwargs):
        if isinstance(value, Tensor) and value.is_floating_point() and value.shape[:-1] == tuple(shape):
            return argument
    return None
