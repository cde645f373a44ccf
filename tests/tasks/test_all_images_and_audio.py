"""Models of sounds and pictures walk into the head tools: inspect and its page, roles, importance, prune."""

import base64
import gzip
import json
import math
import re

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import manyheads as mh
from manyheads.cli import app
from manyheads.data.corpus import examples
from manyheads.data.readers.audio import encode_wav
from manyheads.models.open import open_model
from manyheads.tasks import find, held_out, restore
from manyheads.training.train import train
from manyheads.view.document.example import example

SMALL = {"d_model": 12, "heads": 3, "layers": 1, "decoder_layers": 1, "dropout": 0.0}
OF = {"speech": {"mels": 11}, "picturebook": {"size": 12, "patch": 4, "vocabulary": 270, "max_tokens": 11}}
QUICK = {"steps": 3, "batch_tokens": 400, "evaluate_every": 3, "evaluate_examples": 4, "watch_every": 0}
# Heads of each: those that hear or see, then those that write, to words and to what was heard or seen.
KINDS = {
    ("speech", "class"): 3,
    ("speech", "ctc"): 3,
    ("speech", "decoder"): 9,
    ("picturebook", "cross"): 9,
    ("picturebook", "single"): 3,
}


def call(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Every kind, trained for a moment on a few tones or on a few pictures of one colour."""
    where = tmp_path_factory.mktemp("heard-and-seen")
    (where / "speech").mkdir()
    for number in range(30):
        pitch = 400 + 300 * (number % 3)
        sound = (2 * math.pi * pitch * torch.arange(600 + 7 * number) / 8000).sin()
        (where / "speech" / f"{number % 3}_ann_{number}.wav").write_bytes(encode_wav(sound, 8000))
    (where / "picturebook").mkdir()
    rows = ["file\ten\tde"]
    for number in range(30):
        name = f"{number}.png"
        Image.new("RGB", (12, 12), (8 * number, 40, 255 - 8 * number)).save(where / "picturebook" / name)
        rows.append(f"{name}\tred {number}\trot {number}")
    (where / "picturebook" / "captions.tsv").write_text("\n".join(rows) + "\n")
    for name, kind in KINDS:
        task = find(name)(kind=kind, **SMALL, **OF[name])
        train(task, str(where / name), out=where / f"{name}-{kind}", **QUICK)
    return where


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_the_verbs_on_heads_take_the_folder_alone(folders, tmp_path, name, kind):
    folder, heads = folders / f"{name}-{kind}", KINDS[name, kind]
    for verb in ("inspect", "roles", "importance"):
        done = call(verb, folder, "--data", folders / name, "--limit", 20, "--json", "--out", tmp_path / verb)
        assert len(json.loads(done.stdout.splitlines()[-1]).get("heads", range(heads))) == heads, verb
    page = (tmp_path / "inspect" / "report.html").read_text()
    carried = re.search(r'id="document">([^<]+)<', page)[1]
    notes = json.loads(gzip.decompress(base64.b64decode(carried)))["header"]["notes"]
    assert not [note for note in notes if "left out" in note]
    call("prune", folder, "--data", folders / name, "--keep", 0.6, "--json", "--out", tmp_path / "small")
    small = mh.load(tmp_path / "small")
    kept = sum(part.heads for part in small.modules() if isinstance(part, mh.MultiHeadAttention))
    assert heads * 0.6 <= kept < heads
    told = [
        json.loads(call("evaluate", f, "--data", folders / name, "--json").stdout)
        for f in (folder, tmp_path / "small")
    ]
    assert told[0]["examples"] == told[1]["examples"]
    assert told[0]["metrics"].keys() == told[1]["metrics"].keys()
    assert told[0]["metrics"]["loss"] != told[1]["metrics"]["loss"]
    given = folders / name / ("0_ann_0.wav" if name == "speech" else "3.png")
    said = [json.loads(call("predict", f, given, "--json").stdout) for f in (folder, tmp_path / "small")]
    assert all(line["input"] == str(given) for line in said)


@pytest.mark.parametrize("kind", ["cross", "single"])
def test_a_page_shows_pictures_only_where_keys_are_patches(folders, kind):
    """Nine patches and seven tokens of text are sixteen keys, which are not four by four patches."""
    loaded = open_model(str(folders / f"picturebook-{kind}"))
    ids = torch.ones(1, 7).long()
    pictures = torch.rand(1, 3, 12, 12)
    batch = {"source": pictures, "target": ids} if kind == "cross" else {"pictures": pictures, "ids": ids}
    shown = example(loaded.model, batch, tokenizer=loaded.tokenizer())[0]["picture"]
    assert (shown is None) == (kind == "single")
    assert shown is None or (shown["rows"], shown["columns"]) == (3, 3)


def test_pictures_of_ones_own(folders, tmp_path):
    Image.new("RGB", (31, 17), "red").save(tmp_path / "a.png")
    for kind in ("cross", "single"):
        done = call(
            "inspect",
            folders / f"picturebook-{kind}",
            "--images",
            tmp_path,
            "--json",
            "--out",
            tmp_path / kind,
        )
        assert json.loads(done.stdout.splitlines()[-1])["images"] == 1


def test_words_and_classes_are_judged_by_the_loss_of_training(folders, tmp_path):
    for name, kind, loss in (
        ("speech", "class", "classification"),
        ("speech", "decoder", "seq2seq"),
        ("picturebook", "cross", "seq2seq"),
        ("picturebook", "single", "causal"),
    ):
        options = ["--method", "gradient", "--loss", loss, "--limit", 12, "--out", tmp_path / kind]
        assert (
            call("importance", folders / f"{name}-{kind}", "--data", folders / name, *options).exit_code == 0
        )


def test_examples_are_read_when_they_are_named(folders):
    for name, kind, unit, held, all_of_them in (
        ("speech", "ctc", "recordings", 3, 30), ("picturebook", "single", "captions", 6, 60),
    ):  # fmt: skip
        folder = folders / f"{name}-{kind}"
        with pytest.raises(ValueError, match=r"names .*, which is not in the folder"):
            examples(open_model(str(folder)))
        read = examples(open_model(str(folder)), str(folders / name))
        assert (read.unit, len(read.sizes)) == (unit, all_of_them)
        assert len(held_out(folder, restore(folder), str(folders / name))) == held
