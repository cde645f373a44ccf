"""diversity against plain computations in float64 on small models: padding, groups, cross-attention, cuts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import subspace_angles
from scipy.spatial.distance import jensenshannon
from tests.helpers import models
from torch import Tensor, nn

import manyheads as mh
from manyheads.capture.interceptor import Interceptor
from manyheads.heads.diversity import MEASURES, diversity, layers

ALL = 10_000  # rows: every query


def plain(model: nn.Module, batches: list[Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """Attention weights (heads, queries, keys) and outputs (queries, heads, d_value) of each site, of the
    queries that are not padding, by the formula; batches one after the other, keys padded to the longest.
    """
    weights: dict[str, list[Tensor]] = {}
    outputs: dict[str, list[Tensor]] = {}

    def see(call: Any) -> None:
        if call.weights is not None:
            p = call.weights
        else:
            group = call.query.shape[1] // call.key.shape[1]
            scores = call.query @ call.key.repeat_interleave(group, 1).transpose(-1, -2)
            scores = scores * (call.query.shape[-1] ** -0.5 if call.scale is None else call.scale)
            p = (scores + bias_of(call)).softmax(-1)
        for n in range(len(p)):
            rows = torch.ones(p.shape[2], dtype=torch.bool) if padding is None else padding[n].bool()
            padded = nn.functional.pad(p[n][:, rows], (0, 64 - p.shape[3]))
            weights.setdefault(call.site.name, []).append(padded)
            outputs.setdefault(call.site.name, []).append(call.output[n].transpose(0, 1)[rows])

    padding: Tensor | None = None
    with torch.no_grad(), Interceptor(model, see):
        for batch in batches:
            padding = batch.get("attention_mask") if isinstance(batch, dict) else None
            model(**batch) if isinstance(batch, dict) else model(batch)
    return {site: (torch.cat(weights[site], 1), torch.cat(outputs[site])) for site in weights}


def bias_of(call: Any) -> Tensor:
    dense = call.mask.dense(call.query.shape[2], call.key.shape[2])
    if dense.dtype == torch.bool:
        return torch.zeros(dense.shape, dtype=torch.float64).masked_fill(~dense, -torch.inf)
    return dense


def cka(x: Tensor, y: Tensor) -> float:
    """Linear CKA with the unbiased HSIC of Song and others (2012), as its definition says, from the Gram
    matrices of tokens without their diagonals.
    """
    n, one = len(x), torch.ones(len(x), dtype=x.dtype)

    def hsic(k: Tensor, l: Tensor) -> Tensor:
        k, l = k - k.diag().diag(), l - l.diag().diag()
        whole = (one @ k @ one) * (one @ l @ one) / ((n - 1) * (n - 2))
        return ((k @ l).trace() + whole - 2 / (n - 2) * (one @ k @ l @ one)) / (n * (n - 3))

    k, l = x @ x.T, y @ y.T
    return (hsic(k, l) / (hsic(k, k) * hsic(l, l)).sqrt()).item()


def pairs(table: mh.HeadTable) -> list[tuple[int, int]]:
    return [(a, b) for a in range(len(table)) for b in range(len(table))]


def causal_batches() -> list[dict[str, Tensor]]:
    """Two batches of different lengths and sizes, padded on the right, and one padded on the left."""
    left = {name: x.flip(1) for name, x in models.tokens(seed=2).items()}
    return [models.tokens(seed=0), models.tokens(seed=1, batch=2, length=11), left]


def check_attention_and_outputs(model: nn.Module, batches: list[Any]) -> mh.HeadTable:
    """js, its error, overlap and cka of every pair equal their definitions."""
    table = diversity(model, batches, rows=ALL, measures=["attention", "outputs"])
    seen = plain(model, batches)
    heads = [(weights[h], outputs[:, h]) for weights, outputs in seen.values() for h in range(len(weights))]
    assert len(heads) == len(table)
    compared = 0
    for a, b in pairs(table):
        (p, x), (q, y) = heads[a], heads[b]
        if table.rows[a].kind != table.rows[b].kind:
            assert all(table.matrices[name][a, b].isnan() for name in table.matrices)
            continue
        js = jensenshannon(p.numpy(), q.numpy(), axis=1, base=2) if a != b else np.zeros(len(p))
        found = {name: matrix[a, b].item() for name, matrix in table.matrices.items()}
        assert found["js"] == pytest.approx(js.mean(), abs=1e-7)
        assert found["js_divergence"] == pytest.approx((js**2).mean(), abs=1e-7)
        assert found["js_se"] == pytest.approx(js.std(ddof=1) / math.sqrt(len(js)), abs=1e-7)
        overlap = (p * q).sum(1)
        assert found["overlap"] == pytest.approx(overlap.mean().item(), abs=1e-9)
        assert found["overlap_se"] == pytest.approx(overlap.std().item() / math.sqrt(len(js)), abs=1e-9)
        assert found["cka"] == pytest.approx(cka(x, y), abs=1e-9)
        compared += 1
    assert compared > len(table)
    assert table["tokens"][0].item() == len(heads[0][1])
    return table


def test_causal_with_grouped_heads_and_padding_on_either_side():
    table = check_attention_and_outputs(models.llama().double(), causal_batches())
    assert table.matrices["js"][0, 1] > 0.05
    assert table["kind"][0] == "causal"


def test_encoder_with_padding():
    check_attention_and_outputs(models.bert().double(), causal_batches()[:2])


def test_hand_written_softmax():
    ids = [batch["input_ids"] for batch in causal_batches()[:2]]
    check_attention_and_outputs(models.Nano().eval().double(), ids)


def test_encoder_decoder_and_cross_attention_are_compared_among_themselves():
    ids = models.tokens()["input_ids"]
    # the decoder's input is as long as the encoder's: only who reads whom tells them apart
    batches = [
        {"input_ids": ids, "decoder_input_ids": ids.flip(1)},
        {"input_ids": ids[:2, :5], "decoder_input_ids": ids[:2]},
    ]
    table = check_attention_and_outputs(models.t5().double(), batches)
    assert set(table["kind"]) == {"self", "causal", "cross"}
    twins = dict(zip(((row.site, row.head) for row in table.rows), table["twin"], strict=True))
    for (site, _), twin in twins.items():
        assert models_part(site) == models_part(twin)


def models_part(site: str) -> tuple[bool, bool]:
    return "EncDec" in site, site.startswith("decoder")


def test_sinks_take_their_share():
    """Where a head puts its attention on a sink, that is a place like any other."""
    model, batch = models.gpt_oss(), {name: x[:1] for name, x in models.tokens().items()}
    rows = []
    with torch.no_grad(), Interceptor(model, lambda call: rows.append(call.scores.double().softmax(-1)[0])):
        model(**batch)
    p = torch.cat(rows).numpy()  # (heads, queries, keys and sink)
    table = diversity(model, [batch], rows=ALL, measures=["attention"])
    for a, b in ((0, 1), (0, 7), (3, 11)):
        wanted = jensenshannon(p[a], p[b], axis=1, base=2).mean()
        assert table.matrices["js"][a, b].item() == pytest.approx(wanted, abs=1e-4)


def test_sampled_rows_are_an_unbiased_part():
    """Over many samples the mean is that of all rows, and the error is as large as it says."""
    model, batches = models.bert(num_hidden_layers=1).double(), causal_batches()[:2]
    whole = diversity(model, batches, rows=ALL, measures=["attention"]).matrices["js"]
    means, errors = [], []
    for seed in range(60):
        found = diversity(model, batches, rows=5, seed=seed, measures=["attention"]).matrices
        means.append(found["js"])
        errors.append(found["js_se"])
    mean, spread = torch.stack(means).mean(0), torch.stack(means).std(0)
    far = ((mean - whole).abs() / (spread / math.sqrt(60)).clamp(min=1e-9)).fill_diagonal_(0.0)
    assert far.max() < 4.5  # standard errors
    upper = torch.triu_indices(3, 3, 1).unbind()
    ratio = torch.stack(errors).mean(0)[upper] / spread[upper]
    assert 0.8 < ratio.median() < 1.5  # without replacement the truth is a little below
    same = diversity(model, batches, rows=5, seed=3, measures=["attention"]).matrices["js"]
    assert torch.equal(same, means[3])


@pytest.mark.parametrize("build", [models.llama, models.gpt2, models.bert])
def test_subspaces_equal_scipy(build: Any):
    model = build().double()
    table = diversity(model, [models.tokens()], measures=["subspaces"])
    state = model.state_dict()
    for role, name in (("query", "q"), ("key", "k"), ("value", "v")):
        for a, b in pairs(table):
            left, right = (weight_rows(state, build, table.rows[i], name) for i in (a, b))
            angles = subspace_angles(left.numpy().T, right.numpy().T)
            found = table.matrices[f"{role}_angle"][a, b].item()
            assert found == pytest.approx(np.rad2deg(angles).mean(), abs=1e-5)
            orthogonality = table.matrices[f"{role}_orthogonality"][a, b].item()
            assert orthogonality == pytest.approx((np.sin(angles) ** 2).mean(), abs=1e-9)
    if build is models.llama:  # heads 0 and 1 share a key head
        assert table.matrices["key_angle"][0, 1] < 1e-5 < table.matrices["query_angle"][0, 1]


def weight_rows(state: dict[str, Tensor], build: Any, row: Any, role: str) -> Tensor:
    """The rows of a head's projection, by the layout that each library documents."""
    if build is models.llama:
        weight = state[f"model.layers.{row.layer}.self_attn.{role}_proj.weight"]
        head = row.head if role == "q" else row.head // 2
        return weight[4 * head : 4 * head + 4]
    if build is models.bert:
        name = {"q": "query", "k": "key", "v": "value"}[role]
        return state[f"encoder.layer.{row.layer}.attention.self.{name}.weight"][
            5 * row.head : 5 * row.head + 5
        ]
    packed = state[f"transformer.h.{row.layer}.attn.c_attn.weight"].T
    start = 15 * "qkv".index(role) + 5 * row.head
    return packed[start : start + 5]


