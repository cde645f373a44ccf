"""Translation: parallel data in all its forms, the loss against the formula, sacreBLEU, beams."""

import sys
from importlib import resources
from types import SimpleNamespace

import pytest
import torch

import manyheads as mh
from manyheads.data.readers.parallel_text import read_pairs
from manyheads.data.readers.text import read_documents
from manyheads.models.config import build
from manyheads.tasks.translation import EMBEDDED, END, START, Translation

SMALL = {"d_model": 6, "heads": 2, "layers": 1, "dropout": 0.0}


@pytest.fixture
def folder(tmp_path):
    for part, count in (("train", 23), ("val", 5), ("test", 3)):
        for language, word in (("en", "word"), ("de", "Wort")):
            lines = [f"{word} {part} {'x' * (n % 7)}" for n in range(count)]
            (tmp_path / f"{part}.{language}").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_the_embedded_pairs():
    """Numbers, dates and times: tools/numbers_and_dates.py wrote them."""
    data = Translation(vocabulary=600, **SMALL).open(None)
    assert (len(data.train), len(data.valid)) == (5700, 300)
    file = resources.files("manyheads").joinpath("data", "files", EMBEDDED)
    pairs = [line.split("\t") for line in file.read_text(encoding="utf-8").splitlines()]
    assert len({english for english, _ in pairs}) == 6000
    assert ["Tuesday, March 31, 1964", "Dienstag, 31. März 1964"] in pairs
    assert "\u202f" not in "".join(map("".join, pairs))


def test_folders_prefixes_and_tables_are_read(folder):
    assert read_pairs(str(folder), "en", "de", "valid")[0][0] == ("word val", "Wort val")
    assert len(read_pairs(str(folder / "train"), "de", "en")[0]) == 23
    table = folder / "pairs.tsv"
    table.write_text("one\teins\n\tleer\ntwo\tzwei\n")
    assert read_pairs(str(table), "en", "de") == ([("one", "eins"), ("two", "zwei")], 1)
    data = Translation(vocabulary=270, **SMALL).open(str(folder))
    assert (len(data.train), len(data.valid)) == (23, 5)
    assert len(Translation(vocabulary=270, **SMALL).open(str(folder / "train")).valid) == 1


@pytest.mark.parametrize(
    ("files", "data", "words"),
    [
        ({"a.en": b"1\n2\n", "a.de": b"1\n"}, "a", "a.en has 2 lines and .*a.de has 1"),
        ({"a.tsv": b"one\teins\ntwo\n"}, "a.tsv", "line 2 of .*a.tsv has 1 columns; expected 2"),
        ({"a.tsv": b"one\teins\ntw\xf6\tzwei\n"}, "a.tsv", "line 2 of .*a.tsv is not UTF-8"),
        ({"a.tsv": b"\teins\n"}, "a.tsv", "holds no pair"),
        ({"a.tsv": b"one\teins\n"}, "a.tsv", "a.tsv has 1 pair; expected 2 or more"),
        ({"a.en": b"1\n"}, "a", "there is no file .*a.de"),
        ({}, "", "has no file train.en"),
        ({}, "no/where/at/all", "there is no .*expected a prefix"),
    ],
)
def test_bad_data_is_named(tmp_path, files, data, words):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=words):
        Translation().open(str(tmp_path / data))


def test_long_pairs_are_left_out_and_counted(folder):
    (folder / "train.en").write_text("word\n" * 22 + "w o r d s and more of them than fit\n")
    data = Translation(vocabulary=258, max_tokens=13, **SMALL).open(str(folder))
    assert len(data.train) < 23
    assert f"{23 - len(data.train)} pairs longer than 13 tokens were left out" in data.notes


def test_the_loss_is_that_of_the_formula(folder):
    task = Translation(vocabulary=270, label_smoothing=0.2, **SMALL)
    data = task.open(str(folder))
    model = build(task.describe()).double()
    examples = data.train.take(range(7), 0)
    loss, count = task.loss(model, task.collate(examples))
    total = tokens = 0
    for source, target in examples:
        logits = model(source[None], target[None, :-1])[0].log_softmax(-1)
        for place, label in enumerate(target[1:].tolist()):
            total -= 0.8 * logits[place, label].item() + 0.2 * logits[place].mean().item()
            tokens += 1
        assert target[0] == task.tokenizer.token_to_id(START)
        assert source[-1] == target[-1] == task.tokenizer.token_to_id(END)
    assert count == tokens
    assert loss.item() == pytest.approx(total, rel=1e-5)


def test_bleu_is_sacrebleus():
    sacrebleu = pytest.importorskip("sacrebleu")
    written = ["der Hund läuft schnell nach Hause", "eine Katze schläft auf dem Sofa"]
    wanted = ["der Hund läuft schnell nach Hause", "eine Katze schläft auf einem Sofa"]
    parts = [(3.0, 2, [pair]) for pair in zip(written, wanted, strict=True)]
    metrics = Translation().metrics(parts)
    assert metrics["bleu"] == sacrebleu.corpus_bleu(written, [wanted]).score
    assert 50 < metrics["bleu"] < 100
    assert metrics["exact"] == 0.5
    assert metrics["loss"] == 1.5


