"""Terms that keep heads diverse, on models of many kinds, against plain formulas on materialised weights."""

import copy

import pytest
import torch
from tests.helpers import models
from tests.helpers.doubtful_model import ids, unproved
from torch import nn
from torch.utils.checkpoint import checkpoint

import manyheads as mh
from manyheads.common.run_batch import run
from manyheads.heads.diversity.weight_subspaces import angles, bases
from manyheads.training.diversity_terms import subspace_similarity

TOKENS = models.tokens()
IDS = TOKENS["input_ids"]


def pairs(x):
    """The cosine of every pair of heads, (pairs, batch, queries), from (batch, heads, queries, n)."""
    count = x.shape[1]
    cosines = [
        nn.functional.cosine_similarity(x[:, a], x[:, b], dim=-1) for b in range(count) for a in range(b)
    ]
    return torch.stack(cosines)


def overlap_of(attentions, counted):
    """The attention term by the formula, from maps (batch, heads, queries, keys) of every layer."""
    means = []
    for maps in attentions:
        choice = counted & ((maps > 0).sum(-1) > 1).any(1)
        means.append(pairs(maps).mean(0)[choice].mean())
    return torch.stack(means).mean()


def agreement_of(outputs, counted):
    """The term of outputs or values, from (batch, heads, queries, width) of every layer."""
    return torch.stack([pairs(x).square().mean(0)[counted].mean() for x in outputs]).mean()


def gradients(loss, model):
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros(()) if grad is None else grad for grad in grads]


def close(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other.expand_as(one), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["llama", "bert", "gpt2", "gemma2", "bloom", "gpt_oss"])
def test_attention_of_transformers_models_is_that_of_their_maps(kind):
    model = getattr(models, kind)()
    # the experts of one, and the masked rows of the other, are for float32 alone
    model = model if kind in ("gpt_oss", "gemma2") else model.double()
    terms = mh.diversity_terms(model, attention=1.0)
    with terms:
        model(**TOKENS)
    loss = terms.loss()
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    maps = eager(**TOKENS, output_attentions=True)["attentions"]
    if kind == "gpt_oss":  # a learned sink takes the rest
        maps = [torch.cat([p, 1 - p.sum(-1, keepdim=True)], -1) for p in maps]
    wanted = overlap_of(maps, TOKENS["attention_mask"].bool())
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    close(gradients(loss, model), gradients(wanted, eager))


def test_a_relative_bias_learns_from_the_overlap():
    model = models.t5().double()
    batch = TOKENS | {"decoder_input_ids": IDS[:, :5]}
    terms = mh.diversity_terms(model, attention=1.0)
    with terms:
        model(**batch)
    loss = terms.loss()
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    out = eager(**batch, output_attentions=True)
    real, queries = TOKENS["attention_mask"].bool(), torch.ones(3, 5, dtype=torch.bool)
    stacks = [
        (out.encoder_attentions, real),
        (out.decoder_attentions, queries),
        (out.cross_attentions, queries),
    ]
    wanted = torch.stack([overlap_of(maps, counted) for maps, counted in stacks]).mean()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    ours, theirs = gradients(loss, model), gradients(wanted, eager)
    close(ours, theirs)
    names = [name for name, _ in model.named_parameters()]
    assert any(
        grad.any() for name, grad in zip(names, ours, strict=True) if "relative_attention_bias" in name
    )


def test_ours_with_grouped_heads_against_the_formula():
    torch.manual_seed(0)
    layer = mh.MultiHeadAttention(14, heads=6, kv_heads=3, d_key=3, d_value=5).double()
    x, lengths = torch.randn(3, 7, 14, dtype=torch.float64), torch.tensor([7, 4, 2])
    mask = mh.mask.padding(lengths) & mh.mask.causal()
    terms = mh.diversity_terms(layer, outputs=2.0, values=3.0, attention=5.0)
    with terms:
        layer(x, mask=mask)
    loss = terms.loss()
    q, k, v = (
        part(x).unflatten(2, (-1, width)).transpose(1, 2)
        for part, width in ((layer.query, 3), (layer.key, 3), (layer.value, 5))
    )
    scores = 3**-0.5 * q @ k.repeat_interleave(2, 1).mT
    p = scores.masked_fill(~mask.dense(7, 7), -torch.inf).softmax(-1)
    counted = torch.arange(7) < lengths[:, None]
    wanted = {
        "outputs": agreement_of([p @ v.repeat_interleave(2, 1)], counted),
        "values": agreement_of([v], counted),
        "attention": overlap_of([p], counted),
    }
    assert terms.values == pytest.approx({name: value.item() for name, value in wanted.items()})
    total = 2 * wanted["outputs"] + 3 * wanted["values"] + 5 * wanted["attention"]
    torch.testing.assert_close(loss, total)
    close(gradients(loss, layer), gradients(total, layer))


