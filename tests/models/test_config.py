"""Descriptions name models by registered names: no modules of ours, and nothing else that can be called."""

import json

import pytest

import manyheads as mh
from manyheads.models.config import build

OPTIONS = {"d_model": 12, "heads": 3, "layers": 1, "vocabulary": 101}


@pytest.mark.parametrize(
    "name", ["manyheads.nn.transformers:Decoder", "os:system", "tasks.restore", "decoder"]
)
def test_only_registered_models_are_made(name):
    with pytest.raises(ValueError, match="is not a model of this manyheads; update it"):
        build({"class": name, "options": OPTIONS})


def test_a_saved_model_has_its_public_name(tmp_path):
    model = mh.Decoder(**OPTIONS)
    mh.save(model, tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "heads.json").read_text())["class"] == "manyheads.Decoder"
    assert isinstance(mh.load(tmp_path / "saved"), mh.Decoder)