def test_translating_in_a_batch_is_translating_alone(folder):
    torch.manual_seed(0)
    task = Translation(vocabulary=270, max_tokens=9, **SMALL)
    task.open(str(folder))
    model = build(task.describe()).eval()
    texts = ["word train xxx", "x", "a word"]
    for beams in (1, 3):
        assert task.predict(model, texts, beams=beams) == [
            task.predict(model, [text], beams=beams)[0] for text in texts
        ]


def test_head_tools_get_the_models_own_translation(folder):
    torch.manual_seed(0)
    task = Translation(vocabulary=270, max_tokens=19, **SMALL)
    task.open(str(folder))
    model = build(task.describe()).eval()
    rows = [task._ids(text) for text in ("word train", "x")]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    batch = task.arrange(model, ids, lengths)
    assert bool((batch["target"][:, 0] == task.tokenizer.token_to_id(START)).all())
    for row, text in enumerate(task.predict(model, ["word train", "x"], beams=1)):
        kept = batch["target"][row, 1 : batch["target_lengths"][row]].tolist()
        assert task.tokenizer.decode(kept) == text
    assert model(**batch).shape[:2] == batch["target"].shape
    assert batch["target"].shape[1] == batch["target_lengths"].max()  # the end is no input


def test_translations_made_while_heads_are_counted_are_not_counted(folder):
    torch.manual_seed(0)
    task = Translation(vocabulary=270, max_tokens=19, **SMALL)
    task.open(str(folder))
    model = build(task.describe()).eval()
    rows = [(task._ids(text)[None], torch.tensor([len(task._ids(text))])) for text in ("word train", "x y")]

    def batches():  # as the corpus of a task makes them: one by one, while the model is watched
        for ids, lengths in rows:
            yield int(lengths.sum()), task.arrange(model, ids, lengths)

    ready = list(batches())
    one_by_one, before = (mh.heads.inspect.count(model, each) for each in (batches(), ready))
    assert (one_by_one.missed, before.missed) == ({}, {})
    assert one_by_one.table["tokens"].tolist() == before.table["tokens"].tolist()
    torch.testing.assert_close(one_by_one.table["entropy"], before.table["entropy"])


def test_heads_are_silenced_while_a_translation_is_written(folder):
    torch.manual_seed(0)
    task = Translation(vocabulary=270, max_tokens=19, **SMALL)
    task.open(str(folder))
    model = build(task.describe()).eval()
    ids, lengths = task._ids("word train xxx")[None], torch.tensor([len(task._ids("word train xxx"))])
    heads = {"decoder.blocks.0.cross_attention": [0], "decoder.blocks.0.attention": [1]}
    with mh.silence(model, heads):  # the first forward that is seen has a cache
        written = task.predict(model, ["word train xxx"], beams=1)
    small = mh.cut(model, heads, task.arrange(model, ids, lengths))
    assert written == task.predict(small, ["word train xxx"], beams=1)


class Rows(list):
    """What datasets gives, as far as it is used."""

    @property
    def column_names(self):
        return list(super().__getitem__(0))

    def __getitem__(self, key):
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)


def test_data_sets_of_the_hub(monkeypatch):
    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        if "nested" in name:
            return Rows([{"id": 1, "translation": {"en": "one", "de": "eins"}}])
        return Rows([{"en": "one", "fr": "un"}])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert read_pairs("some/nested", "en", "de", "valid") == ([("one", "eins")], 0)
    assert read_pairs("some/flat", "en", "fr") == ([("one", "un")], 0)
    assert asked == [("some/nested", "validation"), ("some/flat", "train")]
    with pytest.raises(ValueError, match="some/flat has no column 'de'; it has en, fr"):
        read_pairs("some/flat", "en", "de")
    with pytest.raises(ValueError, match="some/flat has no column 'text'"):
        read_documents("some/flat")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'manyheads\[data\]'"):
        read_pairs("some/flat", "en", "de")


def test_rows_of_the_hub_with_nothing_in_them_are_left_out_and_counted(monkeypatch):
    def load_dataset(name, split):
        if "nested" in name:
            return Rows(
                [{"translation": {"en": "one", "de": "eins"}}, {"translation": {"en": None, "de": "x"}}]
            )
        return Rows([{"text": "some words"}, {"text": None}])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert read_pairs("some/nested", "en", "de") == ([("one", "eins")], 1)
    with pytest.raises(ValueError, match="some/nested has no column 'fr'; it has en, de"):
        read_pairs("some/nested", "en", "fr")
    assert read_documents("some/texts") == ["some words", ""]


def test_sentences_longer_than_the_learned_positions(folder):
    (folder / "val.de").write_text("Wort " * 40 + "\n" + "x\n" * 4)
    task = Translation(vocabulary=258, max_tokens=13, positions="learned", **SMALL)
    data = task.open(str(folder))
    model = build(task.describe()).eval()
    part = task.measure(model, task.collate(data.valid.take(range(5), 0)))
    assert part[1] <= 14 + 4 * 3
