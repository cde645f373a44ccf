"""What importance refuses, in one sentence; and leave-one-out that was interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tests.helpers import models
from tests.helpers.models import bert_config, tokens
from torch import Tensor, nn

from manyheads.heads.importance import METHODS, importance
from manyheads.heads.importance.losses import LOSSES, fitting, hide_tokens
from manyheads.heads.model_outputs import Output, output_distance, read_output
from manyheads.heads.observer import observed


@pytest.mark.parametrize("method", METHODS)
def test_no_batches(method: str) -> None:
    with pytest.raises(ValueError, match="batches: expected at least one, got none"):
        importance(models.bert(), [], method)


@pytest.mark.parametrize("total", [2, None], ids=["a list", "a generator"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_reports_how_far_it_is(method: str, total: int | None) -> None:
    batches = (tokens(seed) for seed in (0, 1))
    reports: list[tuple[str, float, float | None]] = []

    def progress(stage: str, done: float, total: float | None) -> None:
        reports.append((stage, done, total))

    importance(models.bert(), list(batches) if total else batches, method, progress=progress)
    stages, done, totals = (list(part) for part in zip(*reports, strict=True))
    assert set(stages) == {method}
    assert done == sorted(done)
    if method == "gates":  # which learns several times from all batches
        assert done[-1] == totals[-1]
    elif method == "mean-ablation":  # which reads all batches for the means first, and then knows how many
        assert (done[-1], set(totals)) == (2, {2})
    else:
        assert (done[-1], set(totals)) == (2, {total})


def test_an_unknown_method_or_loss_names_those_there_are() -> None:
    with pytest.raises(
        ValueError, match=r"method: expected one of fisher, elimination, .*, random.*, got 'magic'"
    ):
        importance(models.bert(), [tokens()], "magic")
    with pytest.raises(ValueError, match=r"loss: expected one of causal, masked, .* got 'hinge'"):
        importance(models.bert(), [tokens()], "gradient", "hinge")


def test_what_a_method_does_not_take() -> None:
    with pytest.raises(ValueError, match="loss: fisher takes none"):
        importance(models.bert(), [tokens()], "fisher", "embedding")
    with pytest.raises(ValueError, match="gates: fisher ranks all heads"):
        importance(models.bert(), [tokens()], "fisher", gates=2)
    with pytest.raises(ValueError, match="gates: expected 1 to 5 heads, got 6"):
        importance(models.bert(), [tokens()], "gates", gates=6)


def test_a_model_without_attention() -> None:
    model = nn.Sequential(nn.Embedding(97, 5), nn.Linear(5, 3))
    with pytest.raises(ValueError, match="model: no attention was seen"):
        importance(model, [tokens()["input_ids"]])


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = models.bert()

    @torch.no_grad()
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return self.inner(input_ids, attention_mask)


@pytest.mark.parametrize("method", ["fisher", "gradient", "relevance", "gates"])
def test_a_model_without_gradients(method: str) -> None:
    with pytest.raises(ValueError, match=r"model: its output has no gradient .* take method='leave-one-out'"):
        importance(Frozen(), [tokens()], method)
    assert len(importance(Frozen(), [tokens()], "leave-one-out")) == 6


def test_a_batch_that_the_model_cannot_run() -> None:
    wrong = {"input_ids": torch.full((2, 5), 10_000)}
    with pytest.raises(
        ValueError, match=r"batches: the model failed on one of input_ids \(2, 5\) \(IndexError"
    ):
        importance(models.bert(), [wrong])


@pytest.mark.parametrize(
    ("loss", "batch", "words"),
    [
        (
            "causal",
            {"logits": torch.zeros(2, 5, 7)},
            "needs 'labels' or 'input_ids' in each batch, got logits",
        ),
        (
            "masked",
            {"input_ids": torch.ones(2, 5)},
            "needs 'labels' in each batch, got input_ids; losses.hide",
        ),
        ("classification", {"input_ids": torch.ones(2, 5)}, "needs 'labels' in each batch, got input_ids"),
        ("seq2seq", {"input_ids": torch.ones(2, 5)}, "needs 'labels' or 'decoder_input_ids' in each batch"),
    ],
)
def test_batches_without_what_the_loss_needs(loss: str, batch: dict[str, Tensor], words: str) -> None:
    shape = (2, 3) if loss == "classification" else (2, 5, 7)
    with pytest.raises(ValueError, match=words):
        LOSSES[loss]({"logits": torch.zeros(shape)}, batch)


def test_a_loss_that_needs_a_head_the_model_has_not() -> None:
    with pytest.raises(ValueError, match=r"loss 'causal' needs logits .* load it with its head"):
        importance(models.bert(), [tokens()], "gradient", "causal")
    with pytest.raises(ValueError, match="compares the sentences of a batch; expected at least 2"):
        importance(models.bert(), [tokens(batch=1)], "gradient")


def test_a_loss_that_is_none() -> None:
    for wrong in (lambda *_: 3.0, lambda *_: torch.ones(2, 2), lambda *_: torch.ones(2, dtype=torch.long)):
        with pytest.raises(ValueError, match="loss: expected a number or one for each sequence"):
            importance(models.bert(), [tokens()], "gradient", wrong)
    with pytest.raises(ValueError, match="loss: its value has no gradient"):
        importance(models.bert(), [tokens()], "gradient", lambda *_: torch.ones(3))


def test_labels_that_do_not_fit() -> None:
    logits = {"logits": torch.zeros(2, 5, 7)}
    with pytest.raises(ValueError, match=r"got labels \(2, 4\) for logits \(2, 5, 7\)"):
        LOSSES["masked"](logits, {"labels": torch.ones(2, 4, dtype=torch.long)})
    with pytest.raises(ValueError, match="expected whole numbers as labels"):
        LOSSES["masked"](logits, {"labels": torch.ones(2, 5)})
    with pytest.raises(ValueError, match="found no label in a batch that counts"):
        LOSSES["masked"](logits, {"labels": torch.full((2, 5), -100)})


def with_labels(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model of transformers and a batch of one sequence for which it computes its own loss."""
    batch = tokens(batch=1)
    small = {"vocab_size": 97, "hidden_size": 15, "num_hidden_layers": 2, "num_attention_heads": 3}
    config = bert_config(**small, intermediate_size=11, num_labels=5)
    if name == "causal":
        return models.llama(), batch | {"labels": batch["input_ids"]}
    if name == "masked":
        hidden = hide_tokens(tokens(batch=1, length=16), 3, [5], torch.Generator().manual_seed(0))
        return models.sharpen(hf.BertForMaskedLM(config)), hidden
    if name == "classification":
        return models.sharpen(hf.BertForSequenceClassification(config)), batch | {"labels": torch.tensor([3])}
    return models.t5(), batch | {"labels": batch["input_ids"][:, :5]}


