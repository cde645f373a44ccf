"""Cut on disk: the same tensors as cut and save in memory, and nothing half-written."""

from __future__ import annotations

import errno
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.helpers.models import bert_config, gpt2_config, llama_config, t5_config

import manyheads as mh
from manyheads.common.errors import FailedChangeError
from manyheads.models import checkpoint
from manyheads.surgery import cut_on_disk as module
from manyheads.surgery.small_twin import Scale


def built(kind, config):
    """A model whose weights are all random, biases too."""
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def llama():
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 2}
    config = llama_config(**sizes, intermediate_size=53, vocab_size=101)
    return built(transformers.LlamaForCausalLM, config)


def gpt2():
    config = gpt2_config(n_embd=33, n_head=3, n_layer=2, vocab_size=101, n_positions=97)
    return built(transformers.GPT2LMHeadModel, config)


def bert():
    sizes = {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 47}
    return built(transformers.BertModel, bert_config(**sizes, vocab_size=101))


def t5():
    config = t5_config(d_model=35, d_kv=8, num_heads=5, num_layers=2, d_ff=31, vocab_size=101)
    return built(transformers.T5EncoderModel, config)


CASES = {
    "llama": (llama, {0: [0, 1], 1: [2, 5, 1]}),  # a group, and one of every group
    "gpt2": (gpt2, {0: [1], 1: [0, 1, 2]}),  # packed projections, and a layer without heads whose bias stays
    "bert": (bert, {0: [1, 3], 1: [0]}),
    "t5": (t5, {1: [1]}),  # a layer that is given the biases of all heads
}


@pytest.mark.parametrize("name", CASES)
def test_same_tensors_and_record_as_in_memory(name, tmp_path):
    make, heads = CASES[name]
    model = make()
    model.save_pretrained(tmp_path / "large", max_shard_size="30KB")
    assert len(list((tmp_path / "large").glob("*.safetensors"))) > 1
    mh.save(mh.cut(model, heads), tmp_path / "memory")
    done = mh.cut_on_disk(tmp_path / "large", heads, tmp_path / "disk")
    assert done.difference <= 1e-5
    assert done.bytes_after < done.bytes_before
    for file in ("model.safetensors", "buffers.safetensors"):
        if (tmp_path / "memory" / file).is_file():
            memory, disk = (load_file(tmp_path / place / file) for place in ("memory", "disk"))
            assert disk.keys() == memory.keys()
            for tensor in memory:
                assert disk[tensor].dtype == memory[tensor].dtype
                assert torch.equal(disk[tensor], memory[tensor]), tensor
    memory, disk = (json.loads((tmp_path / p / "heads.json").read_text()) for p in ("memory", "disk"))
    for part in ("class", "original_heads", "removed", "plain", "changes"):
        assert disk[part] == memory[part], part
    memory, disk = (json.loads((tmp_path / p / "config.json").read_text()) for p in ("memory", "disk"))
    assert disk == memory
    ids = torch.arange(7, 25).view(2, 9)
    a, b = (mh.load(tmp_path / place) for place in ("memory", "disk"))
    assert torch.equal(a(ids)[0], b(ids)[0])
    again = type(model).from_pretrained(tmp_path / "disk", dtype="auto")
    assert again.original_heads == b.original_heads
    assert torch.equal(again.eval()(ids)[0], b(ids)[0])


