"""Attention in blocks and windows, of pooled queries, and to several sets of keys at once: the right heads,
the numbers of the materialised weights, and no positions where there are none.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.helpers.models import oracle
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.heads.call_statistics import FULL, OF_ONE_SEQUENCE, OF_WHOLE_KEYS
from manyheads.heads.maps import maps
from manyheads.heads.silence import silence
from manyheads.heads.watch import watch

BATCH, HEADS, WIDTH, BLOCK, BLOCKS, GLOBAL = 5, 3, 7, 11, 2, 13
LENGTH = BLOCK * BLOCKS - 3  # the last block is not full
D_MODEL = HEADS * WIDTH


class Blocked(nn.Module):
    """Attention in blocks by one of the functions below, which gives (batch, length, d_model) and keeps in
    ``self.kept`` the weights and outputs (batch * blocks, heads, queries, ...) of each head, with who counts.
    """

    def __init__(self, core: Callable[..., Tensor], named: bool) -> None:
        super().__init__()
        self.packed, self.proj = nn.Linear(D_MODEL, 3 * D_MODEL), nn.Linear(D_MODEL, D_MODEL)
        self.extra = nn.Linear(D_MODEL, 3 * D_MODEL)
        self.core = core
        if named:
            self.num_heads = HEADS
        self.kept: tuple[Tensor, Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, WIDTH)) for part in self.packed(x).chunk(3, -1))
        return self.proj(self.core(self, q, k, v)[:, : x.shape[1]])

    def keep(self, weights: Tensor, output: Tensor, counted: Tensor | None = None) -> None:
        """Of shapes (batch, blocks, heads, queries, keys or width) and (batch, blocks, queries)."""
        if counted is None:
            counted = torch.ones(weights.shape[0], weights.shape[1], weights.shape[3], dtype=torch.bool)
        self.kept = weights.flatten(0, 1), output.flatten(0, 1), counted.flatten(0, 1)


def in_blocks(x: Tensor) -> Tensor:
    """(batch, length, ...) to (batch, blocks, block, ...), filled up with zeros."""
    filled = F.pad(x, (0, 0) * (x.dim() - 2) + (0, BLOCK * BLOCKS - x.shape[1]))
    return filled.unflatten(1, (BLOCKS, BLOCK))


def real(beyond: int = 0) -> Tensor:
    """(blocks + 2 * beyond, block): which places hold a token; so many empty blocks on either side."""
    there = torch.arange(BLOCK * BLOCKS).view(BLOCKS, BLOCK) < LENGTH
    return F.pad(there, (0, 0, beyond, beyond))


def windows_after_heads(self: Blocked, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (
        in_blocks(x).permute(0, 3, 1, 2, 4) for x in (q, k, v)
    )  # (batch, heads, windows, block, width)
    weights = (q @ k.mT * WIDTH**-0.5).softmax(-1)
    out = weights @ v
    self.keep(weights.transpose(1, 2), out.transpose(1, 2))
    return out.permute(0, 2, 3, 1, 4).flatten(3).flatten(1, 2)


def windows_before_heads(self: Blocked, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (in_blocks(x).transpose(2, 3).contiguous() for x in (q, k, v))
    weights = (q @ k.mT * WIDTH**-0.5).softmax(-1)
    out = weights @ v
    self.keep(weights, out)
    return out.transpose(2, 3).flatten(3).flatten(1, 2)


def with_neighbours(self: Blocked, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each block reads itself and the blocks on either side."""
    q, k, v = (in_blocks(x) for x in (q, k, v))  # (batch, blocks, block, heads, width)
    around = [F.pad(x, (0, 0, 0, 0, 0, 0, 1, 1)) for x in (k, v)]
    k, v = (torch.cat([x[:, i : i + BLOCKS] for i in range(3)], 2) for x in around)
    scores = torch.einsum("...qhd,...khd->...hqk", q, k) * WIDTH**-0.5
    keys = torch.cat([real(1)[i : i + BLOCKS] for i in range(3)], 1)  # (blocks, 3 * block)
    allowed = real()[:, :, None] & keys[:, None, :]
    scores += torch.where(allowed, 0.0, -1e10)[None, :, None]
    weights = scores.float().softmax(-1).type_as(scores)
    out = torch.einsum("...hqk,...khd->...qhd", weights, v)
    self.keep(weights * allowed[None, :, None], out.transpose(2, 3), real().expand(BATCH, -1, -1))
    return out.flatten(3).flatten(1, 2)


