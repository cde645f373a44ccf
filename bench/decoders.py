"""Whole language models of others, and ours, behind one call: `build(name, shape)(ids) -> logits`.

All are the GPT-2 of their library: pre-norm, GELU, learned positions, the output tied to the embedding.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

OURS = "manyheads"
BIASED = "manyheads, biases"
NANO = "nanoGPT-like"
GPT2 = "transformers GPT-2"
X_TRANSFORMERS = "x-transformers"
BUILT_ALIKE = {NANO: OURS, X_TRANSFORMERS: OURS, GPT2: BIASED}  # which of ours has the peer's parameters


@dataclass(frozen=True)
class Shape:
    """A language model: its sizes, and the dropout of its training."""

    width: int
    heads: int
    layers: int
    context: int
    vocabulary: int = 65
    dropout: float = 0.0

    def __str__(self) -> str:
        return f"{self.layers} layers, {self.heads} heads, width {self.width}"


class PackedAttention(nn.Module):
    """Causal attention as nanoGPT has it: one projection for queries, keys and values, torch's kernel."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.rate = shape.heads, shape.dropout
        self.inputs = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.output = nn.Linear(shape.width, shape.width, bias=False)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.inputs(x).split(width, 2)
        )
        rate = self.rate if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        return self.dropout(self.output(out.transpose(1, 2).contiguous().view(batch, length, width)))


class PackedBlock(nn.Module):
    """Pre-norm attention, then a feed-forward network four times as wide."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = PackedAttention(shape)
        self.feed_forward_norm = nn.LayerNorm(width, bias=False)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
            nn.Dropout(shape.dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Nano(nn.Module):
    """The structure of nanoGPT's model with ``bias=False``, its default, written anew."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(PackedBlock(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        for block in self.blocks:
            for last in (block.attention.output, block.feed_forward[2]):
                nn.init.normal_(last.weight, std=0.02 / (2 * shape.layers) ** 0.5)

    def forward(self, ids: Tensor) -> Tensor:
        position = torch.arange(ids.shape[1], device=ids.device)
        x = self.dropout(self.tokens(ids) + self.positions(position))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def _transformers(shape: Shape) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), shape.dropout)
    config = GPT2Config(
        vocab_size=shape.vocabulary, n_positions=shape.context, n_embd=shape.width, n_layer=shape.layers,
        n_head=shape.heads, activation_function="gelu", use_cache=False, bos_token_id=0, eos_token_id=None,
        attn_implementation="sdpa", **rates,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def _x_transformers(shape: Shape) -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(
        dim=shape.width, depth=shape.layers, heads=shape.heads, attn_dim_head=shape.width // shape.heads,
        attn_flash=True, attn_dropout=shape.dropout, ff_dropout=shape.dropout, ff_no_bias=True,
    )  # fmt: skip
    return TransformerWrapper(
        num_tokens=shape.vocabulary, max_seq_len=shape.context, attn_layers=layers, tie_embedding=True,
        emb_dropout=shape.dropout,
    )  # fmt: skip


def _manyheads(shape: Shape, bias: bool) -> nn.Module:
    from manyheads.nn.transformers import Decoder

    return Decoder(
        shape.width, heads=shape.heads, layers=shape.layers, vocabulary=shape.vocabulary, positions="learned",
        max_length=shape.context, bias=bias, dropout=shape.dropout, attention_dropout=shape.dropout,
        hidden_dropout=0.0,
    )  # fmt: skip


BUILDERS: dict[str, Callable[[Shape], nn.Module]] = {
    OURS: lambda shape: _manyheads(shape, bias=False),
    BIASED: lambda shape: _manyheads(shape, bias=True),
    NANO: Nano,
    GPT2: _transformers,
    X_TRANSFORMERS: _x_transformers,
}


def build(name: str, shape: Shape) -> nn.Module:
    """A model from ids (batch, length) to logits (batch, length, vocabulary); some return an object."""
    torch.manual_seed(0)
    return BUILDERS[name](shape)


def step(name: str, shape: Shape, batch: int, compiled: bool = False) -> Callable[[], float]:
    """One update of a model on random ids (batch, context): loss, gradient, clipping, AdamW."""
    model = build(name, shape).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    called = torch.compile(model) if compiled else model
    ids = torch.randint(shape.vocabulary, (batch, shape.context + 1))
    read, labels = ids[:, :-1].contiguous(), ids[:, 1:].flatten()

    def update() -> float:
        logits = called(read)
        logits = getattr(logits, "logits", logits)
        loss = F.cross_entropy(logits.flatten(0, 1), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return update
