"""Attention modules drawn at random: `draw(seed)` gives a module with its truth.

A `Design` says everything about a module: sizes (with coincidences), where its heads stand, which code
multiplies, masks, biases, what happens to the weights, what is done with the outputs. The forward follows the
design through permutations, folds and loops; the truth does the same sums head by head in one fixed order.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tests.zoo.base import Net
from tests.zoo.case import Case, Silent, Truth
from tests.zoo.drawn_code import by_einsum, by_layout, by_loop, pieces_of
from torch import Tensor, nn

LAYOUTS = ("bh", "hb", "fold bh", "fold hb", "split", "one")
LOOPS = ("heads", "heads kept", "batch", "queries")
FUNCTIONS = ("softmax", "exp/sum", "log_softmax", "float64", "sigmoid")
CHANGES = ("top-k", "mask after", "prior", "talking", "scaled")
MASKS = ("causal", "strict", "window", "padding right", "padding left", "head windows")
BIASES = ("alibi", "table", "moved")
JOINS = ("sum", "gate", "norm", "residual", "values")


@dataclass(frozen=True)
class Design:
    """What a drawn module is like; an empty word means the plain thing."""

    heads: int
    kv_heads: int
    width: int
    d_model: int
    batch: int
    length: int
    columns: str  # how heads stand in the projections: "" block by block, "interleaved"
    packed: str  # "", "three" (3, heads, width), "each" (heads, 3, width)
    turns: bool  # head h reads key head h % kv_heads
    code: str  # "fused", "matmul", "einsum", "loop"
    layout: str
    loop: str
    function: str
    change: str
    mask: str
    low: str  # how keys are hidden: "bool", "-inf", "-1e4", "lowest"
    bias: str
    join: str
    cross: int | None  # how many more keys another sequence has; None: the same sequence
    letters: int  # seed of the letters and orders of einsum
    chunk: int  # attention stays inside pieces of so many tokens; 0: everywhere
    pieces: str  # where the pieces are folded into the batch: "outer" before the samples, "inner" behind them


def design(seed: int) -> Design:
    """Draw a design. About half of them have something besides the layout."""
    r = random.Random(seed)
    maybe = lambda options, share: r.choice(options) if r.random() < share else ""  # noqa: E731
    heads, width = r.choice([2, 3, 4, 4, 5, 6]), r.randint(3, 7)
    batch, length = r.randint(1, 5), r.randint(4, 13)
    same = r.random()
    if same < 0.15:
        batch = heads
    elif same < 0.25:
        length = max(heads, 3)
    elif same < 0.32:
        width = length = max(width, 4)
    elif same < 0.37:
        batch = length = heads
    divisors = [n for n in range(1, heads) if heads % n == 0]
    kv_heads = r.choice(divisors) if r.random() < 0.25 else heads
    code = r.choice(["fused", "matmul", "matmul", "einsum", "loop"])
    function = r.choice(FUNCTIONS) if code != "fused" and r.random() < 0.35 else "softmax"
    layout = r.choice(LAYOUTS)
    if layout == "split" and heads % 2:
        layout = "bh"
    plain = code != "fused" and function == "softmax"
    change = maybe(CHANGES, 0.25) if plain and code in ("matmul", "einsum") else ""
    mask = maybe(MASKS, 0.5) if change != "prior" else ""  # a prior shows what a mask has hidden
    cross = r.choice([0, 0, 3, -2]) if not mask and not change and r.random() < 0.2 else None
    packed = r.choice(["three", "each"]) if kv_heads == heads and cross is None and r.random() < 0.3 else ""
    columns = "interleaved" if not packed and kv_heads == heads and r.random() < 0.25 else ""
    low = r.choice(["bool", "-inf", "-1e4", "lowest"])
    if mask == "strict" or function == "sigmoid":
        low = "-inf"
    bias = maybe(BIASES, 0.3) if cross is None else ""
    if bias == "moved" and (change == "top-k" or function == "sigmoid"):  # float32 leaves ties, or nothing
        bias = ""
    chunk = 0
    if not mask and not change and cross is None and r.random() < 0.25:
        chunk = r.choice([2, 3, 4, heads])
        length = chunk * r.choice([2, 3, heads, batch + 1])
    return Design(
        heads, kv_heads, width, r.choice([heads * width, 23, 29]), batch, length, columns, packed,
        r.random() < 0.5, code, layout, r.choice(LOOPS), function, change, mask, low, bias, maybe(JOINS, 0.3),
        cross, r.randint(0, 10**6), chunk, r.choice(["outer", "inner"]),
    )  # fmt: skip


class Drawn(nn.Module):
    """The module of a design."""

    def __init__(self, design: Design) -> None:
        super().__init__()
        self.design = d = design
        self.heads, self.kv_heads, self.width = d.heads, d.kv_heads, d.width
        inner, keys = d.heads * d.width, d.kv_heads * d.width
        if d.packed:
            self.qkv = nn.Linear(d.d_model, 3 * inner)
        else:
            self.q, self.k, self.v = (nn.Linear(d.d_model, n) for n in (inner, keys, keys))
        self.o = nn.Linear(inner, d.d_model)
        self.gate, self.norm = nn.Linear(d.d_model, d.heads), nn.LayerNorm(inner)
        self.slopes = nn.Buffer(torch.rand(d.heads))
        self.table = nn.Parameter(torch.randn(d.heads, 256))
        self.prior = nn.Parameter(2 * torch.randn(d.heads, d.length, d.length))
        self.mix = nn.Parameter(torch.eye(d.heads) + 0.5 * torch.rand(d.heads, d.heads))
        self.windows = nn.Buffer(torch.arange(d.heads) + 2)
        with torch.no_grad():
            for f in (self.qkv,) if d.packed else (self.q, self.k):
                f.weight.mul_(2.2)

    def projected(self, x: Tensor, context: Tensor) -> list[Tensor]:
        """Queries, keys and values (batch, length, heads or kv_heads, width)."""
        d = self.design
        if d.packed == "three":
            return list(self.qkv(x).unflatten(-1, (3, self.heads, self.width)).unbind(2))
        if d.packed == "each":
            return list(self.qkv(x).unflatten(-1, (self.heads, 3, self.width)).unbind(3))
        three = self.q(x), self.k(context), self.v(context)
        if d.columns:
            return [t.unflatten(-1, (self.width, -1)).transpose(2, 3) for t in three]
        return [t.unflatten(-1, (-1, self.width)) for t in three]

    def hidden(self, length: int, keys: int, real: Tensor | None) -> Tensor | None:
        """True where a key is hidden: a shape that broadcasts to (batch, heads, length, keys)."""
        i, j, kind = torch.arange(length)[:, None], torch.arange(keys), self.design.mask
        if real is not None:
            return ~real[:, None, None, :]
        if not kind:
            return None
        if kind == "head windows":
            return ((i - j).abs() >= self.windows[:, None, None])[None]
        return {"causal": j > i, "strict": j >= i, "window": (i - j).abs() > 2}[kind][None, None]

    def added(self, length: int) -> Tensor | None:
        """(heads, length, length) to add to the scores."""
        i, kind = torch.arange(length), self.design.bias
        if kind == "alibi":
            return -self.slopes[:, None, None] * (i[:, None] - i).abs()
        if kind == "table":
            return self.table[:, (i[:, None] - i + 128).clamp(0, 255)]
        return torch.full((self.heads, 1, 1), -7000.0, dtype=self.o.weight.dtype) if kind else None

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        d = self.design
        real = more[0] if d.mask.startswith("padding") else None
        context = more[0] if d.cross is not None else x
        q, k, v = self.projected(x, context)
        raw = v
        if self.kv_heads < self.heads:
            n = self.heads // self.kv_heads
            k, v = (t.repeat(1, 1, n, 1) if d.turns else t.repeat_interleave(n, 2) for t in (k, v))
        hidden, added = self.hidden(x.shape[1], context.shape[1], real), self.added(d.chunk or x.shape[1])
        o = self.run(*(t.transpose(1, 2) for t in (q, k, v)), hidden, added)  # (batch, heads, length, width)
        return self.join(x, o, raw)

    def run(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, added: Tensor | None) -> Tensor:
        run = {"einsum": by_einsum, "loop": by_loop}.get(self.design.code, by_layout)
        if not self.design.chunk:
            return run(self, q, k, v, hidden, added)
        batch, pieces = len(q), 0 if self.design.pieces == "outer" else 1
        q, k, v = (t.unflatten(2, (-1, self.design.chunk)).movedim(2, pieces) for t in (q, k, v))
        o = run(self, *(t.flatten(0, 1) for t in (q, k, v)), None, added)
        o = o.unflatten(0, (-1, batch) if pieces == 0 else (batch, -1))
        return o.movedim(pieces, 2).flatten(2, 3)

    def join(self, x: Tensor, o: Tensor, v: Tensor) -> Tensor:
        d = self.design
        if d.join == "sum":  # of what each head's columns of the projection make
            weight = self.o.weight.unflatten(1, (self.heads, self.width))
            if d.columns:
                weight = self.o.weight.unflatten(1, (self.width, self.heads)).transpose(1, 2)
            return sum((o[:, h] @ weight[:, h].T for h in range(self.heads)), start=self.o.bias)
        if d.join == "gate":
            o = o * self.gate(x).sigmoid().mT.unsqueeze(-1)
        merged = (o.permute(0, 2, 3, 1) if d.columns else o.transpose(1, 2)).flatten(2)
        if d.join == "norm":
            merged = self.norm(merged)
        if d.join == "values" and d.cross is None and self.kv_heads == self.heads:
            merged = merged + (v.transpose(2, 3) if d.columns else v).flatten(2)
        return self.o(merged) + (x if d.join == "residual" else 0.0)

    def example(self, batch: int, length: int) -> Any:
        d = self.design
        x = torch.randn(batch, length, d.d_model)
        if d.cross is not None:
            return x, torch.randn(batch, length + d.cross, d.d_model)
        if d.mask.startswith("padding"):
            i, cut = torch.arange(length), 1 + torch.arange(batch)[:, None] % 3
            return x, i < length - cut + 1 if d.mask.endswith("right") else i >= cut - 1
        return x

    def plain(self, inputs: Any, silent: Silent) -> tuple[Tensor, list[Truth]]:
        """The truth: head by head, in one order."""
        d = self.design
        x, *more = inputs if isinstance(inputs, tuple) else (inputs,)
        context = more[0] if d.cross is not None else x
        real = more[0] if d.mask.startswith("padding") else None
        q, k, v = self.projected(x, context)
        weights, values = [], []
        hidden, added = self.hidden(x.shape[1], context.shape[1], real), self.added(x.shape[1])
        if d.chunk:
            piece = torch.arange(x.shape[1]) // d.chunk
            hidden = (piece != piece[:, None])[None, None]
        for h in range(d.heads):
            g = h % d.kv_heads if d.turns else h * d.kv_heads // d.heads
            s = q[:, :, h] @ k[:, :, g].mT * d.width**-0.5
            s = s if added is None else s + added[h]
            if hidden is not None and d.change != "mask after":
                s = s.masked_fill(hidden[:, h if hidden.shape[1] > 1 else 0], -torch.inf)
            weights.append(s)
            values.append(v[:, :, g])
        p = self.true_weights(torch.stack(weights, 1), hidden)
        given = torch.stack([p[:, h] @ values[h] for h in range(d.heads)], 1)
        kinds = ("self",) if bool(p.triu(1).any()) else ("causal",)
        own = torch.arange(x.shape[1])
        if d.cross is not None:
            kinds, own = ("cross",), None
        shown = None if d.change else hidden  # what is changed afterwards has the keys that keep a weight
        truth = Truth("attn", p, kinds, own, real, given.clone(), hidden=shown)
        if d.chunk:
            truth.outputs, truth.vague = None, True
            truth.views = pieces_of(p, d.chunk)
        for h in silent.get(0, ()):
            given[:, h] = 0.0
        return self.join(x, given, v), [truth]

    def true_weights(self, s: Tensor, hidden: Tensor | None) -> Tensor:
        d = self.design
        if d.function == "sigmoid":
            return s.sigmoid()
        e = (s - s.amax(-1, keepdim=True).nan_to_num(neginf=0.0)).exp()
        p = e / e.sum(-1, keepdim=True).clamp(min=1e-300)
        if d.change == "top-k":
            p = p * (p.argsort(dim=-1, descending=True, stable=True).argsort(-1) < 2)
        elif d.change == "mask after" and hidden is not None:
            p = p * ~hidden
            p = p / p.sum(-1, keepdim=True).clamp(min=1e-30)
        elif d.change == "prior" and s.shape[-1] == d.length:
            p = 0.4 * p + 0.6 * self.prior.softmax(-1)
        elif d.change == "talking":
            mix = self.mix / self.mix.sum(1, keepdim=True)
            p = torch.stack([sum(mix[g, h] * p[:, h] for h in range(d.heads)) for g in range(d.heads)], 1)
        elif d.change == "scaled":
            p = p * 1.5
        return p


def words(chosen: Design) -> dict[str, Any]:
    """What matters of a design, by name."""
    unused = {"letters"} if chosen.chunk else {"letters", "chunk", "pieces"}
    unused |= set() if chosen.code in ("fused", "matmul") else {"layout"}
    unused |= set() if chosen.code == "loop" else {"loop"}
    unused |= set() if chosen.mask else {"low"}
    unused |= set() if chosen.kv_heads < chosen.heads else {"turns", "kv_heads"}
    return {
        name: value
        for name, value in asdict(chosen).items()
        if value not in ("", None) and name not in unused
    }


def draw(seed: int) -> Case:
    """The module that this seed stands for, with its truth."""
    chosen = design(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = Drawn(chosen)
        inputs = module.example(chosen.batch, chosen.length)
        longer = None if chosen.change == "prior" else module.example(2, 12 * chosen.chunk or 61)
    name = f"{seed}: " + " ".join(f"{word}={value}" for word, value in words(chosen).items())
    group = range(chosen.heads // chosen.kv_heads)
    heads = [h * chosen.kv_heads for h in group] if chosen.turns else list(group)
    cut = frozenset({1}) if chosen.kv_heads == chosen.heads else frozenset(heads)
    if chosen.kv_heads == 1:
        cut = frozenset({1})

    def plain(net: Any, given: Any, silent: Silent) -> tuple[Tensor, list[Truth]]:
        return net.attn.plain(given, silent)

    return Case(name, "drawn", Net(module).eval(), inputs, plain, longer, {0: cut})
