"""MODEL as a person writes it: folders, factories, and one sentence for whatever is wrong with them."""

import json
import shutil
import sys

import pytest
import torch
import transformers as hf
from tests.helpers.models import bert_config
from torch import nn

from manyheads.models import open as models

CONFIG = {
    "vocab_size": 97,
    "hidden_size": 15,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 11,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny BERT with a language model head on disk, as transformers writes it."""
    folder = tmp_path_factory.mktemp("saved") / "bert"
    torch.manual_seed(0)
    hf.BertForMaskedLM(bert_config(**CONFIG)).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy to damage."""
    shutil.copytree(saved, tmp_path / "bert")
    return tmp_path / "bert"


def refused(name):
    with pytest.raises(ValueError, match=r"^MODEL: ") as error:
        models.open_model(str(name))
    said = str(error.value)
    assert "\n" not in said
    return said


def test_a_folder(saved):
    torch.manual_seed(7)
    loaded = models.open_model(str(saved))
    assert isinstance(loaded.model, hf.BertModel)
    assert not loaded.model.training
    assert (loaded.vocabulary, loaded.positions, loaded.start) == (97, 16, None)
    assert loaded.takes_mask
    assert loaded.takes_names
    torch.manual_seed(8)
    again = models.open_model(str(saved))
    # the checkpoint has no pooler: it is made at random, and must be the same for every process
    assert again.model.pooler.dense.weight.equal(loaded.model.pooler.dense.weight)


def test_with_its_head(saved):
    loaded = models.open_model(str(saved), head=True)
    assert isinstance(loaded.model, hf.BertForMaskedLM)
    assert not loaded.model.training
    batch = torch.tensor([[5, 6, 7]])
    original = hf.BertForMaskedLM.from_pretrained(saved).eval()
    with torch.no_grad():
        assert loaded.model(batch).logits.equal(original(batch).logits)


def test_a_head_that_is_not_in_the_weights_is_not_made_up(folder):
    change(folder, architectures=["BertForSequenceClassification"])
    assert type(models.open_model(str(folder), head=True).model) is hf.BertModel


@pytest.mark.parametrize("named", [None, [], ["NobodyKnowsThis"], ["BertConfig"], ["BertModel"]])
def test_a_config_that_names_no_head(folder, named):
    hf.BertModel(bert_config(**CONFIG)).save_pretrained(folder)
    change(folder, architectures=named)
    assert type(models.open_model(str(folder), head=True).model) is hf.BertModel


def test_loading_leaves_the_random_numbers_alone(saved):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    models.open_model(str(saved))
    assert torch.rand(1).equal(expected)


def test_a_half_precision_folder_runs_in_float32_on_a_cpu(folder):
    hf.BertModel(bert_config(**CONFIG)).to(torch.bfloat16).save_pretrained(folder)
    assert models.open_model(str(folder)).model.dtype == torch.float32


def test_a_folder_without_tokenizer_or_processor_says_so_when_asked(saved):
    loaded = models.open_model(str(saved))
    with pytest.raises(ValueError, match=r"comes without a tokenizer; give --tokens FILE\.npy"):
        loaded.tokenizer()
    with pytest.raises(ValueError, match=r"comes without an image processor .*reads images"):
        loaded.processor()


def test_a_folder_that_is_not_there(tmp_path):
    said = refused(tmp_path / "nowhere" / "at" / "all")
    assert "there is no folder" in said
    assert "package.module:factory" in said
    assert "there is no folder ./nowhere" in refused("./nowhere")


def test_a_file_is_no_model(folder):
    assert "is a file; expected a folder" in refused(folder / "model.safetensors")


def test_a_folder_without_config(folder):
    (folder / "config.json").unlink()
    assert "has no config.json" in refused(folder)


@pytest.mark.parametrize("content", ["{", "{}", "[]"])
def test_a_damaged_config(folder, content):
    (folder / "config.json").write_text(content)
    assert "is damaged (" in refused(folder)


@pytest.mark.parametrize("kept", [0, 100, 2000])
def test_damaged_weights(folder, kept):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    assert "is damaged (" in refused(folder)


def test_lost_weights(folder):
    (folder / "model.safetensors").unlink()
    assert "is damaged (" in refused(folder)


def change(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_a_layer_that_the_weights_lack_is_not_made_up(folder):
    change(folder, num_hidden_layers=3)
    said = refused(folder)
    assert "its weights lack 16 tensors" in said
    assert "encoder.layer.2." in said


def test_weights_of_other_sizes(folder):
    change(folder, hidden_size=18)
    assert "is damaged (" in refused(folder)


def test_an_architecture_that_nobody_knows(folder):
    change(folder, model_type="hydra")
    assert "is of the type hydra, which transformers" in refused(folder)


def test_code_that_comes_with_a_model_is_not_run(folder):
    (folder / "modeling.py").write_text("raise SystemExit('the code was run')")
    change(folder, model_type="hydra", auto_map={"AutoConfig": "modeling.C", "AutoModel": "modeling.M"})
    said = refused(folder)
    assert "needs code that comes with the model, which is not run here" in said
    assert "package.module:function" in said


def test_a_hub_name_while_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    said = refused("somebody/nothing-at-all")
    assert "the hub cannot be reached" in said
    assert "go online, or give the folder" in said


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of a person's own in the folder they stand in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_own_models", raising=False)
    (tmp_path / "my_own_models.py").write_text("""
import torch
from torch import nn

class Layers:
    @staticmethod
    def inner():
        return nn.Linear(2, 3)

def drawn():
    return nn.Sequential(nn.Embedding(13, 4), nn.Linear(4, 5))

def both():
    return nn.Linear(2, 3), str.split

def traced():
    return torch.jit.trace(nn.Linear(2, 3), torch.ones(1, 2))

def nothing():
    return 5

def broken():
    raise RuntimeError("no weights\\nanywhere")
""")
    return "my_own_models"


def test_a_factory(own):
    loaded = models.open_model(f"{own}:drawn")
    assert isinstance(loaded.model, nn.Sequential)
    assert not loaded.model.training
    assert (loaded.vocabulary, loaded.positions, loaded.takes_mask, loaded.takes_names) == (
        13,
        None,
        False,
        False,
    )
    torch.manual_seed(5)
    assert models.open_model(f"{own}:drawn").model[1].weight.equal(loaded.model[1].weight)
    with pytest.raises(ValueError, match="without a tokenizer"):
        loaded.tokenizer()


def test_a_factory_inside_a_class(own):
    assert isinstance(models.open_model(f"{own}:Layers.inner").model, nn.Linear)


def test_a_factory_with_a_tokenizer(own):
    assert models.open_model(f"{own}:both").tokenizer() is str.split


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("traced", "returned a traced or scripted model"),
        ("nothing", "returned int; expected a torch.nn.Module"),
        ("broken", "raised RuntimeError: no weights; expected a function without arguments"),
        ("missing", "has no 'missing'; it has Layers, drawn"),
    ],
)
def test_what_a_factory_may_not_do(own, factory, words):
    assert words in refused(f"{own}:{factory}")


def test_a_module_that_cannot_be_imported(own):
    assert "names the module 'no_such_module_here', which cannot be imported" in refused(
        "no_such_module_here:f"
    )
