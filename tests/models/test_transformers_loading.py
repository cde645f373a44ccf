"""from_pretrained loads cut models, to the bit, and refuses what does not fit."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
import transformers as hf
from tests.helpers import models
from tests.helpers.cut_models import MODELS, chosen
from tests.helpers.models import tokens
from transformers.quantizers import auto

import manyheads as mh
from manyheads.common.compare_outputs import tensors
from manyheads.common.run_batch import run
from manyheads.models.changes import changes_of

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by DeBERTa

THEIRS = [
    "bert", "distilbert", "deberta", "gpt2", "opt", "llama", "qwen3", "gpt-oss", "bloom", "t5", "bart",
    "whisper", "vit",
]  # fmt: skip


@pytest.fixture(autouse=True)
def quiet():
    hf.utils.logging.disable_progress_bar()


def outputs(model, batch):
    with torch.no_grad():
        return dict(tensors(run(model, batch)))


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", THEIRS)
def test_every_cut_model_is_loaded_to_the_bit(name, tmp_path):
    make, batch = MODELS[name]
    model = make().eval()
    small = mh.cut(model, chosen(model, batch), batch).eval()
    mh.save(small, tmp_path / "small")
    expected = outputs(mh.load(tmp_path / "small"), batch)
    loaded = type(small).from_pretrained(tmp_path / "small")
    assert equal(outputs(loaded, batch), expected)
    assert loaded.original_heads == small.original_heads
    assert not loaded.is_quantized
    # what transformers writes, of the loaded model and of the cut one, is loaded as well
    loaded.save_pretrained(tmp_path / "again")
    small.save_pretrained(tmp_path / "directly")
    for folder in ("again", "directly"):
        assert equal(outputs(type(small).from_pretrained(tmp_path / folder), batch), expected)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "bart"])
def test_the_model_without_a_task_s_head_is_loaded(name, tmp_path):
    make, batch = MODELS[name]
    small = mh.cut(make().eval(), chosen(make().eval(), batch), batch).eval()
    mh.save(small, tmp_path / "small")
    body = hf.AutoModel.from_pretrained(tmp_path / "small")
    assert type(body) is not type(small)
    got, expected = outputs(body, batch), outputs(small.base_model if name != "t5" else small, batch)
    shared = [key for key in got if key in expected and "last_hidden" in key]
    assert shared
    assert all(torch.equal(got[key], expected[key]) for key in shared)
    twice = mh.cut(body, {next(iter(body.original_heads)): [0, 1] if name == "llama" else [0]}, batch)
    mh.save(twice, tmp_path / "twice")
    assert equal(outputs(mh.load(tmp_path / "twice"), batch), outputs(twice, batch))


def test_a_model_with_a_new_head_and_half_of_a_model(tmp_path):
    mh.save(mh.cut(models.bert(), {0: [1], 1: [0, 2]}, tokens()), tmp_path / "bert")
    classifier = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "bert", num_labels=5)
    expected = outputs(mh.load(tmp_path / "bert"), tokens())["last_hidden_state"]
    assert torch.equal(outputs(classifier.bert, tokens())["last_hidden_state"], expected)
    classifier.train()(**tokens(), labels=torch.tensor([0, 4, 2])).loss.backward()
    assert all(parameter.grad is not None for parameter in classifier.parameters())
    classifier.save_pretrained(tmp_path / "classifier")
    again = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier")
    assert equal(outputs(again, tokens()), outputs(classifier.eval(), tokens()))
    make, batch = MODELS["t5"]
    small = mh.cut(make(), chosen(make(), batch), batch).eval()
    mh.save(small, tmp_path / "t5")
    half = hf.T5EncoderModel.from_pretrained(tmp_path / "t5")
    assert torch.equal(
        outputs(half, tokens())["last_hidden_state"], outputs(small, batch)["encoder_last_hidden_state"]
    )
    assert all(site.startswith("encoder.") for site in half.original_heads)


def test_whole_layers_and_equal_layers(tmp_path):
    small = mh.cut(models.gpt2(), {0: range(3), 1: [1]}, tokens())
    mh.save(small, tmp_path / "emptied")
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "emptied", device_map={"": "cpu"})
    assert equal(outputs(loaded, tokens()), outputs(small, tokens()))
    even = mh.cut(models.llama(hidden_size=24), {0: [0, 1], 1: [2, 3]}, tokens())
    mh.save(even, tmp_path / "even")
    assert "quantization_config" not in json.loads((tmp_path / "even" / "config.json").read_text())
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "even")
    assert equal(outputs(loaded, tokens()), outputs(even, tokens()))


def test_a_module_whose_class_begins_the_weights_of_torch_s_attention(tmp_path):
    config = hf.SiglipVisionConfig(
        hidden_size=12,
        intermediate_size=11,
        num_hidden_layers=1,
        num_attention_heads=3,
        image_size=6,
        patch_size=3,
    )
    model = models.sharpen(hf.SiglipVisionModel(config))
    batch = {"pixel_values": torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))}
    pooling = next(
        name for name, part in model.named_modules() if isinstance(part, torch.nn.MultiheadAttention)
    )
    small = mh.cut(model, {pooling: [1]}, batch)
    mh.save(small, tmp_path / "small")
    loaded = hf.SiglipVisionModel.from_pretrained(tmp_path / "small")
    assert equal(outputs(loaded, batch), outputs(mh.load(tmp_path / "small"), batch))


def test_what_is_loaded_generates_casts_and_is_cut_again(tmp_path):
    small = mh.cut(models.llama(), {0: [2, 3]}, tokens())
    mh.save(small, tmp_path / "small")
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    ids = tokens()["input_ids"][:1]
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(loaded.generate(ids, **options), small.generate(ids, **options))
    assert loaded.bfloat16().dtype == torch.bfloat16
    twice = mh.cut(loaded.float(), {1: [0, 1]}, tokens())
    mh.save(twice, tmp_path / "twice")
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "twice")
    assert changes_of(again).removed() == {
        "model.layers.0.self_attn": [2, 3],
        "model.layers.1.self_attn": [0, 1],
    }
    assert again.generate(ids, **options).shape == (1, 13)


@pytest.mark.skipif(not hasattr(hf, "Step3p7TextModel"), reason="an older transformers")
def test_a_class_that_has_numbers_for_each_layer_needs_nothing(tmp_path):
    config = hf.Step3p7TextConfig(
        vocab_size=97, hidden_size=18, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=3,
        head_dim=4, num_sliding_attention_heads=6, intermediate_size=11, mlp_layer_types=["dense"] * 3,
        sliding_window=32,
        layer_types=["full_attention", "full_attention", "sliding_attention"], pad_token_id=0,
    )  # fmt: skip
    small = mh.cut(
        models.sharpen(hf.Step3p7TextModel(config), scale=0.3), {0: [0, 1], 1: [0, 2, 4]}, tokens()
    )
    mh.save(small, tmp_path / "small")
    assert "quantization_config" not in json.loads((tmp_path / "small" / "config.json").read_text())
    loaded = hf.Step3p7TextModel.from_pretrained(tmp_path / "small")
    assert equal(outputs(loaded, tokens()), outputs(small, tokens()))
    assert equal(outputs(mh.load(tmp_path / "small"), tokens()), outputs(small, tokens()))


@pytest.fixture
def saved(tmp_path):
    mh.save(mh.cut(models.llama(), {0: [2, 3]}, tokens()), tmp_path / "small")
    return tmp_path / "small"


def rewrite(folder, change):
    path = folder / "config.json"
    values = json.loads(path.read_text())
    change(values["quantization_config"])
    path.write_text(json.dumps(values))


QUERIES = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: record.update(version=99), "a newer manyheads wrote it"),
        (lambda record: record.update(version="1"), "version is the text '1'; expected a whole number"),
        (lambda record: record.pop("changes"), "changes"),
        (lambda record: record["changes"].update(shapes=3), "changes.shapes is 3"),
        (
            lambda record: record["changes"]["shapes"].update({QUERIES: [12, 18]}),
            r"q_proj.weight is \(16, 18\), but config.json says \(12, 18\); get the model again",
        ),
        (
            lambda record: record["changes"]["shapes"].update({QUERIES.replace("0", "7"): [1]}),
            "the changes of its heads do not fit LlamaForCausalLM",
        ),
    ],
)  # fmt: skip
def test_a_damaged_record_is_refused(change, message, saved):
    rewrite(saved, change)
    with pytest.raises(ValueError, match=message):
        hf.AutoModelForCausalLM.from_pretrained(saved)


def test_a_class_without_those_heads_is_refused(saved):
    with pytest.raises(ValueError, match="it has none of the heads of LlamaForCausalLM"):
        hf.GPT2LMHeadModel.from_pretrained(saved, config=_other_config(saved))


def _other_config(folder):
    record = json.loads((folder / "config.json").read_text())["quantization_config"]
    return hf.GPT2Config(n_embd=15, n_layer=2, n_head=3, vocab_size=97, quantization_config=record)


def test_without_manyheads_transformers_refuses(saved, monkeypatch, caplog):
    for registered in (auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING):
        monkeypatch.delitem(registered, "manyheads")
    with pytest.raises(RuntimeError, match="mismatched"):
        hf.AutoModelForCausalLM.from_pretrained(saved)


@pytest.mark.parametrize(
    "first",
    ["import manyheads, sys; assert 'transformers' not in sys.modules", "import transformers.modeling_utils"],
)
def test_either_import_may_come_first(first):
    program = f"""{first}
import manyheads
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
assert "manyheads" in AUTO_QUANTIZER_MAPPING
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_a_model_that_replaced_its_attention_while_it_ran_is_loaded_as_it_is(tmp_path):
    """BigBird has other attention modules after a short text, and its config does not say so."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 12, "intermediate_size": 7, "num_hidden_layers": 1}
    model = hf.BigBirdModel(hf.BigBirdConfig(**sizes, num_attention_heads=3, block_size=4)).eval()
    batch = {"input_ids": torch.randint(70, (2, 11))}
    outputs(model, batch)  # from block_sparse to original_full
    small = mh.cut(model, {0: [1]})
    mh.save(small, tmp_path / "small")
    expected = outputs(small, batch)
    for again in (mh.load(tmp_path / "small"), hf.AutoModel.from_pretrained(tmp_path / "small")):
        actual = outputs(again.eval(), batch)
        assert all(torch.equal(actual[name], value) for name, value in expected.items())
    assert model.config.attention_type == "block_sparse"  # that of the user is left alone