@pytest.mark.parametrize("role", ["query", "key", "value", "output"])
def test_orthogonality_is_what_diversity_measures(role):
    model = models.llama()
    terms = mh.diversity_terms(model, orthogonality=1.0, roles=[role])
    attention = [layer.self_attn for layer in model.model.layers]
    weight = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}[role]
    means = []
    for module in attention:
        matrix = getattr(module, weight).weight
        matrix = matrix.T if role == "output" else matrix
        similar = 1 - angles(bases(matrix.split(4)))[1]
        off = ~torch.eye(len(similar), dtype=torch.bool)
        means.append(similar[off].mean())
    assert terms.loss().item() == pytest.approx(torch.stack(means).mean().item(), abs=1e-6)
    if role != "output":
        table = mh.diversity(model, [TOKENS], measures=["subspaces"])
        kv_heads = torch.tensor([row.head if role == "query" else row.kv_head for row in table.rows])
        layers = torch.tensor(table["layer"])
        other = (layers[:, None] == layers) & (kv_heads[:, None] != kv_heads)
        measured = 1 - table.matrices[f"{role}_orthogonality"][other].mean()
        assert terms.values["orthogonality"] == pytest.approx(measured.item(), abs=1e-6)


def test_similarity_of_subspaces_has_the_gradient_of_small_steps_and_knows_no_scale():
    torch.manual_seed(0)
    x, y, z = (torch.randn(n, 7, dtype=torch.float64, requires_grad=True) for n in (2, 3, 2))
    assert torch.autograd.gradcheck(lambda *w: subspace_similarity(w), (x, y, z))
    turned = torch.randn(2, 2, dtype=torch.float64) @ x * 1e4
    torch.testing.assert_close(subspace_similarity([turned, y, z]), subspace_similarity([x, y, z]))
    twins = subspace_similarity([torch.ones(3, 7), torch.ones(3, 7), torch.zeros(3, 7)])  # rank 1, 1, 0
    torch.testing.assert_close(twins, torch.tensor([[1.0, 1, 0], [1, 1, 0], [0, 0, 0]]))


def test_orthogonality_can_be_trained_away_on_a_packed_transposed_weight():
    model = models.gpt2()
    terms = mh.diversity_terms(model, orthogonality=1.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    before = terms.loss().item()
    for _ in range(120):
        terms.loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert terms.loss().item() < 0.05 * before


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (models.Nano(), IDS),
        (nn.MultiheadAttention(15, 3, batch_first=True), (torch.randn(2, 7, 15),) * 3),
        (nn.MultiheadAttention(15, 3, add_bias_kv=True, batch_first=True), (torch.randn(2, 7, 15),) * 3),
        (models.albert(), TOKENS),
        (models.whisper(), models.whisper_inputs()),
    ],
    ids=["handwritten", "torch", "learned keys", "shared layers", "encoder and decoder"],
)
def test_all_terms_on_other_models(model, batch):
    terms = mh.diversity_terms(model, orthogonality=1, outputs=1, values=1, attention=1, batch=batch)
    with terms:
        run(model, batch)
    loss = terms.loss()
    assert all(0 < value < 1 for value in terms.values.values())
    assert any(grad.any() for grad in gradients(loss, model))
    assert not terms.notes


def test_twins_have_everything_in_common():
    layer = mh.MultiHeadAttention(6, heads=2)
    with torch.no_grad():
        for projection in (layer.query, layer.key, layer.value):
            projection.weight[3:] = projection.weight[:3]
    terms = mh.diversity_terms(
        layer, orthogonality=1, outputs=1, values=1, attention=1, batch=torch.randn(2, 5, 6)
    )
    with terms:
        layer(torch.randn(2, 5, 6))
    terms.loss()
    assert terms.values == pytest.approx(dict.fromkeys(terms.weights, 1.0), abs=1e-5)


