"""What is proved of a model, and what becomes of models that cannot be probed."""

import copy

import pytest
import torch
import transformers
from tests.zoo.handwritten import CASES
from torch import Tensor, nn

import manyheads as mh
from manyheads.capture import probed_call
from manyheads.capture.probe_inputs import Inputs
from manyheads.capture.proof import ForwardCall, proof_of
from manyheads.heads.table import HeadTable


class Attention(nn.Module):
    """Heads first: (heads, batch, length, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o, self.runs = nn.Linear(24, 72), nn.Linear(24, 24), 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 6)).permute(2, 3, 0, 1, 4)
        out = (q @ k.mT * 6**-0.5).softmax(-1) @ v
        return self.o(out.permute(1, 2, 0, 3).flatten(2))


class Sigmoid(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 6)).permute(2, 0, 3, 1, 4)
        return self.o(((q @ k.mT).sigmoid() @ v).transpose(1, 2).flatten(2))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Attention(), Attention()).eval()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 11, 24, generator=torch.Generator().manual_seed(1))


def test_heads_are_told_by_weights_not_by_place(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad(), mh.watch(model) as seen:
        model(x)
    assert [(site.heads, site.verified, site.reason) for site in seen.sites] == [(4, True, "")] * 2
    assert seen.missed == {}
    assert seen.table["tokens"].tolist() == [44.0] * 8
    assert "verified" not in seen.table.columns


def test_the_probe_leaves_the_model_and_hooks_of_others_alone(model: nn.Module, x: Tensor) -> None:
    runs: list[int] = []
    model[0].register_forward_hook(lambda *_: runs.append(1))
    state = torch.random.get_rng_state()
    with torch.no_grad(), mh.watch(model):
        model(x)
    assert (runs, model[0].runs, model[1].runs) == ([1], 1, 1)
    assert torch.equal(state, torch.random.get_rng_state())


def forward(model: nn.Module, x: Tensor) -> ForwardCall:
    return ForwardCall(model, model, "", Inputs((x,), {}))


def test_a_proof_is_made_once(model: nn.Module, x: Tensor) -> None:
    first = proof_of(forward(model, x))
    assert proof_of(forward(model, x[:2, :5])) is first
    model[1] = nn.Identity()
    assert proof_of(forward(model, x)) is not first


def test_what_mixes_tokens_unseen_is_named_by_what_it_does(x: Tensor) -> None:
    for part, kind in ((Sigmoid(), "sigmoid"), (nn.Conv1d(11, 11, 1), "convolution")):
        model = nn.Sequential(Attention(), part).eval()
        with torch.no_grad(), mh.watch(model) as seen:
            model(x)
        assert list(seen.missed) == ["1"]
        assert kind in seen.missed["1"]


class Bare(nn.Module):
    """Attention without weights: nothing tells its heads."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x)


def test_what_is_not_proved_is_marked_and_not_changed() -> None:
    model, q = nn.Sequential(Bare()), torch.randn(2, 3, 7, 5)
    with torch.no_grad(), mh.watch(model) as seen:
        model(q)
    assert not seen.sites[0].verified
    assert "no weights" in seen.missed["0"]
    table = seen.table
    assert table["verified"] == [f"no: {seen.sites[0].reason}"] * 3
    assert table.merge(table)["verified"] == table["verified"]
    with pytest.raises(ValueError, match="could not be proved"), mh.silence(model, {0: [1]}):
        model(q)
    with torch.no_grad(), mh.silence(model, {0: [1]}, unverified="allow"):
        assert not model(q)[:, 1].any()


def test_labels_of_the_proof_are_kept_in_files(tmp_path) -> None:
    with torch.no_grad(), mh.watch(nn.Sequential(Bare())) as seen:
        seen.model(torch.randn(2, 3, 7, 5))
    seen.table.save(tmp_path / "heads.csv")
    assert HeadTable.load(tmp_path / "heads.csv")["verified"] == seen.table["verified"]


def test_models_that_cannot_be_probed_run_all_the_same(model: nn.Module, x: Tensor) -> None:
    with mh.watch(model) as seen:
        torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sum())(
            {name: value.detach() for name, value in model.named_parameters()}
        )
        torch.vmap(model)(x[:, None])
        copy.copy(model)(x)
        model._replicate_for_data_parallel()(x)
        model(x[:0])
    assert seen.sites
    meta = copy.deepcopy(model).to("meta")
    with mh.watch(meta) as seen:
        meta(x.to("meta"))
    assert "meta device" in seen.missed[""]
    nested = torch.nested.nested_tensor([torch.randn(5, 24), torch.randn(7, 24)], layout=torch.jagged)
    with mh.watch(nn.Sequential(nn.Linear(24, 6))) as seen:
        seen.model(nested)
    assert "nested" in seen.missed[""]