@pytest.mark.parametrize("build", [models.llama, models.gpt2, models.bert])
def test_contributions_are_what_the_projection_makes_of_each_head(build: Any):
    """The contribution of a head is what the output projection makes of it alone, less the bias."""
    model, batches = build().double(), causal_batches()[:2]
    table = diversity(model, batches, measures=["contributions"])
    alone = torch.stack([contribution(model, batches, row, build) for row in table.rows])
    wanted = torch.nn.functional.cosine_similarity(alone[:, None], alone[None], dim=-1)
    torch.testing.assert_close(table.matrices["contribution_cosine"], wanted, atol=1e-9, rtol=0)
    assert wanted.fill_diagonal_(0.0).abs().max() > 0.05


def contribution(model: nn.Module, batches: list[Any], row: Any, build: Any) -> Tensor:
    """What a head adds at tokens that are not padding, in one vector."""
    others = [head for head in range(6 if build is models.llama else 3) if head != row.head]
    place = {
        models.llama: "model.layers.{}.self_attn.o_proj",
        models.gpt2: "transformer.h.{}.attn.c_proj",
        models.bert: "encoder.layer.{}.attention.output.dense",
    }[build]
    module = model.get_submodule(place.format(row.layer))
    inputs: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    parts = []
    with torch.no_grad():
        for batch in batches:
            inputs.clear()
            model(**batch)
            (x,) = inputs
            width = x.shape[-1] // (len(others) + 1)
            only = torch.zeros_like(x)
            span = slice(width * row.head, width * (row.head + 1))
            only[..., span] = x[..., span]
            given = module(only) - module(torch.zeros_like(x))
            parts.append(given[batch["attention_mask"].bool()].flatten())
    handle.remove()
    return torch.cat(parts)


