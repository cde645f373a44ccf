"""Operators that show nothing of what they do: what is not seen must be named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.zoo.base import Attention, add, zoo
from tests.zoo.case import Silent, Truth
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

THEME = "opaque"


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]
    return out


def math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = torch.ops.aten._scaled_dot_product_attention_math(q, k, v)[0]
    return out


@torch.library.custom_op("zoo::attend", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v).contiguous()


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.empty_like(q)


class ByOperator(Attention):
    def __init__(self, operator: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        self.__dict__["operator"] = operator
        super().__init__()

    def __deepcopy__(self, memo: dict[int, Any]) -> ByOperator:
        copied = ByOperator(self.__dict__["operator"])
        copied.load_state_dict(self.state_dict())
        return copied.to(self.q.weight.dtype).train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        return self.o(self.__dict__["operator"](q, k, v).transpose(1, 2).flatten(2))


def half(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two heads that are seen, two that are not."""
    seen = F.scaled_dot_product_attention(q[:, :2], k[:, :2], v[:, :2])
    return torch.cat([seen, flash(q[:, 2:], k[:, 2:], v[:, 2:])], 1)


def no_function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Somebody switches torch functions off around the product."""
    with torch._C.DisableTorchFunction():
        return (torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v).clone()


class OwnFunction(torch.autograd.Function):
    """A backward of one's own: forward runs inside apply."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # type: ignore[override]
        a = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1)
        ctx.save_for_backward(q, k, v, a)
        return a @ v

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        q, k, v, a = ctx.saved_tensors
        da = grad @ v.mT
        ds = a * (da - (da * a).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        return ds @ k, ds.mT @ q, a.mT @ grad


def by_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Flash attention in Python: a running maximum over blocks of keys."""
    out, total = torch.zeros_like(q), q.new_zeros(*q.shape[:-1], 1)
    largest = q.new_full(total.shape, -torch.inf)
    for start in range(0, k.shape[2], 4):
        s = q @ k[:, :, start : start + 4].mT * q.shape[-1] ** -0.5
        new = torch.maximum(largest, s.amax(-1, keepdim=True))
        p = (s - new).exp()
        old = (largest - new).exp()
        total, out, largest = (
            total * old + p.sum(-1, keepdim=True),
            out * old + p @ v[:, :, start : start + 4],
            new,
        )
    return out / total


def query_by_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A loop over the queries, causal by the length of the keys."""
    rows = [torch.softmax(q[:, :, i : i + 1] @ k.mT * q.shape[-1] ** -0.5, -1) @ v for i in range(q.shape[2])]
    return torch.cat(rows, 2)


def sliced(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention slicing of diffusers: (batch * heads) a few at a time, into an empty tensor."""
    fold = [t.reshape(-1, *t.shape[2:]) for t in (q, k, v)]
    out = torch.zeros_like(fold[0])
    for start in range(0, len(out), 3):
        a, b, c = (t[start : start + 3] for t in fold)
        out[start : start + 3] = (
            torch.baddbmm(a.new_empty(1, 1, 1), a, b.mT, beta=0, alpha=q.shape[-1] ** -0.5).softmax(-1) @ c
        )
    return out.view_as(q)


def vmapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.T * q.shape[-1] ** -0.5).softmax(-1) @ v

    return torch.vmap(torch.vmap(one))(q, k, v)


def scripted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-2, -1)) * q.size(-1) ** -0.5, -1), v)


OPERATORS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "aten flash op": flash,
    "aten math op": math,
    "a custom operator of torch.library": attend,
    "half fused, half aten flash op": half,
    "torch functions switched off": no_function,
    "an autograd function": OwnFunction.apply,
    "flash attention in Python": by_blocks,
    "a loop over the queries": query_by_query,
    "sliced (diffusers)": sliced,
    "vmap over samples and heads": vmapped,
    "checkpointed": lambda q, k, v: checkpoint(F.scaled_dot_product_attention, q, k, v, use_reentrant=False),
}
for name, operator in OPERATORS.items():
    add(THEME, name, lambda operator=operator: ByOperator(operator))


class Scripted(Attention):
    """torch.jit.script helpers are compiled when the case is made."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        return self.o(compiled(scripted)(q, k, v).transpose(1, 2).flatten(2))


def compiled(function: Callable[..., Tensor], cache: dict[str, Any] = {}) -> Any:  # noqa: B006
    if function.__name__ not in cache:
        cache[function.__name__] = torch.jit.script(function)
    return cache[function.__name__]


add(THEME, "a jit.script helper", Scripted)


@zoo(THEME, "jagged tensors", longer=None)
class Jagged(Attention):
    """Sequences of several lengths without padding, as a nested tensor."""

    vague = True

    def forward(self, x: Tensor) -> Tensor:
        lengths = [x.shape[1] - 2 * i for i in range(len(x))]
        nested = torch.nested.nested_tensor(
            [t[:n] for t, n in zip(x, lengths, strict=True)], layout=torch.jagged
        )
        q, k, v = (
            f(nested).unflatten(-1, [self.heads, self.width]).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        o = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        return self.o(o).to_padded_tensor(0.0)

    def plain(self, x: Tensor, silent: Silent) -> tuple[Tensor, list[Truth]]:
        weights = x.new_zeros(len(x), self.heads, x.shape[1], x.shape[1])
        counted = torch.zeros(len(x), x.shape[1], dtype=torch.bool)
        out = torch.zeros_like(x)
        for i in range(len(x)):
            n = x.shape[1] - 2 * i
            one = x[i : i + 1, :n]
            weights[i : i + 1, :, :n, :n], counted[i, :n] = self.true_weights(one), True
            given = weights[i : i + 1, :, :n, :n] @ self.true_values(one)
            for h in silent.get(0, ()):
                given[:, h] = 0.0
            out[i, :n] = self.true_join(one, given)[0]
        return out, [Truth("attn", weights, own=torch.arange(x.shape[1]), counted=counted)]


class TorchEncoder(nn.Module):
    """nn.TransformerEncoder with its native fast path, in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(20, 4, 31, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def example(self, batch: int, length: int) -> Any:
        return torch.randn(batch, length, 20), torch.arange(length) >= length - torch.arange(batch)[:, None]

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.encoder(x, src_key_padding_mask=padding).masked_fill(padding.unsqueeze(-1), 0.0)

    def plain(self, inputs: Any, silent: Silent) -> tuple[Tensor, list[Truth]]:
        (x, padding), truths = inputs, []
        for n, layer in enumerate(self.encoder.layers):
            m = layer.self_attn
            q, k, v = (
                x @ w.T + b for w, b in zip(m.in_proj_weight.chunk(3), m.in_proj_bias.chunk(3), strict=True)
            )
            q, k, v = (torch.stack(t.split(5, -1), 1) for t in (q, k, v))
            weights = (q @ k.mT / 5**0.5).masked_fill(padding[:, None, None], -torch.inf).softmax(-1)
            given = weights @ v
            path = f"attn.encoder.layers.{n}.self_attn"
            truths.append(
                Truth(path, weights, own=torch.arange(x.shape[1]), counted=~padding, outputs=given.clone())
            )
            for h in silent.get(n, ()):
                given[:, h] = 0.0
            x = layer.norm1(x + m.out_proj(torch.cat(given.unbind(1), -1)))
            x = layer.norm2(x + layer.linear2(layer.linear1(x).relu()))
        return x.masked_fill(padding.unsqueeze(-1), 0.0), truths


add(THEME, "nn.TransformerEncoder, nested fast path", TorchEncoder)