def test_what_is_refuted_is_named_and_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probed_call, "_is_formula", lambda call, products, alive: False)
    model, x = nn.Sequential(Attention()), torch.randn(2, 5, 24)
    with torch.no_grad(), mh.watch(model) as seen:
        model(x)
    (site,) = seen.sites
    assert site.refuted
    assert "does not give its output" in seen.missed["0"]
    with pytest.raises(ValueError, match="no attention was seen"):
        _ = seen.table
    with pytest.raises(ValueError, match="heads: those of '0' are not what they seem"):
        mh.maps(model, (x,), {"0": [1]})
    with pytest.raises(ValueError, match="could not be proved"), mh.silence(model, {"0": [1]}):
        model(x)


class Repeated(nn.Module):
    """Three key heads, each for two heads in turn, repeated for a softmax by hand or for a fused kernel."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(18, size) for size in (18, 9, 9, 18))
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (6, 3)).transpose(1, 2)
        k, v = (
            linear(x).unflatten(-1, (3, 3)).transpose(1, 2).repeat_interleave(2, 1)
            for linear in (self.k, self.v)
        )
        if self.fused:
            out = nn.functional.scaled_dot_product_attention(q, k, v)
        else:
            out = (q @ k.mT * 3**-0.5).softmax(-1) @ v
        return self.o(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("later", [False, True])  # after the proof was made
def test_equal_key_heads_are_not_one_key_head(fused: bool, dtype: torch.dtype, later: bool) -> None:
    torch.manual_seed(0)
    model, x = Repeated(fused).to(dtype).eval(), torch.randn(2, 11, 18).to(dtype)
    if later:
        with torch.no_grad(), mh.watch(model):
            model(x)
    with torch.no_grad():
        for linear in (model.k, model.v):
            linear.weight[3:6] = linear.weight[:3]
            linear.bias[3:6] = linear.bias[:3]
    with torch.no_grad(), mh.watch(model) as seen:
        model(x)
    assert seen.sites[0].verified
    assert list(seen.table["kv_head"]) == [0, 0, 1, 1, 2, 2]


def test_one_of_two_twins_can_be_cut() -> None:
    torch.manual_seed(0)
    layer, x = mh.MultiHeadAttention(12, heads=4).eval(), torch.randn(2, 11, 12)
    with torch.no_grad():
        for projection in (layer.query, layer.key, layer.value):
            for each in (projection.weight, projection.bias):
                each[3:6], each[9:] = each[:3], each[6:9]
    small = mh.cut(layer, {0: [1]}, batch=x)  # of two groups, this would leave one and two heads
    with mh.silence(layer, {0: [1]}):
        expected = layer(x)
    assert torch.allclose(small(x), expected, atol=1e-6)


def test_attention_between_the_sequences_of_a_batch_is_noted() -> None:
    """Positions are those of sequences there, which nobody would guess."""
    between, within = CASES["samples attend to each other (SAINT)"](), CASES["textbook, fused"]()
    notes = []
    for case in (between, within):
        with torch.no_grad(), mh.watch(case.model) as seen:
            case.model(case.inputs)
        notes.append([note for note in seen.sites[0].notes if "sequences of the batch" in note])
    assert (len(notes[0]), len(notes[1])) == (1, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_rotated_heads_are_proved_in_half_precision(kind, dtype):
    """Rounding hides where products nearly cancel: the rest tells heads apart, and silence takes them."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
    others = {"intermediate_size": 31, "num_hidden_layers": 2, "vocab_size": 97, "pad_token_id": 0}
    config = getattr(transformers, f"{kind}Config")(**sizes, **others)
    model = getattr(transformers, f"{kind}Model")(config).to(dtype).eval()
    ids = torch.randint(3, 97, (3, 17))
    with torch.no_grad(), mh.watch(model) as seen:
        whole = model(ids).last_hidden_state
    assert seen.missed == {}
    assert [(site.heads, max(site.kv_heads)) for site in seen.sites] == [(6, 1), (6, 1)]
    with torch.no_grad(), mh.silence(model, {1: [2, 5]}):
        silenced = model(ids).last_hidden_state
    assert not torch.allclose(whole, silenced)
    small = mh.cut(model, {1: [2, 5]})
    with torch.no_grad():
        torch.testing.assert_close(small(ids).last_hidden_state, silenced, rtol=0.05, atol=0.05)