def test_gradients_are_those_of_gates_on_single_tokens():
    model, batches = models.gpt2().double(), [models.tokens(), models.tokens(seed=1, batch=2, length=11)]
    calls = []

    def loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
        calls.append(batch)
        return output.logits[batch["attention_mask"].bool()].logsumexp(-1).square().sum()

    table = diversity(model, batches, measures=["gradients"], loss=loss)
    assert len(calls) == 2
    found: list[Tensor] = []
    for batch in batches:
        mask = batch["attention_mask"].bool()
        per_site: dict[str, Tensor] = {}

        def see(call: Any, per_site: dict[str, Tensor] = per_site) -> Tensor:
            gate = torch.ones(call.output.shape[:3], dtype=torch.float64, requires_grad=True)
            per_site[call.site.name] = gate
            return call.output * gate[..., None]

        with Interceptor(model, see):
            loss(model(**batch), batch).backward()
        found.append(torch.cat([gate.grad.transpose(1, 2)[mask] for gate in per_site.values()], 1))
    gradient = torch.cat(found).T  # (heads, tokens)
    wanted = torch.nn.functional.cosine_similarity(gradient[:, None], gradient[None], dim=-1)
    torch.testing.assert_close(table.matrices["gradient_cosine"], wanted, atol=1e-9, rtol=0)


