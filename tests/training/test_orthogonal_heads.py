"""Heads kept orthogonal on models of many layouts, and plain again for everything that reads weights."""

import copy

import pytest
import torch
from tests.helpers import models
from tests.helpers.doubtful_model import ids, unproved
from torch import nn

import manyheads as mh
from manyheads.capture.weights import live_weights, projections
from manyheads.common.nested_tensors import tensors_in
from manyheads.common.run_batch import run

TOKENS = models.tokens()
IDS = TOKENS["input_ids"]
X = torch.randn(2, 7, 15, generator=torch.Generator().manual_seed(1))
MODELS = {
    "gpt2, packed and transposed": (models.gpt2, TOKENS),
    "llama, grouped": (lambda: models.llama(hidden_size=24), TOKENS),
    "bert": (models.bert, TOKENS),
    "bloom, packed by head": (models.bloom, TOKENS),
    "albert, one layer used thrice": (models.albert, TOKENS),
    "torch, packed": (lambda: nn.MultiheadAttention(15, 3, batch_first=True), (X, X, X)),
    "torch, apart": (lambda: nn.MultiheadAttention(15, 3, kdim=7, vdim=5, batch_first=True), None),
    "handwritten": (models.Nano, IDS),
    "ours": (lambda: mh.Decoder(15, heads=3, layers=2, vocabulary=97), IDS),
}


def build(kind):
    torch.manual_seed(0)
    factory, batch = MODELS[kind]
    if batch is None:
        batch = (X, torch.randn(2, 5, 7), torch.randn(2, 5, 5))
    return factory().eval(), batch


def total(out):
    return sum(x.square().mean() for x in tensors_in(out) if x.is_floating_point() and x.requires_grad)


def result(model, batch):
    out = run(model, batch)
    return total(dict(out) if hasattr(out, "keys") else out)


def rows_of_heads(model, batch, roles):
    """The parts of every head, once for each group, of every site and role."""
    sites = projections(model, batch).values()
    return [
        list(dict.fromkeys(getattr(head, role) for head in site.heads)) for site in sites for role in roles
    ]


def largest_cosine(model, heads_of_sites):
    """Between rows of different heads of a site, of all sites."""
    cosines = [0.0]
    for heads in heads_of_sites:
        rows = [nn.functional.normalize(live_weights(model, parts), dim=1) for parts in heads]
        cosines += [(a @ b.T).abs().max().item() for n, a in enumerate(rows) for b in rows[:n]]
    return max(cosines)


@pytest.mark.parametrize("roles", [("query", "key"), ("value", "output")], ids="-".join)
@pytest.mark.parametrize("kind", MODELS)
def test_every_step_leaves_heads_orthogonal(kind, roles):
    model, batch = build(kind)
    if kind == "torch, apart":
        with pytest.raises(ValueError, match=r"3 heads of 5 need 15 dimensions, and there are [57]"):
            mh.orthogonal_heads(model, roles, batch)
        roles = [role for role in roles if role in ("query", "output")]
    heads = rows_of_heads(model, batch, roles)
    assert largest_cosine(model, heads) > 0.1
    names = dict(model.named_parameters())
    assert mh.orthogonal_heads(model, roles, None if batch is TOKENS else batch) is model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        before = result(model, batch)
        before.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert largest_cosine(model, heads) < 1e-5
    out = result(model, batch)
    assert out != before
    mh.fold_orthogonal(model)
    assert torch.equal(result(model, batch), out)
    assert {name: id(x) for name, x in model.named_parameters()} == {n: id(x) for n, x in names.items()}


def test_what_reads_weights_and_heads_sees_a_plain_model(tmp_path):
    model, _ = build("gpt2, packed and transposed")
    mh.orthogonal_heads(model)
    plain = mh.fold_orthogonal(copy.deepcopy(model))
    with mh.watch(model) as seen:
        out = model(**TOKENS).logits
    with mh.watch(plain) as wanted:
        assert torch.equal(plain(**TOKENS).logits, out)
    assert "verified" not in seen.table.labels  # all of it
    assert torch.equal(seen.table["entropy"], wanted.table["entropy"])
    ours, theirs = (mh.diversity(each, [TOKENS], measures=["subspaces"]).matrices for each in (model, plain))
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    within = ~torch.eye(3, dtype=torch.bool)
    assert ours["query_orthogonality"][:3, :3][within].min() > 1 - 1e-9
    mh.save(model, tmp_path / "saved")
    loaded = mh.load(tmp_path / "saved")
    assert torch.equal(loaded(**TOKENS).logits, out)
    smaller = mh.cut(model, {0: [1]})
    assert not [name for name, _ in smaller.named_parameters() if "parametrizations" in name]
    torch.testing.assert_close(smaller(**TOKENS).logits, mh.cut(plain, {0: [1]})(**TOKENS).logits)
    terms = mh.diversity_terms(model, orthogonality=1.0)
    assert terms.loss().item() < 1e-9
    assert torch.equal(model(**TOKENS).logits, out)