def test_the_run_itself_does_not_change():
    model = models.bert().train()
    torch.manual_seed(7)
    alone = model(**TOKENS).last_hidden_state
    torch.manual_seed(7)
    terms = mh.diversity_terms(model, outputs=1, values=1, attention=1)
    with terms:
        assert torch.equal(model(**TOKENS).last_hidden_state, alone)


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(models.VOCABULARY, 12)
        self.layers = nn.ModuleList(mh.MultiHeadAttention(12, heads=3) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + (
                layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
            )
        return x


def test_gradient_checkpointing_gives_the_same_gradients():
    grads = []
    for reentrant in (None, False):
        model = Checkpointed(reentrant)
        terms = mh.diversity_terms(model, outputs=1, values=1, attention=1)
        with terms:
            loss = model(IDS).square().mean()
        (loss + terms.loss()).backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    close(*grads)


def test_checkpoints_that_keep_no_gradients_are_refused():
    model = Checkpointed(True)
    terms = mh.diversity_terms(model, attention=1)
    with terms:
        model(IDS)
    with pytest.raises(ValueError, match=r"'layers.0' ran without gradients.*use_reentrant=False"):
        terms.loss()
    with torch.no_grad():
        assert 0 < terms.loss() < 1


def test_several_runs_are_averaged_over_tokens_and_a_new_context_begins_anew():
    model = models.Nano().double().eval()
    terms = mh.diversity_terms(model, outputs=1.0)
    values = []
    for part in (IDS[:1], IDS[1:]):
        with terms:
            model(part)
        values.append(terms.loss().item())
    with terms:
        model(IDS[:1])
        model(IDS[1:])
    assert terms.loss().item() == pytest.approx((values[0] + 2 * values[1]) / 3)


def test_autocast_does_not_reach_the_terms():
    model = models.gpt2()
    terms = mh.diversity_terms(model, outputs=1, values=1, attention=1)
    with terms:
        model(**TOKENS)
    terms.loss()
    exact = terms.values
    with torch.autocast("cpu", torch.bfloat16), terms:
        model(**TOKENS)
    terms.loss().backward()
    assert terms.values == pytest.approx(exact, abs=0.05)


def test_frozen_parts_are_left_alone():
    model = models.gpt2()
    model.requires_grad_(False)
    model.transformer.h[1].attn.c_attn.weight.requires_grad_(True)
    terms = mh.diversity_terms(model, orthogonality=1.0)
    grads = gradients(terms.loss(), model)
    assert len(grads) == 1
    assert grads[0].any()


def refused(match, model=None, batch=None, **weights):
    with pytest.raises((ValueError, TypeError), match=match):
        mh.diversity_terms(model or models.Nano(), batch=batch, **weights)


def test_bad_input_is_refused_in_a_sentence():
    refused("a weight above 0 for at least one of orthogonality, outputs, values, attention")
    refused("attention: expected a number, 0 or more, got -1", attention=-1)
    refused("attention: expected a number, 0 or more, got nan", attention=float("nan"))
    refused("outputs: expected a number, got True", outputs=True)
    refused("roles: expected some of query, key, value, output, got 'keys'", attention=1, roles=["keys"])
    refused(
        "no trainable heads, since none of its parameters", models.gpt2().requires_grad_(False), attention=1
    )
    refused("batch: Nano is not a transformers model", orthogonality=1)
    one = mh.MultiHeadAttention(6, heads=1)
    refused("no trainable heads.*has one query head", one, torch.randn(2, 5, 6), orthogonality=1)
    frozen = models.gpt2()
    for layer in frozen.transformer.h:
        layer.attn.c_attn.weight.requires_grad_(False)
    refused("no trainable heads to be orthogonal", frozen, TOKENS, orthogonality=1)


def test_a_term_with_nothing_to_compare_says_so():
    model = models.Nano()
    terms = mh.diversity_terms(model, attention=1)
    with pytest.raises(ValueError, match="attention: there was nothing to compare; expected a run"):
        terms.loss()
    one = mh.MultiHeadAttention(6, heads=2, kv_heads=1)
    terms = mh.diversity_terms(one, values=1)
    with terms:
        one(torch.randn(2, 5, 6))
    with pytest.raises(ValueError, match=r"values: there was nothing to compare \(values: '' has one head"):
        terms.loss()
    frozen = models.gpt2()
    frozen.requires_grad_(False)
    frozen.transformer.h[1].attn.c_proj.weight.requires_grad_(True)  # no head depends on it
    terms = mh.diversity_terms(frozen, attention=1)
    with terms:
        frozen(**TOKENS)
    with pytest.raises(ValueError, match="attention: no trainable parameter has a part in it"):
        terms.loss()


def test_unverified_sites_are_refused_unless_allowed():
    model = unproved()
    message = "diversity_terms: what the heads of 'layers.1' are could not be proved"
    with pytest.raises(ValueError, match=message):
        mh.diversity_terms(model, orthogonality=1, batch=ids())
    with pytest.raises(ValueError, match=message), mh.diversity_terms(model, outputs=1):
        model(ids())
    terms = mh.diversity_terms(model, orthogonality=1, outputs=1, batch=ids(), unverified="allow")
    with terms:
        model(ids())
    assert 0 < terms.loss() < 2