@pytest.mark.parametrize("name", ["causal", "masked", "classification", "seq2seq"])
def test_losses_equal_those_of_transformers(name: str) -> None:
    model, batch = with_labels(name)
    with torch.no_grad():
        result = model(**batch)
    assert LOSSES[name](result, batch).tolist() == pytest.approx([result.loss.item()], rel=1e-5)
    with observed(model) as observer:
        forward = observer.forward(batch)
        assert fitting(forward.result, model, observer.sites) is LOSSES[name]
    table = importance(model, [batch], "gradient")  # takes the fitting loss by itself
    assert table["importance"].equal(importance(model, [batch], "gradient", name)["importance"])


def test_losses_read_what_there_is_without_labels() -> None:
    model, batch = models.llama(), tokens()
    with torch.no_grad():
        result = model(**batch)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    expected = LOSSES["causal"](result, {"labels": labels})
    assert LOSSES["causal"](result, batch).equal(expected)
    assert not LOSSES["causal"](result, batch["input_ids"]).equal(expected)  # padding counts: nobody said so
    pair = batch["input_ids"], batch["input_ids"].flip(1)
    by_name = {"decoder_input_ids": pair[1]}
    assert LOSSES["seq2seq"](result, pair).equal(LOSSES["seq2seq"](result, by_name))


