"""Importance held to plain computations: columns set to zero, finite differences, the formulas themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import transformers as hf
from tests.helpers import models
from tests.helpers.models import Nano, bert_config, tokens
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.heads import model_outputs
from manyheads.heads.importance import METHODS, gradients, importance
from manyheads.heads.importance.gradients import fisher
from manyheads.heads.importance.hard_concrete import learned_gates
from manyheads.heads.importance.request import Request
from manyheads.heads.model_outputs import Output, directions, output_distance
from manyheads.heads.observer import gate_gradients, observed
from manyheads.heads.silence import gates, silence
from manyheads.heads.watch import watch

# name: model, its output projections by layer, heads, whether the projection is stored transposed
Plain = tuple[Callable[[], nn.Module], str, int, bool]
PLAIN: dict[str, Plain] = {
    "llama": (models.llama, "model.layers.{}.self_attn.o_proj", 6, False),
    "bert": (models.bert, "encoder.layer.{}.attention.output.dense", 3, False),
    "gpt2": (models.gpt2, "transformer.h.{}.attn.c_proj", 3, True),
}


def batches() -> list[dict[str, Tensor]]:
    return [tokens(0), tokens(1, batch=2)]


def made(name: str) -> tuple[nn.Module, list[tuple[int, int, Tensor]]]:
    """A model in float64, and for each head its layer, its number and a view of the columns that read it."""
    make, path, heads, transposed = PLAIN[name]
    model = make().double().eval()
    found = []
    for layer in range(2):
        weight = model.get_submodule(path.format(layer)).weight
        columns = weight.T if transposed else weight
        found += [(layer, h, columns.unflatten(1, (heads, -1))[:, h]) for h in range(heads)]
    return model, found


def plain_output(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Logits, or the masked mean of the hidden state."""
    with torch.no_grad():
        result = model(**batch)
    if "logits" in result:
        return result.logits
    mask = batch["attention_mask"].unsqueeze(2)
    return (result.last_hidden_state * mask).sum(1) / mask.sum(1)