def test_bfloat16_and_the_same_number_in_every_layer(tmp_path):
    """The config can then say it: plain from_pretrained loads the folder."""
    model = llama().bfloat16()
    model.save_pretrained(tmp_path / "large")
    mh.cut_on_disk(tmp_path / "large", {0: [0, 1], 1: [2, 3]}, tmp_path / "small")
    assert json.loads((tmp_path / "small" / "heads.json").read_text())["plain"]
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 2, 8)
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config
    small = load_file(tmp_path / "small" / "model.safetensors")
    for layer, stay in enumerate(([1, 2], [0, 2])):
        weight = model.model.layers[layer].self_attn.k_proj.weight.view(3, 8, 48)
        expected = weight[stay].reshape(16, 48)
        assert torch.equal(small[f"model.layers.{layer}.self_attn.k_proj.weight"], expected)
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "small", dtype="auto").eval()
    ids = torch.arange(7, 25).view(2, 9)
    with mh.silence(model, {0: [0, 1], 1: [2, 3]}, unverified="allow"):
        expected = model(ids).logits
    assert plain.dtype == torch.bfloat16
    assert torch.allclose(plain(ids).logits.float(), expected.float(), atol=0.1)
    assert plain.generate(ids, max_new_tokens=2, do_sample=False).shape == (2, 11)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    config = gpt2_config(n_embd=24, n_head=3, n_layer=1, vocab_size=61, n_positions=97)
    model = built(transformers.GPT2LMHeadModel, config)
    model.save_pretrained(folder / "model")
    return folder / "model", model


def test_a_plan_names_the_class_it_was_made_for(large, tmp_path):
    """With the head of a task or without: its sites have other names, and its fingerprint is another."""
    folder, model = large
    sites = {"h.0.attn": 3}
    opened = mh.open_model(str(folder)).model
    plan = mh.Plan({"h.0.attn": [2]}, sites, mh.heads.fingerprint.fingerprint(opened))
    mh.cut_on_disk(folder, plan, tmp_path / "base")
    assert json.loads((tmp_path / "base" / "heads.json").read_text())["class"].endswith(".GPT2Model")
    other = mh.Plan(dict(plan), sites, "0123456789abcdef")
    with pytest.raises(ValueError, match="made for the model 0123456789abcdef"):
        mh.cut_on_disk(folder, other, tmp_path / "other")
    for part in (model, model.transformer):  # every way in which the folder may have been opened
        of_part = module.LargeModel(folder, mh.Plan({}, sites, mh.heads.fingerprint.fingerprint(part)))
        assert type(of_part.model) is type(part)


def test_a_wrong_row_is_noticed_and_nothing_is_written(large, tmp_path, monkeypatch):
    blocks = Scale.blocks
    monkeypatch.setattr(Scale, "blocks", lambda *args: [(a + 1, b + 1) for a, b in blocks(*args)])
    with pytest.raises(FailedChangeError, match="of the cut model differs from the silenced one"):
        mh.cut_on_disk(large[0], {0: [0, 2]}, tmp_path / "small")
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_and_a_full_disk_leave_nothing(large, tmp_path, monkeypatch):
    def stop(stage, done, total):
        if (stage, done) == ("write", 3):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mh.cut_on_disk(large[0], {0: [0]}, tmp_path / "small", progress=stop)
    assert list(tmp_path.iterdir()) == []

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "write_tensors", full)
    with pytest.raises(OSError, match="No space left"):
        mh.cut_on_disk(large[0], {0: [0]}, tmp_path / "small")
    assert list(tmp_path.iterdir()) == []
    usage = type("usage", (), {"free": 11})
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ValueError, match=r"takes 0.0 GB, and .* has 0.0 GB left"):
        mh.cut_on_disk(large[0], {0: [0]}, tmp_path / "small")


