"""The model card says what is in the folder, and push uploads it or says why not."""

from __future__ import annotations

import huggingface_hub
import pytest
from tests.helpers import models
from tests.helpers.models import tokens

import manyheads as mh

MEASURED = {
    "model": "owner/uncut",
    "corpus": "a book",
    "measure": "perplexity",
    "sequences": 1234,
    "before": {"quality": 3.5, "heads": 12, "parameters": 5000, "bytes": 20000, "cache": 0},
    "after": {"quality": 3.75, "heads": 10, "parameters": 4000, "bytes": 16000, "cache": 0},
}


@pytest.fixture
def small():
    return mh.cut(models.llama(), {0: [2, 3]}, tokens())


def test_a_card_with_what_was_measured(small, tmp_path):
    mh.save(small, tmp_path / "small", card=MEASURED)
    card = huggingface_hub.ModelCard.load(tmp_path / "small" / "README.md")
    assert card.data.library_name == "transformers"
    assert card.data.base_model == "owner/uncut"
    assert "2 of 12 attention heads of owner/uncut were removed" in card.text
    assert "decided on a book" in card.text
    assert "| perplexity, 1,234 held-out sequences | 3.5000 | 3.7500 |" in card.text
    assert "keys and values" not in card.text
    assert "| `model.layers.0.self_attn` | 2, 3 |" in card.text
    assert "import manyheads  # from_pretrained needs it" in card.text
    assert 'LlamaForCausalLM.from_pretrained("small")' in card.text
    (tmp_path / "small" / "README.md").write_text("edited")
    mh.load(tmp_path / "small")


def test_a_card_of_the_model_alone(tmp_path):
    even = mh.cut(models.llama(hidden_size=24), {0: [0, 1], 1: [2, 3]}, tokens())
    mh.save(even, tmp_path / "even", card=True)
    text = (tmp_path / "even" / "README.md").read_text()
    assert "4 of 12 attention heads were removed" in text
    assert "Before and after" not in text
    assert "import manyheads  #" not in text
    mh.save(mh.Encoder(12, heads=3, layers=1, vocabulary=7), tmp_path / "ours", card=True)
    text = (tmp_path / "ours" / "README.md").read_text()
    assert "from_pretrained" not in text
    assert 'mh.open_model("ours"' in text
    mh.save(even, tmp_path / "without")
    assert not (tmp_path / "without" / "README.md").exists()


class Hub:
    calls: tuple = ()

    def create_repo(self, repo, private, exist_ok):
        Hub.calls += (("create", repo, private, exist_ok),)
        return f"hub:{repo}"

    def upload_folder(self, folder_path, repo_id, commit_message):
        Hub.calls += (("upload", folder_path, repo_id),)


def test_push_uploads_the_folder_with_its_card(small, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(Hub, "calls", ())
    mh.save(small, tmp_path / "small")
    assert mh.push(tmp_path / "small", "owner/name", private=True) == "hub:owner/name"
    folder = str(tmp_path / "small")
    assert Hub.calls == (("create", "owner/name", True, True), ("upload", folder, "owner/name"))
    assert 'from_pretrained("owner/name")' in (tmp_path / "small" / "README.md").read_text()
    (tmp_path / "small" / "README.md").write_text("edited")
    mh.push(tmp_path / "small", "owner/name")
    assert (tmp_path / "small" / "README.md").read_text() == "edited"


def test_what_is_not_pushed_is_one_sentence(small, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("offline mode is enabled")

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", refuse)
    mh.save(small, tmp_path / "small")
    with pytest.raises(
        ValueError, match=r"repo: owner/name was not pushed \(OSError: offline .*; its model card"
    ):
        mh.push(tmp_path / "small", "owner/name")
    assert (tmp_path / "small" / "README.md").is_file()
    for name in ("name", "a/b/c", "/name", "owner/"):
        with pytest.raises(ValueError, match="expected owner/name"):
            mh.push(tmp_path / "small", name)
    with pytest.raises(ValueError, match=r"has no config\.json"):
        mh.push(tmp_path, "owner/name")
