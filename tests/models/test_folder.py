"""save and load: to the bit, whole or not at all, and nothing surprising gets in."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch
import transformers as hf
from tests.helpers import models
from tests.helpers.cut_models import MODELS, chosen, torch_encoder
from tests.helpers.models import tokens
from torch import nn

import manyheads as mh
from manyheads.common.compare_outputs import tensors
from manyheads.common.run_batch import run
from manyheads.models import folder as files

FACTORIES = {"nn.TransformerEncoder": torch_encoder}


def equal(a, b, batch):
    with torch.no_grad():
        wanted, got = dict(tensors(run(a, batch))), dict(tensors(run(b, batch)))
    return wanted.keys() == got.keys() and all(torch.equal(wanted[name], got[name]) for name in wanted)


@pytest.mark.parametrize(
    "name", ["bert", "gpt2", "llama", "bloom", "t5", "nn.TransformerEncoder", "Decoder", "Encoder", "Seq2Seq"]
)
def test_a_round_trip_equals_to_the_bit(name, tmp_path):
    make, batch = MODELS[name]
    model = make().eval()
    small = mh.cut(model, chosen(model, batch), batch).eval()
    mh.save(small, tmp_path / "small")
    again = mh.load(tmp_path / "small", FACTORIES.get(name))
    assert type(again) is type(small)
    assert equal(small, again, batch)
    assert again.original_heads == small.original_heads
    assert {k: v.dtype for k, v in again.state_dict().items()} == {
        k: v.dtype for k, v in small.state_dict().items()
    }
    first = next(site for site, kept in again.original_heads.items() if len(kept) > 1)
    heads = [0] if name not in ("llama", "Decoder") else [0, 1]
    twice = mh.cut(again, {first: heads}, batch)
    mh.save(twice, tmp_path / "twice")
    assert equal(twice, mh.load(tmp_path / "twice", FACTORIES.get(name)), batch)


def test_layers_without_attention_come_back(tmp_path):
    model = models.gpt2()
    small = mh.cut(model, {0: range(3), 1: [1]}, tokens())
    mh.save(small, tmp_path / "small")
    again = mh.load(tmp_path / "small")
    assert equal(small, again, tokens())
    assert again.original_heads["transformer.h.0.attn"] == []


def test_a_model_that_was_never_cut_can_be_saved(tmp_path):
    model = models.bert()
    mh.save(model, tmp_path / "whole")
    assert equal(model, mh.load(tmp_path / "whole"), tokens())
    assert equal(model, hf.BertModel.from_pretrained(tmp_path / "whole"), tokens())


def test_half_precision_and_tied_weights_stay(tmp_path):
    small = mh.cut(models.gpt2().to(torch.bfloat16), {0: [1]}, tokens())
    mh.save(small, tmp_path / "small")
    again = mh.load(tmp_path / "small")
    assert again.lm_head.weight is again.transformer.wte.weight
    assert again.lm_head.weight.dtype == torch.bfloat16
    assert equal(small, again, tokens())


def test_equal_layers_load_without_manyheads(tmp_path):
    model = models.llama(hidden_size=24)
    small = mh.cut(model, {0: [0, 1], 1: [2, 3]}, tokens())
    mh.save(small, tmp_path / "small")
    plain = hf.LlamaForCausalLM.from_pretrained(tmp_path / "small")
    assert plain.config.num_attention_heads == 4
    assert plain.config.num_key_value_heads == 2
    assert equal(small, plain, tokens())
    assert json.loads((tmp_path / "small" / "heads.json").read_text())["plain"] is True
    assert equal(small, mh.load(tmp_path / "small"), tokens())
    uneven = mh.cut(model, {0: [0, 1]}, tokens())
    mh.save(uneven, tmp_path / "uneven")
    assert json.loads((tmp_path / "uneven" / "heads.json").read_text())["plain"] is False


def test_heads_json_says_what_was_removed(tmp_path):
    mh.save(mh.cut(models.bert(), {0: [1], 1: [0, 2]}, tokens()), tmp_path / "small")
    said = json.loads((tmp_path / "small" / "heads.json").read_text())
    assert said["removed"] == {
        "encoder.layer.0.attention.self": [1],
        "encoder.layer.1.attention.self": [0, 2],
    }
    assert said["manyheads"] == mh.__version__
    assert set(said["files"]) == {"config.json", "model.safetensors"}


class Tokenizer:
    def save_pretrained(self, folder):
        with open(f"{folder}/tokenizer.json", "w") as file:
            file.write("{}")


def test_the_tokenizer_is_kept(tmp_path):
    model = models.bert()
    mh.save(model, tmp_path / "given", tokenizer=Tokenizer())
    model.tokenizer = Tokenizer()
    mh.save(model, tmp_path / "attached")
    for name in ("given", "attached"):
        assert (tmp_path / name / "tokenizer.json").read_text() == "{}"


@pytest.fixture
def saved(tmp_path):
    small = mh.cut(torch_encoder(), {0: [1]}, torch.randn(2, 5, 15))
    mh.save(small, tmp_path / "small")
    return tmp_path / "small"


def rewrite(folder, **changes):
    """Change heads.json and make its hash right again."""
    path = folder / "heads.json"
    said = json.loads(path.read_text())
    said.pop("sha256")
    said |= changes
    said["sha256"] = files._hash_of(said)
    path.write_text(json.dumps(said))


def test_damage_is_found(saved):
    weights = saved / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"damaged, or changed since"):
        mh.load(saved, torch_encoder)
    weights.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"damaged, or changed since"):
        mh.load(saved, torch_encoder)
    weights.unlink()
    with pytest.raises(ValueError, match=r"model.safetensors is missing"):
        mh.load(saved, torch_encoder)


def test_a_changed_or_cut_off_plan_is_found(saved):
    path = saved / "heads.json"
    text = path.read_text()
    path.write_text(text.replace('"removed"', '"Removed"'))
    with pytest.raises(ValueError, match=r"damaged, or changed since"):
        mh.load(saved, torch_encoder)
    path.write_text(text[:100])
    with pytest.raises(ValueError, match=r"damaged"):
        mh.load(saved, torch_encoder)
    path.unlink()
    with pytest.raises(ValueError, match=r"has no heads.json"):
        mh.load(saved, torch_encoder)


def test_a_newer_version_and_foreign_files_are_refused(saved):
    rewrite(saved, version=2)
    with pytest.raises(ValueError, match=r"written by a newer manyheads"):
        mh.load(saved, torch_encoder)
    rewrite(saved, version=1, files={"../small/model.safetensors": "0"})
    with pytest.raises(ValueError, match=r"is missing"):
        mh.load(saved, torch_encoder)
    rewrite(saved, format="something else")
    with pytest.raises(ValueError, match=r"its format is .something else.; expected .manyheads model"):
        mh.load(saved, torch_encoder)


@pytest.mark.parametrize("surprise", ["more", "less", "shape", "kind"])
def test_weights_with_surprises_are_refused(saved, surprise):
    path = saved / "model.safetensors"
    state = safetensors.torch.load_file(path)
    name = "layers.1.linear1.weight"
    if surprise == "more":
        state["layers.2.weight"] = torch.zeros(2)
    elif surprise == "less":
        del state[name]
    else:
        state[name] = state[name][1:].clone() if surprise == "shape" else state[name].long()
    safetensors.torch.save_file(state, path)
    rewrite(saved, files={"model.safetensors": files._hash(path)})
    with pytest.raises(ValueError, match=r"does not have|lack|needs|is needed"):
        mh.load(saved, torch_encoder)


def test_a_factory_must_fit(saved):
    with pytest.raises(ValueError, match=r"factory: .* not a class of transformers or manyheads"):
        mh.load(saved)
    with pytest.raises(TypeError, match=r"factory: expected it to return"):
        mh.load(saved, lambda: 3)
    with pytest.raises(ValueError, match=r"does not fit|does not have|lack"):
        mh.load(saved, lambda: nn.Linear(2, 3))


def test_code_is_never_taken_from_the_folder(saved):
    rewrite(saved, **{"class": "transformers.models.evil.Evil"})
    with pytest.raises(ValueError, match=r"has no model Evil"):
        mh.load(saved)
    rewrite(saved, **{"class": "os.system"})
    with pytest.raises(ValueError, match=r"not a class of transformers or manyheads"):
        mh.load(saved)


def test_an_existing_folder_is_not_touched(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine.txt").write_text("keep")
    with pytest.raises(ValueError, match=r"already exists"):
        mh.save(models.bert(), tmp_path / "there")
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["mine.txt"]
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module, got int"):
        mh.save(3, tmp_path / "new")


def test_an_interrupted_save_leaves_nothing(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "_hash", stop)
    with pytest.raises(KeyboardInterrupt):
        mh.save(models.bert(), tmp_path / "small")
    assert list(tmp_path.iterdir()) == []
