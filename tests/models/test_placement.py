"""How a model is opened: device, numbers, kernel, revision; GGUF files, adapters, quantised weights."""

from __future__ import annotations

import json

import pytest
import torch
import transformers as hf
from tests.helpers import opaque_kernels
from tests.helpers.models import llama_config
from torch import Tensor, nn
from typer.testing import CliRunner

import manyheads as mh
from manyheads import cli
from manyheads.common import quantised
from manyheads.heads.comparison import sides
from manyheads.heads.options import CompareOptions
from manyheads.models.loaded import Loaded
from manyheads.models.opening import Opening
from manyheads.models.placement import choose_placement

LLAMA = {
    "vocab_size": 97, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "intermediate_size": 28, "max_position_embeddings": 131,
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "llama"
    torch.manual_seed(0)
    hf.LlamaForCausalLM(llama_config(**LLAMA)).save_pretrained(folder)
    return folder


def batch():
    torch.manual_seed(5)
    return {"input_ids": torch.randint(97, (3, 17))}


def refused(name, **options) -> str:
    with pytest.raises(ValueError, match=r"\S") as error:
        mh.open_model(str(name), **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_dtype_attention_and_map(saved) -> None:
    opened = mh.open_model(str(saved), head=True, dtype="bfloat16", attention="eager")
    assert opened.model.dtype == torch.bfloat16
    assert opened.model.config._attn_implementation == "eager"
    assert mh.open_model(str(saved), dtype=torch.float64).model.dtype == torch.float64
    opened = mh.open_model(str(saved), attention=opaque_kernels.OPAQUE, device_map='{"": "cpu"}')
    with torch.no_grad(), mh.watch(opened.model) as seen:
        opened.model(**batch())
    assert seen.missed == {}
    assert mh.open_model(None, attention="eager").model.config._attn_implementation == "eager"
    assert mh.open_model(None, dtype="bfloat16").model.dtype == torch.bfloat16


def test_bad_options_are_one_sentence(saved) -> None:
    assert refused(saved, device="cuda:7").startswith("device: got 'cuda:7'; expected cpu")
    assert "expected auto, bfloat16, float16, float32, float64" in refused(saved, dtype="int4")
    assert refused(saved, attention="flash").startswith("attention: got 'flash'; expected eager")
    sentence = refused(saved, attention="flash_attention_2")
    assert sentence.startswith("attention: flash_attention_2 cannot be used here")
    assert "only models of transformers on the hub take it" in refused(saved, revision="v1")
    assert "give one of them" in refused(saved, device="cpu", device_map="auto")
    assert refused(saved, device_map="moon").startswith("device-map: got 'moon'; expected auto, balanced")
    assert "which is not JSON" in refused(saved, device_map="{moon")
    assert "for MiniLM; only models of transformers" in refused_embedded(device_map="auto")
    assert "for MiniLM; only models of transformers on the hub" in refused_embedded(revision="main")


def refused_embedded(**options) -> str:
    with pytest.raises(ValueError, match=r"\S") as error:
        mh.open_model(None, **options)
    return str(error.value)


def test_a_revision_that_does_not_exist(monkeypatch) -> None:
    class RevisionNotFoundError(OSError):
        pass

    def missing(*args: object, **kwargs: object) -> None:
        assert kwargs["revision"] == "v9"
        raise RevisionNotFoundError("404: v9 is not a valid git identifier")

    monkeypatch.setattr(hf.AutoConfig, "from_pretrained", missing)
    assert refused("owner/name", revision="v9").startswith("revision: owner/name has no 'v9' (404: v9")


def test_a_dtype_that_the_device_lacks(monkeypatch) -> None:
    def without(*args: object, dtype: torch.dtype, **kwargs: object) -> Tensor:
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype\nas MPS has none")

    monkeypatch.setattr(torch, "ones", without)
    with pytest.raises(ValueError, match="dtype: got float64, which the device cpu does not have") as error:
        choose_placement("cpu", "float64")
    assert "\n" not in str(error.value)


def test_the_command_says_it_in_a_sentence(saved, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    for verb in ("inspect", "roles", "diversity", "importance", "prune", "serve", "compare", "cache"):
        wrong = (
            ("--device", "cuda:7"), ("--dtype", "int4"), ("--attention", "flash"), ("--device-map", "moon"),
            ("--revision", "v1"),
        )  # fmt: skip
        for option, value in wrong:
            more = {"prune": ["--keep", "0.5"], "compare": [str(saved)]}.get(verb, [])
            done = CliRunner().invoke(cli.app, [verb, str(saved), option, value, *more])
            assert isinstance(done.exception, ValueError), (verb, option)  # main prints it; exit code 2
            assert str(done.exception).startswith(f"{option[2:]}: got '{value}'"), (verb, option)
    for verb in (["evaluate", str(saved), "--data", "rows.csv"], ["export", str(saved), "--to", "onnx"]):
        done = CliRunner().invoke(cli.app, [*verb, "--dtype", "int4"])
        assert str(done.exception).startswith("dtype: got 'int4'"), verb


def test_two_revisions_are_compared(monkeypatch) -> None:
    """--revision is the first model's, --other-revision the second's, and the sides are told apart."""
    asked = []

    def opened(name, *, head, **how):
        asked.append((name, how["dtype"], how["revision"]))
        return Loaded(name, nn.Identity(), lambda: None, lambda: None)

    monkeypatch.setattr(sides, "open_model", opened)
    monkeypatch.setattr(sides.corpora, "choose", lambda loaded, *options: loaded)
    opening = Opening(dtype="bfloat16", revision="v1")
    both = sides.open_sides("owner/name", None, CompareOptions(other_revision="v2"), opening)
    assert asked == [("owner/name", "bfloat16", "v1"), ("owner/name", "bfloat16", "v2")]
    assert both.names == ("name@v1", "name@v2")
    asked.clear()
    sides.open_sides("owner/name", "folder", CompareOptions(), opening)
    assert asked == [("owner/name", "bfloat16", "v1"), ("folder", "bfloat16", None)]


def write_gguf(model, file) -> None:
    """A file as llama.cpp converts Qwen2 to."""
    import gguf

    config, writer = model.config, gguf.GGUFWriter(file, "qwen2")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        stem, _, end = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(stem)}.{end}", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_files_are_opened(tmp_path) -> None:
    pytest.importorskip("gguf")
    torch.manual_seed(0)
    sizes = {name: size for name, size in LLAMA.items() if name != "head_dim"}
    model = hf.Qwen2ForCausalLM(hf.Qwen2Config(**sizes)).eval()
    file = tmp_path / "model.gguf"
    write_gguf(model, file)
    opened = mh.open_model(str(file), head=True)
    with torch.no_grad():
        torch.testing.assert_close(
            opened.model(**batch()).logits, model(**batch()).logits, rtol=1e-4, atol=1e-4
        )
        with mh.watch(opened.model) as seen:
            opened.model(**batch())
    assert seen.missed == {}
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(file.read_bytes()[:100])
    assert refused(damaged).startswith("MODEL: ")


def test_an_adapter_is_opened(saved, tmp_path, monkeypatch) -> None:
    peft = pytest.importorskip("peft")
    base = hf.AutoModelForCausalLM.from_pretrained(saved)
    config = peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(base, config).eval()
    adapted.save_pretrained(tmp_path / "lora")
    opened = mh.open_model(str(tmp_path / "lora"), head=True)
    with torch.no_grad():
        torch.testing.assert_close(opened.model(**batch()).logits, adapted(**batch()).logits)
        with mh.watch(opened.model) as seen:
            opened.model(**batch())
    assert seen.missed == {}
    assert len(mh.importance(opened.model, [batch()])["importance"]) == 8


def test_an_adapter_without_its_package_is_a_sentence(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "lora"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "nowhere"}))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "needs the package peft" in refused(folder)


