"""The typed contract of the page's document: TypeScript is generated from it, and real documents keep it."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import transformers as hf
from tests.helpers import page_document
from tests.helpers.contract_check import mismatches
from tests.helpers.models import llama_config, vit_config

import manyheads as mh
from manyheads.view.document import document, of_batches
from manyheads.view.document.contract import HeadDocument

ROOT = Path(__file__).parents[3]


def test_the_types_of_the_page_are_those_of_python():
    spec = importlib.util.spec_from_file_location("page_types", ROOT / "tools" / "page_types.py")
    page_types = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page_types)
    written = (ROOT / "web" / "src" / "contract.ts").read_text(encoding="utf-8")
    assert written == page_types.typescript(), "run `make web` and commit web/src/contract.ts"


def of(model, *batches):
    """The document of a model as the page reads it."""
    table = mh.inspect(model, batches)
    return json.loads(json.dumps(document(table, model, of_batches(batches, model)), allow_nan=False))


@pytest.fixture(scope="module")
def language_model():
    sizes = {"hidden_size": 24, "intermediate_size": 17, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(llama_config(vocab_size=31, num_key_value_heads=2, **sizes)).eval()
    return of(model, {"input_ids": torch.randint(31, (3, 23))}, {"input_ids": torch.randint(31, (1, 101))})


def test_a_document_of_a_language_model(language_model):
    assert mismatches(language_model, HeadDocument) == []
    assert all(language_model[part] for part in ("profiles", "roles", "redundancy", "curve"))
    long, short = language_model["examples"][-1], language_model["examples"][0]
    assert "pooled" in long["maps"][0]
    assert short["pipeline"]
    assert short["silenced"]


def test_a_document_of_a_model_of_images():
    torch.manual_seed(0)
    sizes = {"hidden_size": 12, "intermediate_size": 17, "num_hidden_layers": 1, "num_attention_heads": 3}
    model = hf.ViTForImageClassification(vit_config(image_size=20, patch_size=4, **sizes)).eval()
    page = of(model, torch.rand(2, 3, 20, 20))
    assert mismatches(page, HeadDocument) == []
    assert page["examples"][0]["picture"]["rows"] == 5


def test_a_document_of_a_table_alone():
    table = mh.inspect(mh.Encoder(d_model=6, heads=2, layers=1, vocabulary=7), [torch.randint(7, (2, 5))])
    assert mismatches(document(table), HeadDocument) == []


def test_the_document_of_the_browser_tests_keeps_it_too():
    assert mismatches(page_document.document(), HeadDocument) == []


@pytest.mark.parametrize(
    ("break_it", "line"),
    [
        (lambda page: page["header"].pop("notes"), "document.header.notes: missing"),
        (lambda page: page["heads"].update(layer=["0"]), "document.heads.layer[0]: str, expected"),
        (lambda page: page.update(extra=1), "document.extra: too many"),
    ],
)
def test_a_wrong_document_is_seen(language_model, break_it, line):
    page = json.loads(json.dumps(language_model))
    break_it(page)
    assert [text for text in mismatches(page, HeadDocument) if text.startswith(line)]