def plain_difference(full: Tensor, other: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """(batch,) by the textbook formulas."""
    if full.dim() == 2:
        return 1 - F.cosine_similarity(full, other)
    kl = (full.softmax(-1) * (full.log_softmax(-1) - other.log_softmax(-1))).sum(-1)
    mask = batch["attention_mask"]
    return (kl * mask).sum(1) / mask.sum(1)


@pytest.mark.parametrize("name", PLAIN)
def test_leave_one_out_equals_columns_set_to_zero(name: str) -> None:
    model, heads = made(name)
    table = importance(model, batches(), "leave-one-out")
    assert [(row.layer, row.head) for row in table.rows] == [head[:2] for head in heads]
    for row, (_, _, columns) in enumerate(heads):
        values = []
        for batch in batches():
            full, kept = plain_output(model, batch), columns.clone()
            with torch.no_grad():
                columns.zero_()
                values.append(plain_difference(full, plain_output(model, batch), batch))
                columns.copy_(kept)
        each = torch.cat(values)
        assert table["importance"][row].item() == pytest.approx(each.mean().item(), rel=1e-9)
        error = each.std().item() / math.sqrt(len(each))
        assert table["importance_se"][row].item() == pytest.approx(error, rel=1e-6)


def jacobian(model: nn.Module, columns: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The derivative of the output by a gate on the head that these columns read, by differences of fourth
    order: a wide step, because Llama's norms compute in float32 whatever they get.
    """
    step, kept, total = 1e-2, columns.clone(), torch.zeros(())
    for place, weight in ((-2, 1 / 12), (-1, -2 / 3), (1, 2 / 3), (2, -1 / 12)):
        with torch.no_grad():
            columns.mul_(1 + place * step)
            total = total + weight / step * plain_output(model, batch)
            columns.copy_(kept)
    return total


@pytest.mark.parametrize("name", PLAIN)
def test_gate_gradients_equal_finite_differences(name: str) -> None:
    model, heads = made(name)
    batch = tokens(0)
    with observed(model) as observer:
        forward = observer.forward(batch, gradients=True)
        weights = torch.randn(forward.output.value.shape, generator=torch.Generator().manual_seed(1)).double()
        found = gate_gradients(forward.heads, forward.output.value, weights)
    for layer, head, columns in heads:
        expected = (jacobian(model, columns, batch) * weights).flatten(1).sum(1)  # (batch,)
        assert torch.allclose(list(found.values())[layer][:, head], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_fisher_is_the_quadratic_form_on_average(name: str) -> None:
    model, heads = made(name)
    table = fisher(Request(model, batches()), squares=450, enough=900)
    for row, (_, _, columns) in enumerate(heads):
        expected = []
        for batch in batches():
            full, j = plain_output(model, batch), jacobian(model, columns, batch)
            if full.dim() == 2:
                along = F.normalize(full, dim=1)
                across = j - (j * along).sum(1, keepdim=True) * along
                expected.append(across.pow(2).sum(1) / full.pow(2).sum(1) / 2)
            else:
                p, mask = full.softmax(-1), batch["attention_mask"]
                variance = (p * j**2).sum(-1) - (p * j).sum(-1) ** 2
                expected.append((variance * mask).sum(1) / mask.sum(1) / 2)
        exact = torch.cat(expected).mean().item()
        # squares of nearly normal numbers: 450 for the first batch and as many for the second
        assert table["importance"][row].item() == pytest.approx(exact, rel=5 * math.sqrt(2 / 900) + 0.05)


def test_directions_have_the_fisher_information_as_their_covariance() -> None:
    logits = torch.tensor([0.3, -1.1, 0.9], dtype=torch.float64)
    rows = 40_000
    output = Output(logits.expand(rows, 2, 3), torch.tensor([True, False]).expand(rows, 2))
    found = next(directions(output, torch.Generator().manual_seed(0)))
    assert not found[:, 1].any()
    p = logits.softmax(0)
    covariance = found[:, 0].T @ found[:, 0] / rows
    assert torch.allclose(covariance, p.diag() - p.outer(p), atol=0.01)

    embedding = torch.tensor([3.0, 0.0, 4.0], dtype=torch.float64)
    found = next(directions(Output(embedding.expand(rows, 3), None), torch.Generator().manual_seed(0)))
    along = embedding / 5
    wanted = (torch.eye(3).double() - along.outer(along)) / 25
    assert torch.allclose(found.T @ found / rows, wanted, atol=0.001)


def test_a_small_change_is_predicted() -> None:
    """What `difference` measures for a small change is what half a squared direction predicts."""
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(3, 5, 7, generator=generator).double()
    change = 1e-3 * torch.randn(3, 5, 7, generator=generator).double()
    full = Output(value, torch.ones(3, 5, dtype=torch.bool))
    p = value.softmax(-1)
    second_order = ((p * change**2).sum(-1) - (p * change).sum(-1) ** 2).mean(1) / 2
    assert torch.allclose(output_distance(full, Output(value + change, full.real)), second_order, rtol=1e-2)


def test_small_divergences_keep_their_digits_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(1, 3, 997, generator=generator)
    other = value + 1e-4 * torch.randn(1, 3, 997, generator=generator)
    real = torch.ones(1, 3, dtype=torch.bool)
    p, q = value.double().log_softmax(-1), other.double().log_softmax(-1)
    exact = (p.exp() * (p - q)).sum(-1).mean().item()  # about 5e-9
    assert output_distance(Output(value, real), Output(other, real)).item() == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize("per_sequence", [True, False])
def test_gradient_is_the_slope_of_a_loss(per_sequence: bool) -> None:
    model, heads = made("gpt2")

    def loss(result: Any, batch: Any) -> Tensor:
        each = result.logits.pow(2).mean((1, 2))
        return each if per_sequence else each.mean()

    table = importance(model, batches(), "gradient", loss)
    for row, (_, _, columns) in enumerate(heads):
        slopes = []
        for batch in batches():
            each = (2 * plain_output(model, batch) * jacobian(model, columns, batch)).mean((1, 2))
            slopes.append(each if per_sequence else each.mean(0, keepdim=True))
        assert table["importance"][row].item() == pytest.approx(
            torch.cat(slopes).abs().mean().item(), rel=1e-4
        )


def test_leave_one_out_with_a_loss_is_how_much_it_grows() -> None:
    model, heads = made("llama")

    def loss(result: Any, batch: Any) -> Tensor:
        return result.logits.pow(2).mean((1, 2))

    table = importance(model, batches(), "leave-one-out", loss)
    _, head, columns = heads[8]
    values = []
    for batch in batches():
        full, kept = plain_output(model, batch), columns.clone()
        with torch.no_grad():
            columns.zero_()
            values.append((plain_output(model, batch).pow(2) - full.pow(2)).mean((1, 2)))
            columns.copy_(kept)
    assert table["head"][8] == head
    assert table["importance"][8].item() == pytest.approx(torch.cat(values).mean().item(), rel=1e-9)


def test_confidence_and_output_norm_equal_the_materialised_attention() -> None:
    model = models.bert(attn_implementation="eager").double().eval()
    seen: dict[str, list[Tensor]] = {"confidence": [], "output-norm": []}
    values: dict[int, Tensor] = {}
    hooks = [
        layer.attention.self.value.register_forward_hook(
            lambda _module, _args, out, i=i: values.__setitem__(i, out.unflatten(2, (3, 5)).transpose(1, 2))
        )
        for i, layer in enumerate(model.encoder.layer)
    ]
    for batch in batches():
        with torch.no_grad():
            weights = model(**batch, output_attentions=True).attentions
        mask = batch["attention_mask"][:, None]  # of the queries
        for name in seen:
            found = [
                w.amax(-1) if name == "confidence" else (w @ values[i]).norm(dim=-1)
                for i, w in enumerate(weights)
            ]
            seen[name].append(torch.cat([(x * mask).sum((0, 2)) / mask.sum() for x in found]))
    for hook in hooks:
        hook.remove()
    for name, found in seen.items():
        table = importance(model, batches(), name)
        each = torch.stack(found)  # (batches, heads)
        assert torch.allclose(table["importance"], each.mean(0), rtol=1e-9)
        assert torch.allclose(table["importance_se"], each.std(0) / math.sqrt(2), rtol=1e-6)


def test_random_is_a_control() -> None:
    model = models.llama()
    a, b, other = (importance(model, batches(), "random", seed=seed)["importance"] for seed in (0, 0, 1))
    assert a.equal(b)
    assert not a.equal(other)
    assert len(a.unique()) == 12
    assert a.min() >= 0
    assert a.max() < 1


class Windows(nn.Module):
    """Attention within windows that are folded into the batch, windows first."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, 6)
        self.attention = nn.MultiheadAttention(6, 3, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        folded = torch.cat(x.split(3, 1))  # (windows * batch, 3, 6)
        out, _ = self.attention(folded, folded, folded, need_weights=False)
        return x + torch.cat(out.split(len(ids)), 1)


def test_sequences_that_cannot_be_told_apart_count_as_one() -> None:
    torch.manual_seed(0)
    model = Windows().double().eval()
    ids = [tokens(seed, batch=5, length=6)["input_ids"] for seed in range(2)]
    table = fisher(Request(model, ids), squares=4000, enough=8000)
    assert table.sums["importance"][0].tolist() == [2.0, 2.0, 2.0]
    expected = []
    for head in range(3):
        with gates(model, {0: torch.ones(5 * 2, 3, dtype=torch.float64)}):
            full = model(ids[0]).mean(1)
        step, sides = 1e-5, []
        for sign in (1, -1):
            gate = torch.ones(3, dtype=torch.float64)
            gate[head] += sign * step
            with torch.no_grad(), gates(model, {0: gate}):
                sides.append([model(batch).mean(1) for batch in ids])
        each = []
        for batch, up, down in zip(ids, *sides, strict=True):
            full = model(batch).mean(1).detach()
            j, along = (up - down) / (2 * step), F.normalize(full, dim=1)
            across = j - (j * along).sum(1, keepdim=True) * along
            each.append(across.pow(2).sum(1) / full.pow(2).sum(1) / 2)
        expected.append(torch.cat(each).mean())
    assert torch.allclose(table["importance"], torch.stack(expected), rtol=0.25)


def t5_batches() -> Iterator[dict[str, Tensor]]:
    for batch in batches():
        yield batch | {"decoder_input_ids": batch["input_ids"][:, :5]}


@pytest.mark.parametrize(
    ("make", "fed"),
    [
        (models.t5, t5_batches),
        (models.albert, batches),
        (models.bloom, batches),
        (lambda: models.llama(num_hidden_layers=3), batches),
        (Nano, lambda: [batch["input_ids"] for batch in batches()]),
        (lambda: Nano(Split), lambda: [batch["input_ids"] for batch in batches()]),
    ],
    ids=["t5", "albert", "bloom", "llama", "nano", "split"],
)
def test_leave_one_out_equals_silence_on_any_model(make: Callable[[], nn.Module], fed: Any) -> None:
    torch.manual_seed(0)
    model = make().double().eval()
    table = importance(model, fed(), "leave-one-out")
    with torch.no_grad(), watch(model) as seen:
        for batch in fed():
            model(**batch) if isinstance(batch, dict) else model(batch)
    assert table["tokens"].equal(seen.table["tokens"])
    assert table.rows == seen.table.rows
    for row in range(0, len(table), max(2, len(table) // 5)):
        values = []
        for batch in fed():
            with observed(model) as observer:
                full = observer.forward(batch)
                with silence(model, {table["site"][row]: [table["head"][row]]}):
                    other = observer.gated(batch, {})
            values.append(output_distance(full.output, observer.output(other, full)))
        assert table["importance"][row].item() == pytest.approx(
            torch.cat(values).mean().item(), rel=1e-9, abs=1e-15
        )


def calls_of(module: nn.Module, run: Callable[[], object]) -> int:
    count = 0

    def counted(*_: object) -> None:
        nonlocal count
        count += 1

    handle = module.register_forward_hook(counted)
    run()
    handle.remove()
    return count


def test_leave_one_out_does_not_compute_layers_again() -> None:
    model = models.llama()
    run = lambda: importance(model, [tokens(0)], "leave-one-out")  # noqa: E731
    # once in full, then for the six heads of the first layer, and once to see that nothing changes
    assert calls_of(model.model.layers[0].mlp.up_proj, run) == 1 + 6 + 1
    assert calls_of(model.model.layers[1].mlp.up_proj, run) == 1 + 12 + 2


class Weights(nn.Module):
    """Weights made in a module of their own: given back, they would hide that this is attention."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)

    def forward(self, scores: Tensor) -> Tensor:
        return self.dropout(scores.softmax(-1))


class Split(models.NanoAttention):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.weights = Weights()

    def forward(self, x: Tensor) -> Tensor:
        parts = self.c_attn(x).chunk(3, 2)
        q, k, v = (part.unflatten(2, (self.n_head, -1)).transpose(1, 2) for part in parts)
        out = self.weights(q @ k.mT) @ v
        return self.c_proj(out.transpose(1, 2).flatten(2))


class Forgetful(nn.Module):
    """A layer that writes into what it was given: what was returned to it before is no longer there."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Nano()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.inner.embedding(ids)
        for layer in self.inner.h:
            out = layer(x)
            x.add_(out)
        return x


def test_leave_one_out_goes_without_where_running_on_changes_something() -> None:
    torch.manual_seed(0)
    model = Forgetful().double().eval()
    table = importance(model, [tokens(0)["input_ids"]], "leave-one-out")
    with torch.no_grad():
        full = model(tokens(0)["input_ids"]).mean(1)
        with silence(model, {1: [2]}):
            other = model(tokens(0)["input_ids"]).mean(1)
    assert table["importance"][5].item() == pytest.approx(
        (1 - F.cosine_similarity(full, other)).mean().item()
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_model_is_left_as_it_was(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "gates", partial(learned_gates, steps=5))
    model = models.llama()
    model.train()
    model.model.layers[0].eval()
    model.lm_head.weight.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    needed = [parameter.requires_grad for parameter in model.parameters()]
    table = importance(model, batches(), method)
    assert len(table) == 12
    assert table["importance"].isfinite().all()
    if method != "elimination":  # which finds one order, from all batches together
        assert table["importance_se"].isfinite().all()
    assert set(table["kind"]) == {"causal"}
    assert table["kv_head"][:6] == [0, 0, 1, 1, 2, 2]
    assert [module.training for module in model.modules()] == modes
    assert [parameter.requires_grad for parameter in model.parameters()] == needed
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in model.modules())


def test_original_heads_of_a_cut_model_are_named() -> None:
    model = models.llama()
    model.original_heads = {"model.layers.0.self_attn": [1, 2, 3, 4, 5, 7]}
    assert importance(model, batches())["original_head"][:6] == [1, 2, 3, 4, 5, 7]


def test_kinds_are_known() -> None:
    table = importance(models.t5().eval(), list(t5_batches()), "fisher")
    assert set(table["kind"]) == {"self", "causal", "cross"}
    assert set(table["measure"]) == {"KL(full || silenced), nats a token"}


def test_a_classifiers_unit_is_a_sequence() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 5}
    model = hf.BertForSequenceClassification(bert_config(vocab_size=17, **sizes)).eval()
    for method in ("fisher", "leave-one-out"):
        table = importance(model, [{"input_ids": torch.randint(17, (3, 5))}], method)
        assert set(table["measure"]) == {"KL(full || silenced), nats a sequence"}


@pytest.mark.parametrize(
    ("listed", "sequences", "draws"),
    [(True, [2] * 3, [7] * 3), (True, [2], [16]), (True, [5] * 31, [1] * 31), (False, [2, 2, 2], [16, 5, 1])],
)
def test_few_sequences_get_several_backward_passes_and_many_get_one(
    monkeypatch: pytest.MonkeyPatch, listed: bool, sequences: list[int], draws: list[int]
) -> None:
    model, _ = made("bert")
    ids = [tokens(seed, batch=count) for seed, count in enumerate(sequences)]
    passes: dict[int, int] = {}
    real = gradients.gate_gradients

    def counted(heads: Any, value: Any, *arguments: Any, **options: Any) -> Any:
        passes[id(value)] = passes.get(id(value), 0) + 1
        kept.append(value)  # so that no other one gets its id
        return real(heads, value, *arguments, **options)

    kept: list[Any] = []
    monkeypatch.setattr(gradients, "gate_gradients", counted)
    fisher(Request(model, ids if listed else iter(ids)), enough=43)
    assert list(passes.values()) == draws


def test_elimination_within_a_memory_budget():
    """Batches are read several times, for some of the modules each time, and the ranking is the same."""
    model, readings = models.llama(), []

    class Counted(list):
        def __iter__(self):
            readings.append(1)
            return super().__iter__()

    whole = importance(model, batches(), "elimination")
    one = 6 * 8 * 24**2  # six square matrices in float64, for 6 heads of 4
    narrow = importance(model, Counted(batches()), "elimination", memory=one)
    assert len(readings) == 2  # layers
    torch.testing.assert_close(narrow["importance"], whole["importance"])
    assert narrow["tokens"].tolist() == whole["tokens"].tolist()
    with pytest.raises(ValueError, match=r"memory: got 28 kB, and elimination needs 28 kB for .* alone"):
        importance(model, batches(), "elimination", memory=one - 1)
    with pytest.raises(ValueError, match="read several times; expected a list, or more memory"):
        importance(model, iter(batches()), "elimination", memory=one)


def test_directions_do_not_depend_on_how_many_tokens_are_computed_together(monkeypatch):
    """Also for logits that lie in memory in another order."""
    logits = torch.randn(5, 3, 7, generator=torch.Generator().manual_seed(1)).transpose(0, 1)
    output = Output(logits, torch.arange(5) < torch.tensor([[5], [2], [3]]))
    drawn = []
    for together in (2**22, 14):
        monkeypatch.setattr(model_outputs, "_TOGETHER", together)
        drawn.append(next(directions(output, torch.Generator().manual_seed(3))))
    torch.testing.assert_close(*drawn)
    assert drawn[0].shape == logits.shape
    assert bool((drawn[0][1, 2:] == 0).all())  # padding
    torch.testing.assert_close(drawn[0].sum(-1), torch.zeros(3, 5), atol=1e-6, rtol=0)
