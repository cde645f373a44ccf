"""manyheads importance: prints, saves, goes on after Ctrl-C, and tells mistakes in one sentence."""

from __future__ import annotations

import json
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tests.helpers import models

import manyheads as mh
from manyheads import cli
from manyheads.heads import observer as observe

# the package has a function of that name, too
leave_one_out = import_module("manyheads.heads.importance.leave_one_out")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny language model on disk, without a tokenizer, and token ids for it."""
    place = tmp_path_factory.mktemp("model")
    models.llama(max_position_embeddings=16).save_pretrained(place / "llama")
    generator = torch.Generator().manual_seed(0)
    numpy.save(place / "ids.npy", torch.randint(3, models.VOCABULARY, (5, 7), generator=generator).numpy())
    return place


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["manyheads", "importance", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as done:
        cli.main()
    assert isinstance(done.value.code, int)
    return done.value.code


def test_several_methods_side_by_side(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = "fisher,leave-one-out,random"
    given = (folder / "llama", "--tokens", folder / "ids.npy", "--batch-tokens", 14, "--out", tmp_path)
    assert command(monkeypatch, *given, "--method", methods) == 0
    told = capsys.readouterr().out
    assert "35 tokens, up to 14 tokens at once, 12 heads" in told
    assert told.count("Spearman") == 3
    assert "95% interval" in told
    assert " ± " in told
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == sorted(
        [f"{name}.{kind}" for name in methods.split(",") for kind in ("csv", "json")] + ["importance.txt"]
    )  # and no state, since it is complete
    table = mh.HeadTable.load(tmp_path / "leave-one-out.json")
    model = models.llama(max_position_embeddings=16)
    ids = torch.tensor(numpy.load(folder / "ids.npy"))
    expected = mh.importance(model, [{"input_ids": ids}], "leave-one-out")
    assert torch.allclose(
        table["importance"], expected["importance"], rtol=1e-4
    )  # nats a token: with its head
    assert table["importance_se"].isfinite().all()


def test_json(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (folder / "llama", "--tokens", folder / "ids.npy", "--out", tmp_path, "--json")
    assert command(monkeypatch, *given, "--method", "gradient, output-norm", "--loss", "causal") == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["heads"]) == 12
    assert {"layer", "head", "gradient", "gradient_se", "output-norm"} <= set(document["heads"][0])
    assert document["agreement"][0]["heads"] == 12
    assert document["heads"][0]["output-norm_se"] is None  # one batch has no spread


def test_ctrl_c_keeps_what_was_computed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (folder / "llama", "--tokens", folder / "ids.npy", "--batch-tokens", 14, "--out", tmp_path)
    silenced = leave_one_out._silenced
    done: list[str] = []

    def interrupted(
        observer: observe.Observer, recording: Any, batch: Any, full: Any, site: str, *others: Any
    ) -> Any:
        done.append(site)
        if len(done) == 3:
            signal.raise_signal(signal.SIGINT)
        return silenced(observer, recording, batch, full, site, *others)

    monkeypatch.setattr(leave_one_out, "_silenced", interrupted)
    assert command(monkeypatch, *given, "--method", "fisher,leave-one-out") == 130
    captured = capsys.readouterr()
    assert "Stopped during leave-one-out; the same command continues from there." in captured.err
    assert "fisher" in captured.out
    assert (tmp_path / "fisher.json").exists()
    assert len(json.loads((tmp_path / "leave-one-out.state.json").read_text())["batches"]) == 2

    monkeypatch.setattr(leave_one_out, "_silenced", silenced)
    assert command(monkeypatch, *given, "--method", "leave-one-out") == 0
    ids = torch.tensor(numpy.load(folder / "ids.npy"))
    whole = mh.importance(models.llama(max_position_embeddings=16), [{"input_ids": ids}], "leave-one-out")
    table = mh.HeadTable.load(tmp_path / "leave-one-out.json")
    assert torch.allclose(table["importance"], whole["importance"], rtol=1e-4)
    assert not (tmp_path / "leave-one-out.state.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--method", "fisher,magic"], "method: expected some of fisher, elimination, "),
        (["--method", ","], "method: expected some of fisher, elimination, "),
        (["--loss", "hinge"], "loss: expected one of causal, masked"),
        ([], "comes without a tokenizer"),
        (["--tokens", "IDS", "--method", "gradient", "--loss", "masked"], "comes without a tokenizer"),
        (
            ["--tokens", "IDS", "--method", "gradient", "--loss", "classification"],
            "needs logits (batch, classes)",
        ),
        (["--tokens", "IDS", "--method", "gates", "--gates", "12"], "gates: expected 1 to 11 heads, got 12"),
    ],
)
def test_mistakes_are_told_in_one_sentence(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    given = [str(folder / "ids.npy") if argument == "IDS" else argument for argument in arguments]
    assert command(monkeypatch, folder / "llama", *given, "--out", tmp_path) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert not captured.out


def test_what_was_found_before_a_mistake_is_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (folder / "llama", "--tokens", folder / "ids.npy", "--out", tmp_path)
    assert command(monkeypatch, *given, "--method", "fisher,gradient", "--loss", "seq2seq") == 2
    captured = capsys.readouterr()
    assert f"got input_ids, attention_mask; what was computed before is in {tmp_path}" in captured.err
    assert (tmp_path / "fisher.json").exists()


def test_the_masked_loss_masks_by_the_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_masked", raising=False)
    (tmp_path / "my_masked.py").write_text("""
import transformers as hf

class Words:
    mask_token_id, all_special_ids, pad_token_id = 1, [1], None

    def __call__(self, text):
        return {"input_ids": [5 + len(word) for word in text.split()]}

def both():
    config = hf.BertConfig(vocab_size=97, hidden_size=15, num_hidden_layers=1, num_attention_heads=3,
                           intermediate_size=11)
    return hf.BertForMaskedLM(config), Words()
""")
    assert command(monkeypatch, "my_masked:both", "--method", "gradient", "--loss", "masked", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert all(head["gradient"] > 0 for head in document["heads"])
    assert Path("out/importance/gradient.json").exists()
