"""Language: windows, hidden tokens, metrics against counting by hand, and what goes wrong with files."""

import math

import pytest
import torch

from manyheads.models.config import build
from manyheads.tasks.language import HIDDEN, IGNORED, Language

TEXT = "The quick brown fox jumps over the lazy dog, again and again: äöü!\n" * 13


def opened(tmp_path, text=TEXT, **options):
    path = tmp_path / "text.txt"
    path.write_text(text, encoding="utf-8")
    task = Language(**({"context": 11, "d_model": 6, "heads": 2, "layers": 1} | options))
    return task, task.open(str(path))


@pytest.mark.parametrize("tokens", ["bytes", "characters", "pieces"])
def test_windows_are_stretches_of_the_text(tmp_path, tokens):
    task, data = opened(tmp_path, tokens=tokens, vocabulary=290)
    held_out = TEXT[int(len(TEXT) * 0.9) :]
    read = [task.collate(data.valid.take([i], 0)) for i in range(len(data.valid))]
    ids = [read[0]["ids"][0, 0].item(), *(i for b in read for i in b["labels"][0].tolist())]
    assert task.tokenizer.decode(ids, skip_special_tokens=False) == held_out
    if tokens == "bytes":
        assert len(ids) == len(held_out.encode())
    for index in (0, 3):
        known, wanted = data.train.take([index], 5)[0]
        assert torch.equal(known[1:], wanted[:-1])
        assert task.tokenizer.decode([*known.tolist(), wanted[-1].item()]) in TEXT


def test_examples_begin_elsewhere_in_every_epoch(tmp_path):
    _, data = opened(tmp_path)
    seen = {tuple(data.train.take([2], 0, epoch)[0][0].tolist()) for epoch in range(9)}
    assert len(seen) > 3
    assert torch.equal(data.train.take([2], 0, 1)[0][0], data.train.take([2], 0, 1)[0][0])


def test_hidden_tokens(tmp_path):
    task, data = opened(tmp_path, masked=True, context=97)
    hidden = task.tokenizer.token_to_id(HIDDEN)
    chosen = replaced = covered = total = 0
    for epoch in range(60):
        ids, labels = data.train.take([1], 0, epoch)[0]
        to_find = labels != IGNORED
        assert to_find.any()
        chosen += int(to_find.sum())
        total += len(ids)
        covered += int((ids[to_find] == hidden).sum())
        replaced += int(((ids != labels) & (ids != hidden) & to_find).sum())
        assert bool((ids[~to_find] != hidden).all())
    assert chosen / total == pytest.approx(0.15, abs=0.03)
    assert covered / chosen == pytest.approx(0.8, abs=0.05)
    assert replaced / chosen == pytest.approx(0.1, abs=0.04)


def test_the_metrics_are_counted_by_hand(tmp_path):
    task, data = opened(tmp_path, tokens="characters")
    model = build(task.describe()).eval()
    batch = task.collate(data.valid.take(range(len(data.valid)), 0))
    with torch.no_grad():
        part = task.measure(model, batch)
        logits = model(batch["ids"], lengths=batch.get("lengths")).log_softmax(-1)
    total = count = size = 0
    for row, labels in enumerate(batch["labels"].tolist()):
        for place, label in enumerate(labels):
            if label != IGNORED:
                total -= logits[row, place, label].item()
                count += 1
                size += len(task.tokenizer.id_to_token(label).encode())
    metrics = task.metrics([part, part])
    assert metrics["loss"] == pytest.approx(total / count, rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)
    assert metrics["bits_per_byte"] == pytest.approx(total / size / math.log(2), rel=1e-5)
    assert size > count  # the umlauts


def test_continuing_goes_beyond_the_context(tmp_path):
    task, _ = opened(tmp_path, positions="learned")
    model = build(task.describe()).eval()
    text = task.predict(model, ["The quick brown fox "], new_tokens=37, temperature=1.3, seed=1)[0]
    assert text.startswith("The quick brown fox ")
    assert len(text) <= 20 + 37
    assert text == task.predict(model, ["The quick brown fox "], new_tokens=37, temperature=1.3, seed=1)[0]
    assert text != task.predict(model, ["The quick brown fox "], new_tokens=37, temperature=1.3, seed=2)[0]


def test_filling_in(tmp_path):
    task, _ = opened(tmp_path, masked=True)
    model = build(task.describe())
    with torch.no_grad():
        model.bias[task.tokenizer.token_to_id("x")] = 1e4
    assert task.predict(model, [f"a {HIDDEN}o{HIDDEN}"]) == ["a xox"]
    with pytest.raises(ValueError, match="expected <hidden>"):
        task.predict(model, ["nothing to fill in"])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"  \n\n", "is empty"),
        (b"good\nb\xe4d\n", r"line 2 of .*text.txt is not UTF-8 \(byte 0xe4\)"),
        (b"x", "too few"),
    ],
)
def test_bad_files_are_named(tmp_path, content, words):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words):
        Language(context=11).open(str(path))


def test_folders_and_what_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"there is no .*nowhere"):
        Language().open(str(tmp_path / "nowhere.txt"))
    with pytest.raises(ValueError, match="holds no text"):
        Language().open(str(tmp_path))
    (tmp_path / "b.txt").write_text("second " * 30)
    (tmp_path / "a.md").write_text("first " * 30)
    (tmp_path / "c.bin").write_bytes(b"\xff")
    task = Language(context=11)
    task.open(str(tmp_path))
    assert task.tokenizer.token_to_id("f") is not None
    assert task.tokenizer.token_to_id("\xff") is None


def test_options_are_checked():
    with pytest.raises(ValueError, match="tokens: expected bytes, characters or pieces, got 'words'"):
        Language(tokens="words")
    with pytest.raises(ValueError, match="context: expected 2 or more"):
        Language(context=1)