def test_terms_and_silence_work_under_the_constraint():
    model, _ = build("llama, grouped")
    mh.orthogonal_heads(model)
    terms = mh.diversity_terms(model, attention=1.0)
    with terms:
        model(**TOKENS)
    terms.loss().backward()
    assert any(p.grad.any() for n, p in model.named_parameters() if "original" in n and p.grad is not None)
    with mh.silence(model, {0: [0]}):
        assert not torch.equal(model(**TOKENS).logits, model(**TOKENS).logits + 1)


def test_a_constrained_model_can_be_pruned_but_not_refitted():
    model = mh.orthogonal_heads(mh.Encoder(12, heads=3, layers=2, vocabulary=97).eval(), ["output"], IDS)
    smaller = mh.prune(model, [IDS], keep=0.7)
    assert not [name for name, _ in smaller.named_parameters() if "parametrizations" in name]
    with pytest.raises(ValueError, match=r"small: its heads are kept orthogonal.*fold_orthogonal"):
        mh.refit(model, [IDS], teacher=model)


def test_frozen_weights_are_left_alone():
    model, _ = build("bert")
    model.requires_grad_(False)
    query = model.encoder.layer[1].attention.self.query
    query.weight.requires_grad_(True)
    mh.orthogonal_heads(model)
    names = [name for name, _ in model.named_parameters() if "parametrizations" in name]
    assert names == ["encoder.layer.1.attention.self.query.parametrizations.weight.original"]


class NormedBeforeHeads(nn.Module):
    """Queries behind a norm over all heads: each depends on all rows."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(12, 12) for _ in range(4))
        self.norm = nn.LayerNorm(12)

    def forward(self, x):
        q, k, v = (
            y.unflatten(2, (3, 4)).transpose(1, 2) for y in (self.norm(self.q(x)), self.k(x), self.v(x))
        )
        return self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class SharedQuery(NormedBeforeHeads):
    """Queries and keys by one weight; the output projection is that of another module, too."""

    def __init__(self):
        super().__init__()
        self.norm = nn.Identity()
        self.k = self.q
        self.readout = nn.Linear(12, 12)
        self.readout.weight = self.o.weight


def test_weights_of_queries_and_keys_may_be_one():
    model, x = SharedQuery(), torch.randn(2, 5, 12)
    mh.orthogonal_heads(model, batch=x)
    assert largest_cosine(model, rows_of_heads(model, x, ("query", "key"))) < 1e-5


def refused(match, model, roles=("query", "key"), batch=None):
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with pytest.raises((ValueError, TypeError), match=match):
        mh.orthogonal_heads(model, roles, batch)
    assert before.keys() == dict(model.named_parameters()).keys()  # nothing was changed half-way


def test_what_cannot_be_constrained_is_refused_in_a_sentence():
    x = torch.randn(2, 5, 12)
    refused(
        r"'model.layers.0.self_attn' cannot be orthogonal: 6 heads of 4 need 24 dim.*are 18", models.llama()
    )
    refused("query weights of '' do not belong to heads one by one", NormedBeforeHeads(), batch=x)
    refused("output weights of '' are shared: o.weight and readout.weight", SharedQuery(), ["output"], x)
    refused("no trainable heads", models.gpt2().requires_grad_(False))
    refused("no trainable heads", mh.MultiHeadAttention(12, heads=1), batch=x)
    refused("roles: expected some of query, key, value, output, got 'keys'", models.gpt2(), ["keys"])
    refused("roles: expected several, as in", models.gpt2(), "query")
    refused("roles: expected some of .*, got none", models.gpt2(), [])
    refused("batch: Nano is not a transformers model", models.Nano())
    refused("heads of 'layers.1' are could not be proved", unproved(), batch=ids())
    refused("its heads are already orthogonal", mh.orthogonal_heads(models.gpt2()))
    weight_normed = mh.MultiHeadAttention(12, heads=3)
    nn.utils.parametrizations.weight_norm(weight_normed.query)
    refused("query weights of ''", weight_normed, batch=x)
