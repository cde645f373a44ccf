"""export: what was written is run and compared; what cannot be written is named, and leaves nothing."""

from __future__ import annotations

import json

import numpy as np
import onnxruntime
import pytest
import torch
from tests.helpers.cut_models import MODELS, chosen
from tests.helpers.models import tokens
from torch import nn

import manyheads as mh
from manyheads.models import export as exporting
from manyheads.models import graph_export

TENSOR = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(3))


def cut(name):
    make, batch = MODELS[name]
    model = make().eval()
    return mh.cut(model, chosen(model, batch), batch).eval(), batch


def test_onnx_gives_the_same_with_and_without_a_cache(tmp_path):
    small, _ = cut("llama")
    mh.save(small, tmp_path / "small")
    done = mh.export(tmp_path / "small", to="onnx", out=tmp_path / "onnx")
    assert set(done.differences) == {"the same sizes", "a larger batch", "longer sequences", "token by token"}
    assert max(done.differences.values()) < 1e-4
    assert not done.notes
    assert done.files == [
        "model.onnx",
        "model.onnx.data",
        "model_with_cache.onnx",
        "model_with_cache.onnx.data",
    ]
    about = json.loads((tmp_path / "onnx" / "export.json").read_text())
    assert about["class"] == "LlamaForCausalLM"
    # greedy tokens, as somebody would write it who has only the file
    session = onnxruntime.InferenceSession(str(tmp_path / "onnx" / "model_with_cache.onnx"))
    ids = tokens()["input_ids"][:2]
    cache = {
        x.name: np.zeros((2, int(x.shape[1]), 0, int(x.shape[3])), np.float32)
        for x in session.get_inputs()[2:]
    }
    new, read = ids.numpy(), ids.numpy()
    for _ in range(5):
        logits, *cached = session.run(None, {"input_ids": new, "attention_mask": np.ones_like(read), **cache})
        cache = dict(zip(cache, cached, strict=True))
        new = logits[:, -1:].argmax(-1)
        read = np.concatenate([read, new], 1)
    options = {
        "max_new_tokens": 5,
        "do_sample": False,
        "eos_token_id": None,
        "attention_mask": ids.bool().long(),
    }
    assert torch.equal(torch.from_numpy(read), small.generate(ids, **options))


@pytest.mark.parametrize("name", ["bert", "gpt2", "vit", "t5"])
def test_an_exported_program_gives_the_same(name, tmp_path):
    small, batch = cut(name)
    before = {key: value.clone() for key, value in small.state_dict().items()}
    done = mh.export(small, to="torch-export", out=tmp_path / "out", batch=batch)
    assert max(done.differences.values()) < 1e-5
    assert "a larger batch" in done.differences
    got = torch.export.load(tmp_path / "out" / "model.pt2").module()(
        **{k: v.clone() for k, v in batch.items()}
    )
    assert torch.allclose(got[0], small(**batch)[0], atol=1e-5)
    assert all(torch.equal(before[key], value) for key, value in small.state_dict().items())
    assert getattr(small.config, "use_cache", None) == getattr(MODELS[name][0]().config, "use_cache", None)


class Loud(nn.Module):
    def forward(self, x):
        return x * 2 if float(x.sum()) > 0 else x


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(6, 6), Loud()])

    def forward(self, x):
        return self.inner[1](self.inner[0](x))


def test_what_cannot_be_exported_is_named_and_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match=r"to: torch-export cannot take Outer at inner\.1 \("):
        mh.export(Outer(), to="torch-export", out=tmp_path / "out", batch={"x": TENSOR})
    assert not list(tmp_path.iterdir())


def test_other_numbers_are_refused(tmp_path, monkeypatch):
    def wrong(model, inputs, path):
        path.with_suffix(".pt2").write_text("")
        return lambda given: {"output": model(**given) + 1e-3}

    monkeypatch.setitem(graph_export._WRITERS, "torch-export", wrong)
    with pytest.raises(ValueError, match=r"computes other numbers: on the same sizes, output differs by"):
        mh.export(nn.Linear(6, 6), to="torch-export", out=tmp_path / "out", batch={"input": TENSOR})
    assert not list(tmp_path.iterdir())


def test_bad_arguments(tmp_path, monkeypatch):
    layer = nn.Linear(6, 6)
    with pytest.raises(ValueError, match="to: got 'coreml'; expected one of onnx, torch-export, gguf"):
        mh.export(layer, to="coreml", out=tmp_path / "out")
    with pytest.raises(ValueError, match="batch: Linear is not a transformers model"):
        mh.export(layer, to="torch-export", out=tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    with pytest.raises(ValueError, match=r"out: .*full already exists"):
        mh.export(layer, to="torch-export", out=tmp_path / "full", batch={"input": TENSOR})
    monkeypatch.setitem(exporting._PACKAGES, "openvino", ("a_package_that_is_not_there",))
    with pytest.raises(
        ImportError, match=r"openvino needs a_package_.*: pip install 'manyheads\[openvino\]'"
    ):
        mh.export(layer, to="openvino", out=tmp_path / "out", batch={"input": TENSOR})
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


@pytest.mark.parametrize("target", ["openvino", "executorch"])
def test_other_runtimes(target, tmp_path):
    pytest.importorskip(target)
    small, _ = cut("llama")
    done = mh.export(small, to=target, out=tmp_path / "out")
    assert max(done.differences.values()) < 1e-4