def with_what_came_before(self: Blocked, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each block reads itself and a few keys before it: heads first, by matrix products."""
    past = 4
    q = in_blocks(q).permute(0, 3, 1, 2, 4)
    k, v = (F.pad(x, (0, 0, 0, 0, past, BLOCK * BLOCKS - LENGTH)) for x in (k, v))
    k, v = (x.unfold(1, BLOCK + past, BLOCK).permute(0, 2, 1, 4, 3).contiguous() for x in (k, v))
    there = F.pad(torch.ones(LENGTH, dtype=torch.bool), (past, BLOCK * BLOCKS - LENGTH))
    keys = there.unfold(0, BLOCK + past, BLOCK)  # (blocks, keys)
    allowed = real()[:, :, None] & keys[:, None, :]
    scores = (q @ k.mT).tanh().masked_fill(~allowed[None, None], -1e9)
    weights = F.softmax(scores, dim=-1)
    out = weights @ v
    kept = (weights * allowed[None, None]).transpose(1, 2)
    self.keep(kept, out.transpose(1, 2), real().expand(BATCH, -1, -1))
    return out.permute(0, 2, 3, 1, 4).flatten(3).flatten(1, 2)


def with_global_keys(self: Blocked, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each block reads itself and some keys that all read: two products, one softmax, two sets of values."""
    q, k, v = (in_blocks(x).permute(0, 3, 1, 2, 4) for x in (q, k, v))
    memory = torch.linspace(-1, 1, BATCH * GLOBAL * D_MODEL).view(BATCH, GLOBAL, D_MODEL).sin()
    _, global_k, global_v = self.extra(memory).view(BATCH, GLOBAL, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
    to_all = torch.einsum("BHNKF,BHGF->BHNKG", q, global_k)
    to_own = torch.einsum("BHNKF,BHNXF->BHNKX", q, k)
    hidden = F.pad(torch.where(real(), 0.0, -torch.inf), (GLOBAL, 0))
    weights = (torch.cat([to_all, to_own], -1) + hidden[None, None, :, None]).softmax(-1)
    out = torch.einsum("BHNKG,BHGF->BHNKF", weights[..., :GLOBAL], global_v)
    out = out + torch.einsum("BHNKX,BHNXF->BHNKF", weights[..., GLOBAL:], v)
    self.keep(weights.transpose(1, 2), out.transpose(1, 2), real().expand(BATCH, -1, -1))
    return out.permute(0, 2, 3, 1, 4).flatten(3).flatten(1, 2)


def pooled_queries(self: Blocked, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every third query, on all keys."""
    q, k, v = (x.transpose(1, 2) for x in (q[:, ::3], k, v))
    weights = (q @ k.mT * WIDTH**-0.5).softmax(-1)
    out = weights @ v
    self.keep(weights.unsqueeze(1), out.unsqueeze(1))
    return out.transpose(1, 2).flatten(2)


NOTHING: frozenset[str] = frozenset()
BLOCKS_OF_KEYS = OF_ONE_SEQUENCE | OF_WHOLE_KEYS
CASES = [
    (windows_after_heads, True, NOTHING),
    (windows_after_heads, False, NOTHING),  # nobody says how many heads: their place in memory does
    (windows_before_heads, True, NOTHING),
    (windows_before_heads, False, NOTHING),
    (with_neighbours, True, BLOCKS_OF_KEYS),
    (with_neighbours, False, BLOCKS_OF_KEYS),
    (with_what_came_before, True, BLOCKS_OF_KEYS),
    (with_global_keys, True, BLOCKS_OF_KEYS | {"output_norm"}),
    (pooled_queries, True, OF_ONE_SEQUENCE),
]


def made(core: Callable[..., Tensor], named: bool) -> tuple[nn.Module, Blocked, Tensor]:
    torch.manual_seed(3)
    layer = Blocked(core, named)
    return nn.ModuleDict({"layer": layer}), layer, torch.randn(BATCH, LENGTH, D_MODEL)


@pytest.mark.parametrize(
    ("core", "named", "absent"), CASES, ids=lambda x: x.__name__ if callable(x) else str(x)[:5]
)
@torch.no_grad()
def test_the_numbers_of_its_own_weights(
    core: Callable[..., Tensor], named: bool, absent: frozenset[str]
) -> None:
    model, layer, x = made(core, named)
    plain = layer(x)
    with watch(model, "full") as seen:
        watched = layer(x)
    assert torch.equal(plain, watched)
    assert layer.kept is not None
    weights, output, counted = layer.kept
    (site,) = seen.sites
    assert (site.name, site.heads, site.kind) == ("layer", HEADS, "self")
    table = seen.table
    assert table["tokens"].tolist() == [int(counted.sum())] * HEADS
    wanted = oracle(weights, counted)
    norms = output.double().norm(dim=-1)
    wanted["output_norm"] = torch.where(counted[:, None], norms, 0.0).sum((0, 2)) / counted.sum()
    for name in FULL:
        if name in absent:
            assert table[name].isnan().all(), name
        elif name != "largest_logit":  # the kept weights do not tell it
            torch.testing.assert_close(table[name], wanted[name], rtol=1e-5, atol=1e-6, msg=name)
    shown = maps(model["layer"], (x,), {0: [2]})[""].weights
    torch.testing.assert_close(shown[:, 0][counted], weights[:, 2][counted])


@pytest.mark.parametrize(
    ("core", "named", "absent"), CASES, ids=lambda x: x.__name__ if callable(x) else str(x)[:5]
)
@torch.no_grad()
def test_silence_is_zero_columns(core: Callable[..., Tensor], named: bool, absent: frozenset[str]) -> None:
    model, layer, x = made(core, named)
    with silence(model, {"layer": [1]}):
        silenced = layer(x)
    layer.proj.weight[:, WIDTH : 2 * WIDTH] = 0.0
    torch.testing.assert_close(silenced, layer(x))
