"""show: a page of any model's attention in one line; texts need a tokenizer; only attention is measured."""

import base64
import gzip
import json

import pytest
import torch

import manyheads as mh
from manyheads.models.loaded import Loaded

pytest.importorskip("anywidget", reason="anywidget is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the notebook's own packages


def model_of():
    torch.manual_seed(0)
    return mh.Encoder(d_model=9, heads=3, layers=2, vocabulary=29)


def letters(text):
    return {"input_ids": [ord(letter) % 29 for letter in text]}


def carried(widget):
    return json.loads(gzip.decompress(widget.document))


def test_a_text_and_a_tokenizer():
    model = model_of()
    page = carried(mh.show(model, "heads attend", tokenizer=letters))
    assert page["header"]["model"] == "Encoder"
    assert page["header"]["units"] == len("heads attend")
    assert len(page["examples"]) == 1
    assert {maps["site"] for maps in page["examples"][0]["maps"]} == {
        "blocks.0.attention",
        "blocks.1.attention",
    }
    assert page["curve"] is None
    assert "fisher" not in page["importance"]
    assert model.training  # as it was


def test_several_texts_and_a_batch():
    page = carried(mh.show(model_of(), ["one", "three"], tokenizer=letters))
    assert len(page["examples"]) == 2
    assert len(carried(mh.show(model_of(), torch.randint(29, (1, 7))))["examples"]) == 1


def test_what_open_model_returned():
    model = model_of()
    loaded = Loaded("mine", model.eval(), lambda: letters, lambda: None)
    page = mh.show(loaded, "heads")
    assert carried(page)["header"]["model"] == "mine"
    page.set_state({"picked": [4]})
    assert page.selected == {"blocks.1.attention": [1]}


def test_a_saved_notebook_keeps_a_picture():
    shown = mh.show(model_of(), "heads", tokenizer=letters)._repr_mimebundle_()
    data = shown[0] if isinstance(shown, tuple) else shown
    assert "application/vnd.jupyter.widget-view+json" in data
    assert base64.b64decode(data["image/png"])[1:4] == b"PNG"


def test_a_map_draws_itself():
    attention = mh.maps(model_of(), torch.randint(29, (3, 7)), {1: [0, 2]}, queries=[1, -1])
    assert attention["blocks.1.attention"]._repr_png_()[1:4] == b"PNG"


@pytest.mark.parametrize(
    ("model", "text", "kind", "error"),
    [
        (model_of(), "heads", ValueError, "tokenizer: Encoder does not say where it was loaded from"),
        (7, "heads", TypeError, "model: expected a torch.nn.Module or a name"),
    ],
)
def test_mistakes(model, text, kind, error):
    with pytest.raises(kind, match=error):
        mh.show(model, text)
    with pytest.raises(ValueError, match="text: expected some text"):
        mh.show(model_of(), " ", tokenizer=letters)
