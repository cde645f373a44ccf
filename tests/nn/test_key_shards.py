"""Statistics of key shards, merged, against the formula; in one process and on a ring of two."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.helpers import formula
from tests.helpers.statistics import CORE, FULL, random, same

from manyheads.nn import mask
from manyheads.nn.key_shards import merge_statistics, ring_statistics
from manyheads.nn.statistics import statistics

MERGED = {"core": CORE, "logits": CORE | {"largest_logit"}, "full": FULL - {"received"}}
GEOMETRIES = [{}, {"causal": True}, {"window": 5}, {"chunk": 6}, {"causal": True, "window": 7, "chunk": 6}]


def shards(q, k, ends, features, mask_of=None, lead=None, **options):
    """The statistics of each shard; `mask_of` gives the mask of keys a to b."""
    lead = k.shape[2] - q.shape[2] if lead is None else lead
    parts = []
    for a, b in zip([0, *ends[:-1]], ends, strict=True):
        of_shard = None if mask_of is None else mask_of(a, b)
        part = statistics(
            q, k[:, :, a:b], mask=of_shard, features=features[:, a:b], positions=(lead, a), **options
        )
        assert "received" not in part
        parts.append(part)
    return parts


@pytest.mark.parametrize("options", GEOMETRIES, ids=str)
@pytest.mark.parametrize("ends", [[41], [18, 41], [6, 12, 24, 41]], ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(41, 41), (13, 41), (53, 41)])
@pytest.mark.parametrize("which", MERGED)
def test_merged_shards_are_the_formula(which, queries, keys, ends, options, engine):
    q, k, features = random((2, 4, 2, queries, keys, 5))
    seen = formula.allowed(queries, keys, **options)
    expected = formula.statistics(formula.scores(q, k), seen, features)
    parts = shards(q, k, ends, features, statistics=which, **options)
    same(merge_statistics(parts[::-1], keys=keys), expected, MERGED[which] | {"features"})


@pytest.mark.parametrize("kind", ["padding", "boolean", "added", "alibi", "hiding", "lowest"])
@pytest.mark.parametrize("which", ["core", "full"])
def test_masks(kind, which, engine):
    """Tensors are those of the shard's keys, lengths count from the first key of all."""
    q, k, features = random((2, 4, 2, 23, 41, 5))
    generator = torch.Generator().manual_seed(11)
    shown = torch.rand(2, 1, 23, 41, generator=generator) > 0.5
    shown[0, :, 3, 18:] = False  # nothing in one shard
    shown[1, :, 5] = False  # nothing at all
    bias = torch.randn(4, 23, 41, dtype=torch.float64, generator=generator)
    lowest = torch.zeros(2, 1, 23, 41).masked_fill(~shown, torch.finfo(torch.float32).min)
    seen, added = shown, None
    if kind == "padding":
        lengths = torch.tensor([41, 17])
        seen = formula.allowed(23, 41, lengths=[41, 17])
        part = lambda a, b: mask.padding(lengths)  # noqa: E731
    elif kind == "alibi":
        seen, added = torch.ones(1, 1, 1, 1, dtype=torch.bool), formula.alibi(4, 23, 41)
        part = lambda a, b: mask.alibi(4)  # noqa: E731
    else:
        tensor = {
            "boolean": shown, "added": bias, "hiding": bias.masked_fill(~shown, -torch.inf), "lowest": lowest,
        }[kind]  # fmt: skip
        added = {"added": bias, "hiding": bias, "lowest": lowest}.get(kind)
        seen = torch.ones_like(shown) if kind in ("added", "lowest") else shown
        part = lambda a, b: tensor[..., a:b]  # noqa: E731
    scores = formula.scores(q, k, added)
    if kind == "lowest":
        top = scores.amax(-1, keepdim=True)
        seen = seen & (scores - top > -1e3)
    expected = formula.statistics(scores, seen, features)
    parts = shards(q, k, [18, 41], features, part, statistics=which)
    same(merge_statistics(parts), expected, MERGED[which] | {"features"})


@pytest.mark.parametrize("which", ["core", "full"])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_float32_with_means_of_shards_far_apart(which, offset, engine):
    """Each shard centres its keys by a mean of its own: what that shifts must not be rounded."""
    q, k, features = random((1, 2, 2, 307, 307, 16), offset=offset)
    k[:, :, 101:] -= offset * 0.99
    exact = statistics(q, k, causal=True, statistics=which, features=features)
    q, k, features = (x.float() for x in (q, k, features))
    of_float = statistics(q, k, causal=True, statistics=which, features=features)
    parts = shards(q, k, [101, 307], features, causal=True, statistics=which)
    merged = merge_statistics(parts)
    for name in MERGED[which] | {"features"}:
        assert merged[name].dtype == torch.float32
        error, of_whole = ((x[name] - exact[name]).abs().amax() for x in (merged, of_float))
        scale = 1 + exact[name].abs().amax()
        assert error <= 1e-6 * scale or error <= 2 * of_whole, (name, error, of_whole)


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_any_shards_of_queries_and_keys(data):
    keys, queries = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    ends = [*sorted(data.draw(st.sets(st.integers(1, keys), max_size=4)) - {keys}), keys]
    start = data.draw(st.integers(0, queries - 1))
    options = {"causal": data.draw(st.booleans()), "window": data.draw(st.none() | st.integers(1, 9))}
    q, k, features = random((1, 2, 1, queries, keys, 3))
    expected = statistics(q, k, statistics="full", features=features, **options)
    of_queries = {name: value[:, :, start:] for name, value in expected.items() if name != "received"}
    lead = keys - queries + start
    parts = shards(q[:, :, start:], k, ends, features, lead=lead, statistics="full", **options)
    same(merge_statistics(parts), of_queries, MERGED["full"] | {"features"})