class Packed(nn.Module):
    """A linear map that keeps its weights as bytes, and lets no one see how it multiplies."""

    def __init__(self, linear: nn.Linear, gradient: bool) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, None
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter(
            (linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False
        )
        self.register_buffer("scale", scale)
        self.gradient = gradient

    def forward(self, x: Tensor) -> Tensor:
        out = x @ (self.weight.to(x.dtype) * self.scale).T
        return out if self.gradient else torch.from_numpy(out.detach().numpy())


def packed_model(saved, gradient: bool = True):
    model = mh.open_model(str(saved), head=True).model
    rounded = mh.open_model(str(saved), head=True).model
    for layer, twin in zip(model.model.layers, rounded.model.layers, strict=True):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            module = Packed(getattr(layer.self_attn, name), gradient)
            setattr(layer.self_attn, name, module)
            getattr(twin.self_attn, name).weight.data = module.weight * module.scale
    return model, rounded


def test_quantised_weights_are_watched_silenced_and_ranked(saved) -> None:
    model, rounded = packed_model(saved)
    assert len(quantised.quantised_modules(model)) == 8
    results = []
    for each in (model, rounded):
        with torch.no_grad(), mh.watch(each) as seen:
            each(**batch())
        assert seen.missed == {}
        with torch.no_grad(), mh.silence(each, {1: [2]}):
            silenced = each(**batch()).logits
        ranked = [
            mh.importance(each, [batch()], method)["importance"] for method in ("fisher", "leave-one-out")
        ]
        results.append([seen.table["entropy"], silenced, *ranked])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"q_proj' are quantised \(Packed\)"):
        mh.cut(model, {1: [2, 3]})


def test_packed_weights_in_a_half_precision_model(saved) -> None:
    """What packed weights are multiplied with is what the rest of the model is made of."""
    model, _ = packed_model(saved)
    model.bfloat16()
    with torch.no_grad(), mh.watch(model) as seen:
        model(**batch())
    assert seen.missed == {}
    assert all(site.verified for site in seen.sites)


def test_weights_without_a_gradient_are_ranked_by_silencing_alone(saved) -> None:
    model, _ = packed_model(saved, gradient=False)
    for method in ("fisher", "gradient", "elimination"):
        with pytest.raises(ValueError, match="let no gradient through; take method='leave-one-out'"):
            mh.importance(model, [batch()], method)
    assert bool((mh.importance(model, [batch()], "leave-one-out")["importance"] > 0).all())