def test_folders_that_cannot_be_cut(large, tmp_path):
    folder, model = large
    small = tmp_path / "small"
    with pytest.raises(ValueError, match=r"has no config\.json"):
        mh.cut_on_disk(tmp_path, {0: [1]}, small)
    for heads, words in (({0: [3]}, "head"), ({0: []}, "at least one head"), ({7: [0]}, "7")):
        with pytest.raises(ValueError, match=words):
            mh.cut_on_disk(folder, heads, small)
    parts = tmp_path / "parts"
    model.save_pretrained(parts, max_shard_size="5KB")
    config = json.loads((parts / "config.json").read_text())
    for values, words in (
        ({"quantization_config": {"quant_method": "torchao"}}, "quantised"),
        ({"n_embd": 48}, r"config\.json asks for"),
        ({"n_layer": 3}, "its weights lack 24 tensors"),
    ):
        (parts / "config.json").write_text(json.dumps(config | values))
        with pytest.raises(ValueError, match=words):
            mh.cut_on_disk(parts, {0: [1]}, small)
    (parts / "config.json").write_text(json.dumps(config))
    next(parts.glob("model-00002*")).unlink()
    with pytest.raises(ValueError, match="is missing; the folder is incomplete"):
        mh.cut_on_disk(parts, {0: [1]}, small)
    (parts / checkpoint.INDEX).unlink()
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        mh.cut_on_disk(parts, {0: [1]}, small)
    (parts / "heads.json").write_text("{}")
    with pytest.raises(ValueError, match="was already cut"):
        mh.cut_on_disk(parts, {0: [1]}, small)
    assert not small.exists()
    small.mkdir()
    (small / "file").touch()
    with pytest.raises(ValueError, match="already exists"):
        mh.cut_on_disk(folder, {0: [1]}, small)


def test_rows_that_are_no_whole_heads_are_refused():
    """As when the numbers of all heads lie between each other."""
    assert Scale(4, 16).blocks([0, 1, 2, 3, 8, 9, 10, 11], 12) == [(0, 16), (32, 48)]
    with pytest.raises(ValueError, match="do not lie side by side"):
        Scale(4, 16).blocks([0, 2, 3, 4], 12)
    with pytest.raises(ValueError, match="not whole heads"):
        Scale(4, 16).blocks([0, 1, 2], 12)
    assert Scale(4, 16).value("width", 12, 48, 8) == 32
    with pytest.raises(ValueError, match="became"):
        Scale(4, 16).value("width", 12, 50, 8)


def test_a_tensor_is_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_PART", 100)
    tensors = {"rows": torch.rand(11, 7), "wide": torch.rand(3, 101), "number": torch.tensor(2.0)}
    tensors |= {"none": torch.zeros(0, 3), "line": torch.arange(131)}
    save_file(tensors, tmp_path / checkpoint.WEIGHTS)
    for name, x in tensors.items():
        parts = list(checkpoint.Checkpoint(tmp_path).read_parts(name))
        assert torch.equal(torch.cat(parts) if x.dim() else parts[0], x)
        assert len(parts) == {"rows": 4, "wide": 3, "line": 11}.get(name, 1)


def test_a_file_is_written_one_tensor_at_a_time(tmp_path):
    """Every dtype, and tensors without axes or entries: the file that safetensors itself reads."""
    tensors = {f"{n}": torch.arange(6).to(dtype) for n, dtype in enumerate(checkpoint.DTYPES.values())}
    tensors |= {"none": torch.zeros(0, 3), "number": torch.tensor(3.0), "turned": torch.rand(2, 3).T}
    layout = {name: (tuple(x.shape), x.dtype) for name, x in tensors.items()}
    parts = [(name, x.split(2) if x.dim() else [x]) for name, x in tensors.items()]
    checkpoint.write_tensors(tmp_path / "a", layout, parts)
    again = load_file(tmp_path / "a")
    assert again.keys() == tensors.keys()
    assert all(
        again[name].dtype == x.dtype and torch.equal(again[name].float(), x.float())
        for name, x in tensors.items()
    )
    save_file({name: x.contiguous() for name, x in tensors.items()}, tmp_path / checkpoint.WEIGHTS)
    assert checkpoint.Checkpoint(tmp_path).numbers("turned", [[2, 1]]) == [tensors["turned"][2, 1].item()]
    with pytest.raises(ValueError, match="not written"):
        checkpoint.write_tensors(tmp_path / "b", layout, parts[:-1])
    with pytest.raises(ValueError, match="expected"):
        checkpoint.write_tensors(tmp_path / "c", layout, [("0", [torch.zeros(5)])])