def test_a_loss_may_read_labels_that_the_model_does_not_take() -> None:
    batch = tokens() | {"labels": torch.tensor([1.0, 2.0, 3.0])}

    def loss(result: Any, batch: dict[str, Tensor]) -> Tensor:
        return result.last_hidden_state.pow(2).mean((1, 2)) * batch["labels"]

    assert importance(models.bert(), [batch], "gradient", loss)["importance"].min() > 0


def test_the_embedding_loss_by_its_formula() -> None:
    hidden = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]])
    means = torch.stack([row[real == 1].mean(0) for row, real in zip(hidden, mask, strict=True)])
    cosines = torch.nn.functional.cosine_similarity(means[:, None], means[None], dim=-1)
    expected = (torch.logsumexp(cosines / 0.05, 1) - 1 / 0.05).mean()
    found = LOSSES["embedding"]({"last_hidden_state": hidden}, {"attention_mask": mask})
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


def test_outputs_are_read_for_what_they_are() -> None:
    decoder = nn.Sequential(nn.Embedding(11, 5))
    assert read_output(torch.zeros(2, 3, 11), decoder).real is not None  # as wide as the vocabulary: logits
    assert read_output(torch.zeros(2, 3, 5), decoder).value.shape == (2, 5)
    assert read_output((torch.zeros(2, 7), None), decoder).value.shape == (2, 7)
    assert read_output(torch.zeros(2, 7, 3, 3), decoder).value.shape == (2, 7)
    assert read_output({"logits": torch.zeros(2, 1)}, decoder).real is None
    for wrong in ("text", {"loss": None}, torch.zeros(3), torch.zeros(2, 3, dtype=torch.long)):
        with pytest.raises(ValueError, match="model: expected"):
            read_output(wrong, decoder)
    with pytest.raises(ValueError, match="its output changed"):
        output_distance(Output(torch.zeros(2, 3), None), Output(torch.zeros(2, 4), None))


def stopping(after: int) -> Any:
    steps = 0

    def step(stage: str, done: float, total: float | None) -> None:
        nonlocal steps
        steps += 1
        if steps == after:
            raise KeyboardInterrupt

    return step


def test_leave_one_out_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    model, state = models.llama(), tmp_path / "state.json"
    batches = [tokens(0), tokens(1, batch=2)]
    whole = importance(model, batches, "leave-one-out")
    with pytest.raises(KeyboardInterrupt):
        importance(model, batches, "leave-one-out", state=state, progress=stopping(3))
    kept = json.loads(state.read_text())["batches"]
    assert [len(sites) for sites in kept.values()] == [2, 1]
    assert not any(module._forward_hooks for module in model.modules())
    ran = 0

    def counted(*_: object) -> None:
        nonlocal ran
        ran += 1

    handle = model.model.layers[1].mlp.up_proj.register_forward_hook(counted)
    again = importance(model, batches[::-1], "leave-one-out", state=state)  # the order does not matter
    handle.remove()
    assert ran == 2 + 1 + 6  # once for each batch, once to see that nothing changes, six heads
    assert torch.allclose(again["importance"], whole["importance"], rtol=1e-12)
    assert torch.allclose(again["importance_se"], whole["importance_se"], rtol=1e-9)


def test_a_state_of_something_else_is_refused(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    importance(models.llama(), [tokens()], "leave-one-out", state=state)
    with pytest.raises(ValueError, match="is of another model"):
        importance(models.bert(), [tokens()], "leave-one-out", state=state)
    with pytest.raises(ValueError, match=r"is of another measured \(difference, here causal\)"):
        importance(models.llama(), [tokens()], "leave-one-out", "causal", state=state)
    state.write_text(state.read_text()[:-20])
    with pytest.raises(ValueError, match=r"state.json is damaged, or is something else"):
        importance(models.llama(), [tokens()], "leave-one-out", state=state)