def test_parts_that_do_not_fit():
    q, k, features = random((1, 2, 2, 7, 11, 3))
    parts = shards(q, k, [5, 11], features)
    with pytest.raises(ValueError, match="got none"):
        merge_statistics([])
    with pytest.raises(ValueError, match="does not say which keys"):
        merge_statistics([statistics(q, k)])
    with pytest.raises(ValueError, match="expected keys from 5 on, got 0 to 5: a part is there twice"):
        merge_statistics([parts[0], parts[0]])
    with pytest.raises(ValueError, match="expected keys from 0 on, got 5 to 11: a part is missing"):
        merge_statistics([parts[1]])
    with pytest.raises(ValueError, match="reach to key 5, but there are 11"):
        merge_statistics([parts[0]], keys=11)
    with pytest.raises(ValueError, match="received of part 0 cannot be merged"):
        merge_statistics([parts[0] | {"received": torch.zeros(1)}])
    with pytest.raises(ValueError, match="measure all shards with the same statistics"):
        merge_statistics([parts[0], shards(q, k, [5, 11], features, statistics="full")[1]])
    with pytest.raises(ValueError, match="expected the same queries"):
        merge_statistics([parts[0], shards(q[:, :, 1:], k, [5, 11], features)[1]])
    with pytest.raises(ValueError, match="begin at its multiples"):
        statistics(q, k, chunk=4, positions=(0, 6))
    with pytest.raises(TypeError, match="two whole numbers"):
        statistics(q, k, positions=(0.5, 0))
    with pytest.raises(ValueError, match="first key at 0 or later"):
        statistics(q, k, positions=(0, -1))


def test_a_ring_of_one():
    q, k, features = random((2, 4, 2, 13, 17, 5))
    found = ring_statistics(q, k, causal=True, statistics="full", features=features)
    expected = formula.statistics(formula.scores(q, k), formula.allowed(13, 17, causal=True), features)
    same(found, expected, MERGED["full"] | {"features"})
    with pytest.raises(ValueError, match="does not travel"):
        ring_statistics(q, k, mask=torch.ones(1, 1, 1, 1, dtype=torch.bool))


RING = """
import sys
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from manyheads.nn import mask
from manyheads.nn.key_shards import ring_statistics

folder, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
x = load_file(f"{folder}/inputs.safetensors")
queries, keys = ([slice(0, 23), slice(23, 41)], [slice(0, 30), slice(30, 53)])
q, k, features = x["q"][:, :, queries[rank]], x["k"][:, :, keys[rank]], x["features"][:, keys[rank]]
cases = {
    "causal": {"causal": True, "features": features},
    "window": {"causal": True, "window": 7, "chunk": 6},
    "padding": {"mask": mask.padding(torch.tensor([53, 29]))},
}
for name, options in cases.items():
    found = ring_statistics(q.contiguous(), k, statistics="full", **options)
    save_file({n: t.contiguous() for n, t in found.items()}, f"{folder}/{name}-{rank}.safetensors")
for wrong in ({"chunk": 7}, {"scale": 0.1 + rank}):
    try:
        ring_statistics(q, k, **wrong)
    except ValueError as error:
        print(error)
try:
    ring_statistics(q if rank else q[0], k)
except ValueError as error:
    print(error)
dist.destroy_process_group()
"""


def test_a_ring_of_two_processes(tmp_path):
    """Shards of different lengths; what is wrong with one process raises on both."""
    q, k, features = random((2, 4, 2, 41, 53, 5))
    save_file({"q": q, "k": k, "features": features}, tmp_path / "inputs.safetensors")
    command = [sys.executable, "-c", RING, str(tmp_path)]
    runs = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in (0, 1)]
    printed = [run.communicate(timeout=120)[0].splitlines() for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert printed[0] == printed[1]
    assert "begin at 30; expected a multiple of 7" in printed[0][0]
    assert "ring: process 1 was called with" in printed[0][1]
    assert printed[0][2].startswith("process 0: q: expected (batch, heads, length, width)")
    cases = {
        "causal": ({"causal": True}, {"features"}),
        "window": ({"causal": True, "window": 7, "chunk": 6}, set()),
        "padding": ({"lengths": [53, 29]}, set()),
    }
    for name, (options, more) in cases.items():
        seen = formula.allowed(41, 53, **options)
        expected = formula.statistics(formula.scores(q, k), seen, features if more else None)
        parts = [load_file(tmp_path / f"{name}-{rank}.safetensors") for rank in (0, 1)]
        found = {n: torch.cat([part[n] for part in parts], dim=2) for n in parts[0]}
        same(found, expected, MERGED["full"] | more)