def test_gradients_without_a_loss_know_heads_with_one_effect():
    """Two heads with the same weights push every output the same way, a third that takes back what they give
    pushes the other way.
    """
    model = models.bert(num_hidden_layers=1).double()
    state = model.state_dict()
    prefix = "encoder.layer.0.attention"
    for name in ("query", "key", "value"):
        for kind in ("weight", "bias"):
            tensor = state[f"{prefix}.self.{name}.{kind}"]
            tensor[5:10] = tensor[:5]
            tensor[10:15] = tensor[:5]
    columns = state[f"{prefix}.output.dense.weight"]
    columns[:, 5:10] = columns[:, :5]
    columns[:, 10:15] = -columns[:, :5]
    table = diversity(model, [models.tokens()], rows=ALL)
    cosine, added = table.matrices["gradient_cosine"], table.matrices["contribution_cosine"]
    for matrix in (cosine, added):
        torch.testing.assert_close(matrix[0], torch.tensor([1.0, 1.0, -1.0]).double(), atol=1e-6, rtol=0)
    assert table.matrices["js"].max() < 1e-6
    assert table.matrices["cka"].min() > 1 - 1e-9
    layer = layers(table)[0]
    assert layer.distinct_attention == pytest.approx(1.0, abs=1e-6)
    assert layer.distinct_outputs == pytest.approx(1.0, abs=1e-6)
    assert (layer.rank, layer.rank_99 <= 5) == (5, True)


def test_checkpointing_and_frozen_parameters_change_nothing():
    batch = torch.randn(2, 7, 15, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    plain_model = mh.Encoder(15, heads=3, layers=2).double()
    kept = mh.Encoder(15, heads=3, layers=2, checkpoint=True).double()
    kept.load_state_dict(plain_model.state_dict())
    kept.requires_grad_(False)
    kept.train()
    measures = ["attention", "outputs", "gradients"]
    one, other = (diversity(model, [batch], rows=ALL, measures=measures) for model in (plain_model, kept))
    for name, matrix in one.matrices.items():
        torch.testing.assert_close(matrix, other.matrices[name], equal_nan=True, msg=name)
    assert kept.training
    assert not any(parameter.requires_grad for parameter in kept.parameters())


def test_all_of_it_at_once():
    model, batches = models.llama().double(), causal_batches()
    table = diversity(model, iter(batches), rows=ALL)
    assert set(table.matrices) == {
        "js", "js_se", "js_divergence", "overlap", "overlap_se", "cka",
        "contribution_cosine", "gradient_cosine",
        *(f"{role}_{what}" for role in ("query", "key", "value") for what in ("angle", "orthogonality")),
    }  # fmt: skip
    for name, matrix in table.matrices.items():
        assert matrix.isfinite().all(), name
        torch.testing.assert_close(matrix, matrix.T, msg=name)
    for one in MEASURES:
        alone = diversity(model, batches, rows=ALL, measures=[one])
        for name, matrix in alone.matrices.items():
            torch.testing.assert_close(matrix, table.matrices[name], msg=name)
    js = table.matrices["js"].clone().fill_diagonal_(9.0)
    names = [f"{row.layer}.{row.head}" for row in table.rows]
    assert table["twin"] == [names[i] for i in js.argmin(1)]
    torch.testing.assert_close(table["twin_distance"], js.amin(1))
    wanted = table.matrices["js_se"][torch.arange(12), js.argmin(1)]
    torch.testing.assert_close(table["twin_distance_se"], wanted)
