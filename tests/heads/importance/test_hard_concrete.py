"""Learned gates, relevance and rank agreement."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy import stats
from tests.helpers import models
from tests.helpers.models import tokens
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.heads.importance import agreement, importance
from manyheads.heads.importance.hard_concrete import _SHIFT, _centred, learned_gates
from manyheads.heads.importance.rankings import spearman
from manyheads.heads.importance.relevance import Linear, output_weights
from manyheads.heads.importance.request import Request
from manyheads.heads.model_outputs import output_distance
from manyheads.heads.observer import gate_gradients, observed
from manyheads.heads.silence import silence
from manyheads.heads.table import HeadTable, Row


def with_dead_heads() -> nn.Module:
    """A Llama of which heads 1 and 4 say nothing in both layers."""
    model = models.llama()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.unflatten(1, (6, -1))[:, [1, 4]] = 0.0
    return model


def test_learned_gates_close_heads_that_say_nothing() -> None:
    model = with_dead_heads()
    table = learned_gates(Request(model, [tokens(0), tokens(1)], gates=8), restarts=2)
    worst = table["importance"].argsort()[:4].tolist()
    assert sorted(worst) == [1, 4, 7, 10]
    assert table["importance"].sum().item() == pytest.approx(8, abs=1e-3)
    assert table.sums["importance"][0].tolist() == [2.0] * 12


def test_learned_gates_keep_a_better_set_than_chance() -> None:
    model, batch = models.gpt2(), tokens(0)
    table = learned_gates(Request(model, [batch], gates=3), restarts=1)

    def without(removed: list[int]) -> float:
        heads = {layer: [row - 3 * layer for row in removed if row // 3 == layer] for layer in range(2)}
        with observed(model) as observer:
            full = observer.forward(batch)
            with silence(model, {layer: found for layer, found in heads.items() if found}):
                other = observer.gated(batch, {})
        return output_distance(full.output, observer.output(other, full)).mean().item()

    learned = without(table["importance"].argsort()[:3].tolist())
    every = [without([a, b, c]) for a in range(6) for b in range(a + 1, 6) for c in range(b + 1, 6)]
    assert sum(value < learned for value in every) <= 2  # of 20 sets


def test_gates_take_a_loss() -> None:
    def loss(result: Any, batch: Any) -> Tensor:
        return -result.logits[..., 5].mean(1)

    table = learned_gates(Request(models.llama(), [tokens()], loss, gates=4), steps=10, restarts=2)
    assert table["importance"].sum().item() == pytest.approx(4, abs=1e-3)


def test_the_target_is_kept_by_a_shift_with_the_right_gradient() -> None:
    location = torch.randn(
        7, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).requires_grad_()

    def open_gates(x: Tensor) -> Tensor:
        return torch.sigmoid(_centred(x, 2.5) - _SHIFT)

    assert open_gates(location).sum().item() == pytest.approx(2.5, abs=1e-9)
    assert torch.autograd.gradcheck(lambda x: open_gates(x)[:3], location)


class Straight(nn.Module):
    """Attention without residuals or biases, and a head of its own: all relevance goes through the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, 15)
        self.layers = nn.ModuleList(
            nn.MultiheadAttention(15, 3, bias=False, batch_first=True) for _ in range(3)
        )
        self.norm = nn.LayerNorm(15, bias=False)
        self.out = nn.Linear(15, models.VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x, _ = layer(x, x, x, need_weights=False)
            x = self.norm(F.gelu(x))
        return self.out(x)


def test_relevance_is_conserved_from_layer_to_layer() -> None:
    torch.manual_seed(0)
    model, ids = Straight().double().eval(), tokens()["input_ids"]
    table = importance(model, [ids], "relevance")
    with torch.no_grad():
        largest = model(ids).amax(-1).mean(1)  # (batch,)
    each_layer = table["relevance"].view(3, 3).sum(1)
    assert torch.allclose(each_layer, largest.mean().expand(3), rtol=1e-9)
    assert (table["importance"] >= table["relevance"].abs() - 1e-12).all()


@pytest.mark.parametrize(("attention", "within"), [("sdpa", 1e-5), ("eager", 1e-5)])
def test_relevance_is_conserved_in_a_llama(attention: str, within: float) -> None:
    """Residuals, grouped heads, root mean square norms, gated activations, padding: nothing has a bias."""
    model, batch = models.llama(attn_implementation=attention).double(), tokens()
    embedded = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
    fed = {"inputs_embeds": embedded, "attention_mask": batch["attention_mask"]}
    with observed(model) as observer, Linear():
        forward = observer.forward(fed, gradients=True)
    weights = output_weights(forward.output)
    wanted = (forward.output.value * weights).flatten(1).sum(1)
    with torch.no_grad():
        plain = model(**fed).logits
        largest = (plain.amax(-1) * batch["attention_mask"]).sum(1) / batch["attention_mask"].sum(1)
    assert torch.allclose(wanted, largest, rtol=1e-5)  # holding things fixed changes no value
    (gradient,) = torch.autograd.grad(forward.output.value, embedded, weights)
    assert torch.allclose((gradient * embedded).sum((1, 2)), wanted, rtol=within)
    assert not torch.allclose(torch.zeros(3).double(), wanted)


def test_relevance_of_a_head_by_hand() -> None:
    """One layer of attention: a head's relevance is the largest logit's share that its columns make."""
    torch.manual_seed(0)
    model, ids = Straight().double().eval(), tokens()["input_ids"]
    model.layers = model.layers[:1]
    model.norm = nn.Identity()
    table = importance(model, [ids], "relevance")
    x, layer = model.embedding(ids), model.layers[0]
    q, k, v = (
        part.unflatten(2, (3, 5)).transpose(1, 2) for part in F.linear(x, layer.in_proj_weight).chunk(3, 2)
    )
    heads = (q @ k.mT / 5**0.5).softmax(-1) @ v  # (batch, heads, length, 5)
    parts = torch.einsum("bhld,ohd->bhlo", heads, layer.out_proj.weight.unflatten(1, (3, 5)))
    before = parts.sum(1)
    slope = F.gelu(before) / before
    logits = model.out(F.gelu(before))
    chosen = model.out.weight[logits.argmax(-1)]  # (batch, length, 15)
    shares = (parts * (slope * chosen)[:, None]).sum((2, 3)) / ids.shape[1]  # (batch, heads)
    assert torch.allclose(table["relevance"], shares.mean(0), rtol=1e-9)
    assert torch.allclose(table["importance"], shares.abs().mean(0), rtol=1e-9)


def test_relevance_of_embeddings_is_their_length() -> None:
    model = models.bert().double()
    with observed(model) as observer, Linear():
        forward = observer.forward(tokens(), gradients=True)
    found = (forward.output.value * output_weights(forward.output)).sum(1)
    assert torch.allclose(found, forward.output.value.norm(dim=1))
    assert all(
        g.isfinite().all()
        for g in gate_gradients(forward.heads, forward.output.value, output_weights(forward.output)).values()
    )


def table_of(values: list[float]) -> HeadTable:
    rows = [Row("attn", 0, head, head, head, "self") for head in range(len(values))]
    x = torch.tensor(values, dtype=torch.float64)
    return HeadTable(
        rows, torch.ones(len(values)), {"importance": torch.stack([torch.ones_like(x), x, x * x])}
    )


def test_agreement_equals_scipy_also_with_ties() -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(0, 7, (23,), generator=generator).double()
    b = a + torch.randint(0, 9, (23,), generator=generator)
    expected = stats.spearmanr(a, b).statistic
    assert spearman(a, b) == pytest.approx(expected, abs=1e-12)
    (found,) = agreement({"a": table_of(a.tolist()), "b": table_of(b.tolist())})
    assert found.spearman == pytest.approx(expected, abs=1e-12)
    half = 1.959964 * math.sqrt((1 + expected**2 / 2) / 20)
    assert found.low == pytest.approx(math.tanh(math.atanh(expected) - half))
    assert found.high == pytest.approx(math.tanh(math.atanh(expected) + half))
    assert found.heads == 23


def test_agreement_leaves_out_what_was_not_counted() -> None:
    a, b = table_of([1.0, 2.0, 3.0, 4.0, 5.0, 9.0]), table_of([2.0, 1.0, 3.0, 4.0, 5.0, math.nan])
    (found,) = agreement({"a": a, "b": b})
    assert found.heads == 5
    assert found.spearman == pytest.approx(0.9)
    (same,) = agreement({"a": a, "again": a})
    assert (same.spearman, same.heads) == (1.0, 6)
    assert 0 < same.low < 1  # six heads in the same order are no proof
    (nothing,) = agreement({"a": table_of([1.0, 1.0, 1.0, 1.0]), "b": table_of([1.0, 2.0, 3.0, 4.0])})
    assert math.isnan(nothing.spearman)
    with pytest.raises(ValueError, match="tables: expected at least two"):
        agreement({"a": a})


def named(table: HeadTable, prefix: str) -> HeadTable:
    return replace(table, rows=[row._replace(site=f"{prefix}{row.site}") for row in table.rows])


def test_agreement_of_a_model_inside_another_one() -> None:
    base, tuned = table_of([1.0, 2.0, 3.0, 4.0, 5.0]), table_of([2.0, 1.0, 3.0, 4.0, 5.0])
    for tables in ({"a": base, "b": named(tuned, "bert.")}, {"b": named(tuned, "bert."), "a": base}):
        (found,) = agreement(tables)
        assert found.spearman == pytest.approx(0.9)
        assert found.heads == 5


def test_agreement_of_strangers_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"tables: 'a' and 'b' have no head in common: one has 'attn'.*'hattn'"
    ):
        agreement({"a": table_of([1.0, 2.0]), "b": named(table_of([1.0, 2.0]), "h")})
