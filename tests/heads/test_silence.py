"""silence and gates: equal to zeroed columns, differentiable, also checkpointed, never silently nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.helpers import models
from tests.helpers.models import Nano, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import manyheads as mh
from manyheads.heads.silence import gates, silence
from manyheads.nn.multihead import MultiHeadAttention


def output_of(result: Any) -> Tensor:
    found = result if isinstance(result, Tensor) else result[0]
    assert isinstance(found, Tensor)
    return found


def zeroed(weight: Tensor, heads: list[int], count: int, transposed: bool = False) -> None:
    with torch.no_grad():
        columns = weight.T if transposed else weight  # (d_model, heads * d_value)
        columns.view(columns.shape[0], count, -1)[:, heads] = 0.0


class TorchMultihead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, 15)
        self.attention = nn.MultiheadAttention(15, 3, batch_first=True)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        out, _ = self.attention(x, x, x, key_padding_mask=attention_mask == 0)
        return out  # type: ignore[no-any-return]


class Ours(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, 15)
        self.attention = MultiHeadAttention(15, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        return self.attention(x, mask=attention_mask.bool()[:, None, None])  # type: ignore[no-any-return]


CASES: dict[str, tuple[Callable[[], nn.Module], str, str, int]] = {
    "bert sdpa": (models.bert, "encoder.layer.1.attention.self", "encoder.layer.1.attention.output.dense", 3),
    "bert eager": (
        lambda: models.bert(attn_implementation="eager"),
        "encoder.layer.1.attention.self", "encoder.layer.1.attention.output.dense", 3,
    ),
    "gpt2": (models.gpt2, "transformer.h.1.attn", "transformer.h.1.attn.c_proj", 3),
    "llama": (models.llama, "model.layers.0.self_attn", "model.layers.0.self_attn.o_proj", 6),
    "bloom": (models.bloom, "h.1.self_attention", "h.1.self_attention.dense", 3),
    "gpt-oss": (models.gpt_oss, "layers.1.self_attn", "layers.1.self_attn.o_proj", 6),
    "t5": (
        models.t5, "decoder.block.1.layer.1.EncDecAttention", "decoder.block.1.layer.1.EncDecAttention.o", 3,
    ),
    "torch": (TorchMultihead, "attention", "attention.out_proj", 3),
    "ours": (Ours, "attention", "attention.output", 3),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_silence_equals_zeroed_columns(name: str) -> None:
    make, site, projection, count = CASES[name]
    torch.manual_seed(0)
    model, batch = make().eval(), tokens()
    if name == "t5":
        batch["decoder_input_ids"] = batch["input_ids"]
    heads = [0, count - 1]
    with torch.no_grad():
        plain = output_of(model(**batch))
        with silence(model, {site: heads}):
            silent = output_of(model(**batch))
        assert torch.equal(output_of(model(**batch)), plain)
        weight = model.get_submodule(projection).weight
        zeroed(weight, heads, count, transposed=type(model.get_submodule(projection)).__name__ == "Conv1D")
        wanted = output_of(model(**batch))
    assert not torch.equal(plain, silent)
    torch.testing.assert_close(silent, wanted, atol=1e-6, rtol=1e-6)


def test_silence_nests_and_takes_layer_numbers() -> None:
    model, batch = models.llama(), tokens()
    with torch.no_grad():
        with silence(model, {0: [1], 1: [2, 5]}):
            together = model(**batch).logits
        with (
            silence(model, {0: [1]}),
            silence(model, {"model.layers.1.self_attn": [2]}),
            silence(model, {1: [5]}),
        ):
            nested = model(**batch).logits
    assert torch.equal(together, nested)


def test_errors() -> None:
    model, batch = models.bert(), tokens()
    with pytest.raises(ValueError, match="has 3 heads, 0 to 2; there is no head 3"), silence(model, {0: [3]}):
        model(**batch)
    with pytest.raises(ValueError, match=r"no module 'encoder\.layer\.9'"):
        silence(model, {"encoder.layer.9": [0]})
    with pytest.raises(ValueError, match="layer 7 was never called"), silence(model, {7: [0], 0: [0]}):
        model(**batch)
    with (
        pytest.raises(ValueError, match=r"layer 0 was never called.*Attention seen: none"),
        silence(model, {0: [0]}),
    ):
        pass
    with pytest.raises(KeyError, match="mine"), silence(model, {7: [0]}):
        raise KeyError("mine")
    for wrong, error in (
        ({0: [-1]}, ValueError),
        ({0: 1}, TypeError),
        ({0: [0.5]}, TypeError),
        ([3], TypeError),
    ):
        with pytest.raises(error, match="heads"):
            silence(model, wrong)  # type: ignore[arg-type]


def test_a_layer_number_that_fits_encoder_and_decoder_raises() -> None:
    model, batch = models.t5(), tokens()
    with pytest.raises(ValueError, match=r"layer 1 fits several sites: 'encoder.*' and 'decoder.*'"):  # noqa: SIM117
        with silence(model, {1: [0]}):
            model(**batch, decoder_input_ids=batch["input_ids"])


def weighted(out: Tensor) -> Tensor:
    return (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum()


def test_gates_have_the_gradient_of_their_head() -> None:
    """Against finite differences in float64, with padding."""
    model, batch = models.bert().double(), tokens()
    with gates(model) as found:
        weighted(model(**batch)[0]).backward()
    assert list(found) == ["encoder.layer.0.attention.self", "encoder.layer.1.attention.self"]
    for site, gate in found.items():
        for head in (0, 2):
            ends = []
            for step in (-1e-5, 1e-5):
                value = torch.ones(3, dtype=torch.float64)
                value[head] += step
                with torch.no_grad(), gates(model, {site: value}):
                    ends.append(weighted(model(**batch)[0]))
            torch.testing.assert_close(gate.grad[head], (ends[1] - ends[0]) / 2e-5, atol=1e-6, rtol=1e-6)


def test_gates_per_sequence_and_their_errors() -> None:
    model, batch = models.bert(), tokens()
    one = torch.ones(3, 3)
    one[1, 2] = 0.0
    with torch.no_grad():
        plain = model(**batch)[0]
        with gates(model, {1: one}):
            gated = model(**batch)[0]
        with silence(model, {1: [2]}):
            silent = model(**batch)[0]
    assert torch.equal(gated[[0, 2]], plain[[0, 2]])
    assert torch.equal(gated[1], silent[1])
    with (
        pytest.raises(ValueError, match=r"needs \(3,\) or \(3, 3\), got \(2, 3\)"),
        gates(model, {1: torch.ones(2, 3)}),
    ):
        model(**batch)
    with pytest.raises(ValueError, match="there is no head 3"), gates(model, {1: torch.ones(4)}):
        model(**batch)
    with pytest.raises(ValueError, match="expected a floating tensor"):
        gates(model, {1: torch.ones(3, dtype=torch.int)})


class Checkpointed(nn.Module):
    """A shared layer called three times, each time under a checkpoint."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.nano, self.reentrant = Nano().double().eval(), reentrant

    def forward(self, ids: Tensor) -> Tensor:
        x = self.nano.embedding(ids)
        for _ in range(3):
            for layer in self.nano.h:
                if self.reentrant is None:
                    x = x + layer(x)
                else:
                    x = x + checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gates_and_silence_under_gradient_checkpointing(reentrant: bool, inside: bool) -> None:
    """Also when the backward pass comes after the contexts, and for each call of a shared layer by itself."""
    ids = tokens()["input_ids"]
    grads = []
    for way in (None, reentrant):
        torch.manual_seed(0)
        model = Checkpointed(way)
        with gates(model) as found, silence(model, {"nano.h.0#2": [1]}):
            loss = weighted(model(ids))
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        assert list(found) == ["nano.h.0", "nano.h.1", "nano.h.0#2", "nano.h.1#2", "nano.h.0#3", "nano.h.1#3"]
        grads.append([gate.grad for gate in found.values()] + [p.grad for p in model.parameters()])
    for plain, again in zip(*grads, strict=True):
        torch.testing.assert_close(plain, again)
    assert grads[0][2][1] == 0.0  # of the silenced head
    assert grads[0][2][0] != 0.0


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_gates_of_a_bfloat16_model_stay_float32() -> None:
    layer = MultiHeadAttention(16, 2).bfloat16()
    with gates(layer) as found, torch.no_grad(), torch.backends.mkldnn.flags(enabled=False):  # see test_watch
        out = layer(torch.ones(2, 5, 16, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16
    assert {gate.dtype for gate in found.values()} == {torch.float32}


def test_mean_ablation_puts_the_mean_output_in_its_place():
    torch.manual_seed(0)
    model = mh.Encoder(d_model=15, heads=5, layers=2, vocabulary=31).double().eval()
    ids, lengths = torch.randint(31, (3, 7)), torch.tensor([7, 4, 2])
    batches = [{"x": ids, "lengths": lengths}, {"x": torch.randint(31, (2, 5))}]
    joined: list[torch.Tensor] = []
    output = model.blocks[0].attention.output
    handle = output.register_forward_pre_hook(lambda module, args: joined.append(args[0]))
    for batch in batches:
        model(**batch)
    handle.remove()
    real = torch.arange(7) < lengths[:, None]
    mean = torch.cat([joined[0][real], joined[1].flatten(0, 1)]).mean(0)  # padding does not count

    def replaced(module, args):
        heads = args[0].clone()
        heads[..., 3:6], heads[..., 12:15] = mean[3:6], mean[12:15]
        return (heads,)

    with mh.silence(model, {0: [1, 4]}, mean_of=batches):
        ablated = model(ids)
    handle = output.register_forward_pre_hook(replaced)
    expected = model(ids)
    handle.remove()
    torch.testing.assert_close(ablated, expected)
    assert not torch.allclose(ablated, model(ids))


def test_importance_by_mean_ablation_is_what_silencing_says():
    torch.manual_seed(0)
    model = mh.Encoder(d_model=15, heads=5, layers=2, vocabulary=31).double().eval()
    batches = [torch.randint(31, (1, 7)) for _ in range(3)]
    table = mh.importance(model, batches, "mean-ablation")
    for layer, head in ((0, 2), (1, 4)):
        changes = []
        for ids in batches:
            with mh.silence(model, {layer: [head]}, mean_of=batches):
                one = model(ids).mean(1)
            changes.append(1 - torch.cosine_similarity(one, model(ids).mean(1)).item())
        assert table["importance"][5 * layer + head].item() == pytest.approx(sum(changes) / 3, abs=1e-9)


def test_mean_ablation_of_a_head_that_never_varies_changes_nothing():
    torch.manual_seed(0)
    model = mh.Encoder(d_model=15, heads=5, layers=1, vocabulary=31).double().eval()
    with torch.no_grad():
        attention = model.blocks[0].attention
        attention.value.weight[3:6] = 0.0
        attention.value.bias[3:6] = 1.0
    ids = torch.randint(31, (2, 7))
    plain = model(ids)
    with mh.silence(model, {0: [1]}, mean_of=[ids]):
        torch.testing.assert_close(model(ids), plain)
    with mh.silence(model, {0: [1]}):
        silenced = model(ids)
    assert not torch.allclose(silenced, plain)


@pytest.mark.parametrize("mean", [False, True])
def test_a_silent_head_is_silent_whatever_it_put_out(mean):
    """Zero times infinity is no number."""
    torch.manual_seed(0)
    layer = mh.MultiHeadAttention(12, heads=3, bias=False).eval()
    x = torch.randn(2, 5, 12)
    batches = [x] if mean else None
    silenced = mh.silence(layer, {0: [1]}, mean_of=batches)
    with torch.no_grad():
        with silenced:
            expected = layer(x)
        means = mh.silence(layer, {0: [1]}, mean_of=batches)
        layer.value.weight[4:8] = torch.inf
        with means:
            actual = layer(x)
    torch.testing.assert_close(actual, expected)
