"""Texts, ids and pictures as batches: nothing lost, nothing too large, and a sentence for bad input."""

import io
import json
import random
import sys
from collections import Counter
from types import SimpleNamespace

import numpy
import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.helpers.models import bert_config, t5_config
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn

from manyheads.data import corpus
from manyheads.data import text_lines as lines
from manyheads.data.batches import Corpus, bucketed, groups, unknown_id
from manyheads.data.text_lines import read_lines
from manyheads.data.text_streams import read_texts, reservoir
from manyheads.data.token_store import TokenStore
from manyheads.models.loaded import Loaded

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "a", "b", "c", "d", "e", "f", "g"]


def tokenizer():
    """One token a word, [CLS] and [SEP] around them."""
    plain = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, "[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    plain.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 1), ("[SEP]", 2)])
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    return hf.PreTrainedTokenizerFast(tokenizer_object=plain, **names)


def bert(**changes):
    config = {
        "vocab_size": 11,
        "hidden_size": 6,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "intermediate_size": 5,
        "max_position_embeddings": 7,
    }
    return loaded(hf.BertModel(bert_config(**config | changes)), tokenizer())


def loaded(model, reader=None):
    return Loaded("tiny", model, lambda: reader, lambda: reader)


def write(tmp_path, content):
    path = tmp_path / "text.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def all_ids(read):
    """Every sequence of a corpus, without its padding."""
    found = []
    for _, batch in read.batches():
        for ids, real in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            found.append(ids[real.bool()].tolist())
    return sorted(found)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 90), st.booleans())
@settings(max_examples=50, deadline=None)
def test_buckets_hold_everything_once_and_no_more_than_fits(sizes, batch_tokens, padding):
    batches = bucketed(sizes, batch_tokens, padding)
    assert sorted(i for batch in batches for i in batch) == list(range(len(sizes)))
    for batch in batches:
        lengths = [sizes[i] for i in batch]
        assert len(batch) == 1 or len(batch) * max(lengths) <= batch_tokens
        assert padding or len(set(lengths)) == 1


def test_texts_become_padded_batches_and_long_ones_pieces(tmp_path):
    path = write(tmp_path, "a b c\n\n   \nd\na b c d e f g a\n")
    read = corpus.text(bert(), path, batch_tokens=14)
    # seven positions: five words a piece
    assert all_ids(read) == [[1, 4, 5, 6, 2], [1, 4, 5, 6, 7, 8, 2], [1, 7, 2], [1, 9, 10, 4, 2]]
    assert read.total() == sum(units for units, _ in read.batches()) == 5 + 7 + 3 + 5
    for _, batch in read.batches():
        assert batch["input_ids"].numel() <= 14
        assert batch["input_ids"][batch["attention_mask"] == 0].eq(0).all()


def test_shorter_pieces_and_fewer_texts(tmp_path):
    path = write(tmp_path, "a b c\nd\ne\n")
    assert all_ids(corpus.text(bert(), path, max_length=4, limit=2)) == [[1, 4, 5, 2], [1, 6, 2], [1, 7, 2]]


def test_processes_share_the_same_batches(tmp_path):
    path = write(tmp_path, "\n".join(" ".join(WORDS[4 : 5 + n % 5]) for n in range(23)))
    read = corpus.text(bert(), path, batch_tokens=14)
    whole = [batch["input_ids"].tolist() for _, batch in read.batches()]
    parts = [[batch["input_ids"].tolist() for _, batch in read.batches(rank, 3)] for rank in range(3)]
    assert sorted(whole) == sorted(batch for part in parts for batch in part)
    assert sum(read.total(rank, 3) for rank in range(3)) == read.total()
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_special_frequent_and_rare_tokens(tmp_path):
    read = corpus.text(bert(), write(tmp_path, "a a a b\nc b b\nd\n"))
    assert read.groups == {"special": [1, 2], "frequent": [5], "rare": [6, 7]}
    assert read.shares == {"special": 6 / 14, "frequent": 3 / 14, "rare": 2 / 14}


@given(st.dictionaries(st.integers(0, 30), st.integers(1, 9), min_size=4))
@settings(max_examples=50, deadline=None)
def test_groups_keep_their_word(counts):
    chosen, shares = groups(counts, special=[0, 1, 99])
    ordinary = Counter({token: n for token, n in counts.items() if token > 1})
    assert set(chosen.get("special", [])) == {0, 1} & set(counts)
    for name, sign in (("frequent", -1), ("rare", 1)):
        ids = chosen[name]
        assert len(ids) == 1 or sum(ordinary[i] for i in ids) <= ordinary.total() / 4
        edge = max(sign * ordinary[i] for i in ids)
        assert all(sign * n >= edge for i, n in ordinary.items() if i not in ids)
        assert shares[name] == sum(counts[i] for i in ids) / sum(counts.values())


def test_a_text_of_our_own():
    lines = list(read_lines(None, None))
    assert len(lines) > 50
    assert all(line.strip() == line and line for line in lines)


def test_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"a b\nc")))
    read = corpus.text(bert(), "-")
    assert all_ids(read) == [[1, 4, 5, 2], [1, 6, 2]]
    assert read.what == "standard input"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty; expected at least one line of text"),
        (" \n\n", "is empty; expected at least one line of text"),
        (b"a\nb \xe9\n", r"line 2 of .* is not UTF-8 \(byte 0xe9 at position 2\); convert it"),
        (b"\xff\xfea\x00", r"line 1 of .* is not UTF-8"),
    ],
)
def test_bad_texts(tmp_path, content, words):
    with pytest.raises(ValueError, match=words):
        corpus.text(bert(), write(tmp_path, content))


def test_an_endless_line_is_not_read_to_its_end(monkeypatch):
    monkeypatch.setattr(lines, "LONGEST_LINE", 100)

    class Endless(io.RawIOBase):
        def readline(self, size=-1):
            assert 0 < size < 200
            return b"a" * size

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=Endless()))
    with pytest.raises(
        ValueError, match=r"line 1 of standard input has over 100 bytes; .* break it into lines"
    ):
        corpus.text(bert(), "-")


def test_a_mark_at_the_start_of_the_file_is_no_text(tmp_path):
    assert all_ids(corpus.text(bert(), write(tmp_path, b"\xef\xbb\xbfa"))) == [[1, 4, 2]]


def test_a_text_that_is_no_file(tmp_path):
    with pytest.raises(ValueError, match="is a folder; expected a text file"):
        corpus.text(bert(), str(tmp_path))
    with pytest.raises(ValueError, match="is not a file; expected a text file"):
        corpus.text(bert(), str(tmp_path / "none"))


def test_lengths_past_the_positions(tmp_path):
    path = write(tmp_path, "a")
    with pytest.raises(ValueError, match="max-length: got 8, but the model has 7 positions; give at most 7"):
        corpus.text(bert(), path, max_length=8)
    with pytest.raises(ValueError, match="max-length: got 2; this tokenizer needs at least 3"):
        corpus.text(bert(), path, max_length=2)
    ids = tmp_path / "ids.npy"
    numpy.save(ids, numpy.ones((2, 9), int))
    with pytest.raises(
        ValueError, match="sequences of 9 tokens, but the model has 7 positions; --max-length 7"
    ):
        corpus.tokens(bert(), str(ids))
    assert [len(x) for x in all_ids(corpus.tokens(bert(), str(ids), max_length=7))] == [2, 2, 7, 7]


def test_a_tokenizer_of_another_model(tmp_path):
    with pytest.raises(ValueError, match=r"gives the id 10; expected 0 to 8, .* take the tokenizer"):
        corpus.text(bert(vocab_size=9), write(tmp_path, "a g"))


class Plain(nn.Module):
    """A model with neither names nor masks."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(13, 4)

    def forward(self, x):
        return self.table(x)


def test_a_model_without_a_mask_gets_equal_lengths_and_plain_ids(tmp_path):
    read = corpus.text(
        loaded(Plain(), lambda line: [len(word) for word in line.split()]), write(tmp_path, "a\nb c\nd")
    )
    batches = [batch for _, batch in read.batches()]
    assert all(isinstance(batch, torch.Tensor) for batch in batches)
    assert sorted(tuple(batch.shape) for batch in batches) == [(1, 2), (2, 1)]


def test_a_decoder_reads_the_same_text_one_token_late(tmp_path):
    config = t5_config(
        vocab_size=11, d_model=4, d_kv=2, d_ff=3, num_layers=1, num_heads=2, decoder_start_token_id=3
    )
    read = corpus.text(loaded(hf.T5Model(config), tokenizer()), write(tmp_path, "a b\nc"))
    found = sorted((b["input_ids"].tolist(), b["decoder_input_ids"].tolist()) for _, b in read.batches())
    assert found == [([[1, 4, 5, 2]], [[3, 1, 4, 5]]), ([[1, 6, 2]], [[3, 1, 6]])]  # unpadded


def test_ids_as_one_stream(tmp_path):
    path = tmp_path / "ids.npy"
    numpy.save(path, numpy.arange(11, dtype=numpy.uint16))
    assert all_ids(corpus.tokens(bert(), str(path))) == [[0, 1, 2, 3, 4, 5, 6], [7, 8, 9, 10]]
    assert all_ids(corpus.tokens(bert(), str(path), batch_tokens=5, limit=2)) == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9],
    ]


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (numpy.array([[3, 11]]), "holds the id 11; expected 0 to 10"),
        (numpy.array([[3, -1]]), "holds the id -1; expected 0 to 10"),
        (numpy.array([[0.5]]), r"holds float64 \(1, 1\); expected integers"),
        (numpy.ones((1, 1, 1), int), r"holds int64 \(1, 1, 1\); expected integers"),
        (numpy.ones((0, 3), int), "holds no tokens"),
        (numpy.array([object()]), r"is not a \.npy file of numbers"),
    ],
)
def test_bad_ids(tmp_path, ids, words):
    numpy.save(tmp_path / "ids.npy", ids, allow_pickle=True)
    with pytest.raises(ValueError, match=words):
        corpus.tokens(bert(), str(tmp_path / "ids.npy"))


def test_files_that_hold_no_ids(tmp_path):
    with pytest.raises(ValueError, match="there is no file"):
        corpus.tokens(bert(), str(tmp_path / "none.npy"))
    (tmp_path / "text.npy").write_text("some text")
    with pytest.raises(ValueError, match=r"is not a \.npy file of numbers"):
        corpus.tokens(bert(), str(tmp_path / "text.npy"))


def pictures(tmp_path, number):
    (tmp_path / "inner").mkdir()
    for n in range(number):
        Image.new("RGB", (3, 5), (n, 0, 0)).save(tmp_path / "inner" / f"{n}.png")
    (tmp_path / "notes.txt").write_text("no picture")
    return str(tmp_path)


def reader(pictures):
    """An own processor: the red of the first pixel."""
    return torch.tensor([[picture.getpixel((0, 0))[0]] for picture in pictures])


def test_pictures_of_a_folder(tmp_path):
    read = corpus.images(loaded(Plain(), reader), pictures(tmp_path, 5), batch_tokens=512)
    found = list(read.batches())
    assert sorted(units for units, _ in found) == [1, 2, 2]
    assert sorted(torch.cat([batch for _, batch in found]).flatten().tolist()) == [0, 1, 2, 3, 4]
    assert (read.unit, read.total()) == ("images", 5)


def test_bad_pictures(tmp_path):
    with pytest.raises(ValueError, match="holds no images; expected files that end in"):
        corpus.images(loaded(Plain(), reader), str(tmp_path))
    with pytest.raises(ValueError, match="is not a folder"):
        corpus.images(loaded(Plain(), reader), str(tmp_path / "none"))
    (tmp_path / "a.png").write_bytes(b"no picture")
    read = corpus.images(loaded(Plain(), reader), str(tmp_path))
    with pytest.raises(ValueError, match=r"a\.png is not a readable image; repair or remove it"):
        list(read.batches())


def test_unknown_words_are_counted_and_told(tmp_path):
    read = corpus.text(bert(), write(tmp_path, "a b zebra\nc d\n"))
    assert read.unknown == pytest.approx(1 / 9)
    assert read.notes[0].startswith("11.1% of the tokens are unknown to the tokenizer")
    known = corpus.text(bert(), write(tmp_path, "a b\n"))
    assert (known.unknown, known.notes) == (0.0, [])


def test_tokenizers_of_bytes_know_everything():
    end = SimpleNamespace(unk_token_id=3, bos_token_id=3, eos_token_id=3)
    assert unknown_id(end) is None
    assert unknown_id(SimpleNamespace(unk_token_id=0, pad_token_id=0, eos_token_id=2)) == 0
    assert unknown_id(None) is None


def numbers(sizes: list[int]) -> Corpus:
    """A corpus whose sequences are their own numbers, repeated."""
    return Corpus("numbers", "tokens", sizes, lambda indices: [[i] * sizes[i] for i in indices])


def test_a_sample_is_bounded_the_same_every_time_and_of_the_right_sequences() -> None:
    corpus = numbers([2 + 7 * (i % 5) for i in range(97)])
    sample = corpus.sampled(211)
    assert 211 - 30 < sum(sample.sizes) <= 211
    assert sample.sizes == corpus.sampled(211).sizes != corpus.sampled(211, seed=1).sizes
    made = sample.make(range(len(sample.sizes)))
    assert [len(row) for row in made] == sample.sizes
    assert len({row[0] for row in made}) == len(made)
    assert sample.notes == [f"measured on a sample of {len(made)} of 97 texts ({sum(sample.sizes):,} tokens)"]
    assert sample.sampled(50).sampled_from == 97
    assert corpus.notes == []


def test_a_sample_has_long_sequences_as_often_as_short_ones() -> None:
    corpus = numbers([1 + 12 * (i % 2) for i in range(1009)])
    shares = [
        sum(size > 1 for size in part.sizes) / len(part.sizes)
        for part in (corpus.sampled(701, seed=seed) for seed in range(23))
    ]
    assert abs(sum(shares) / len(shares) - 0.5) < 0.05


def test_all_of_a_corpus_is_no_sample() -> None:
    corpus = numbers([5, 3])
    assert corpus.sampled(8) is corpus
    assert corpus.sampled(0) is corpus
    assert len(corpus.sampled(1).sizes) == 1  # however long: nothing cannot be measured on


def rows_of(tmp_path, count=7):
    """The same texts in several kinds of files; one row of tables is empty."""
    texts = [" ".join("abcdefg"[: 1 + number % 7]) for number in range(count)]
    (tmp_path / "lines.txt").write_text("\n".join(texts))
    rows = [{"id": number, "words": text} for number, text in enumerate([*texts[:3], None, *texts[3:]])]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=2)
    return texts


def test_texts_are_streamed_from_lines_json_and_parquet(tmp_path):
    texts = rows_of(tmp_path)
    for name, column in (("lines.txt", None), ("rows.jsonl", "words"), ("rows.parquet", "words")):
        assert list(read_texts(str(tmp_path / name), column)) == texts
        assert list(read_texts(str(tmp_path / name), column, limit=2)) == texts[:2]
    assert list(read_texts(str(tmp_path / "rows.*"), "words")) == texts * 2
    (tmp_path / "more.jsonl").write_text('{"text": "g"}\n')
    assert list(read_texts(str(tmp_path / "more.jsonl"))) == ["g"]
    whole, pattern = (corpus.text(bert(), str(tmp_path / name), column="words" if "*" in name else None)
                      for name in ("lines.txt", "rows.jso*"))  # fmt: skip
    assert all_ids(whole) == all_ids(pattern)
    assert whole.fingerprint == pattern.fingerprint


@pytest.mark.parametrize(
    ("name", "column", "words"),
    [
        ("rows.jsonl", "text", "column: a row of .* has no 'text'; it has id, words"),
        ("rows.parquet", "text", "column: .* has no 'text'; it has id, words"),
        ("rows.jsonl", "id", "column: 'id' of .* holds a int; expected texts"),
        ("lines.txt", "words", "column: got 'words', but .* has lines of text"),
        ("none-*.txt", None, "text: no file matches .*; expected a pattern that some files match"),
        ("bad.jsonl", None, "text: row 2 of .* is not a JSON object"),
        ("bad.parquet", None, "text: .* is not a readable Parquet file"),
        ("empty.jsonl", "a", "text: .* holds no text; expected at least one"),
    ],
)
def test_streams_that_hold_no_text(tmp_path, name, column, words):
    rows_of(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n["text"]\n')
    (tmp_path / "bad.parquet").write_text("PAR1")
    (tmp_path / "empty.jsonl").write_text('{"a": " "}\n')
    with pytest.raises(ValueError, match=words):
        list(read_texts(str(tmp_path / name), column))


def test_a_dataset_is_streamed(monkeypatch):
    """Only as many rows are asked for as are read."""
    asked = []

    def load_dataset(name, config, split, streaming):
        assert (name, config, split, streaming) == ("owner/name", "small", "test", True)
        for number in range(10**9):
            asked.append(number)
            yield {"text": f"a {number}"}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert list(read_texts("owner/name:small", split="test", limit=3)) == ["a 0", "a 1", "a 2"]
    assert len(asked) == 3


def test_ids_in_a_file_are_those_in_memory():
    generator = random.Random(0)
    sequences = [[generator.randrange(2**31) for _ in range(generator.randrange(7))] for _ in range(101)]
    small, large = TokenStore(), TokenStore(chunk=13)
    for ids in sequences:
        small.add(ids)
        large.add(ids)
    for store in (small, large):
        assert [list(store[number]) for number in range(101)] == sequences
        assert list(store.sizes) == [len(ids) for ids in sequences]
        assert store.sizes[-1] == len(sequences[-1])
        with pytest.raises(IndexError):
            store.sizes[101]
    assert small.counts == large.counts


def test_many_sequences_are_planned_in_windows(monkeypatch):
    sizes = [2 + 5 * number % 7 for number in range(101)]
    whole = Corpus("ids", "tokens", sizes, torch.tensor, batch_tokens=20)
    one = list(whole.plan())
    monkeypatch.setattr("manyheads.data.batches.WINDOW", 13)
    plan = whole.plan()
    assert len(plan) == len(list(plan)) > 8
    assert sorted(index for batch in plan for index in batch) == list(range(101))
    assert all(len({index // 13 for index in batch}) == 1 for batch in plan)
    assert [batch.tolist() for _, batch in whole.batches(1, 3)] == list(plan)[1::3]
    assert whole.total() == sum(sizes) == sum(whole.total(rank, 3) for rank in range(3))
    sample = whole.sampled(50)
    assert sum(sample.sizes) <= 50
    assert sample.sampled_from == 101
    assert len(one) < len(plan)


def test_a_reservoir_is_a_fair_sample():
    """Each of 11 texts is among 3 about as often: 3/11 of 2,000 draws, within five standard errors."""
    counts = Counter(text for seed in range(2000) for text in reservoir("abcdefghijk", 3, seed)[0])
    error = (2000 * 3 / 11 * 8 / 11) ** 0.5
    assert all(abs(count - 2000 * 3 / 11) < 5 * error for count in counts.values())
    assert len(counts) == 11


def test_a_sample_of_a_stream_is_said(tmp_path):
    rows_of(tmp_path, count=61)
    read = corpus.choose(bert(), str(tmp_path / "lines.txt"), None, None, None, None, 40, sample=5)
    assert read.notes == [
        f"measured on a sample: {len(read.sizes)} sequences ({sum(read.sizes)} tokens) of texts that were "
        "drawn at random from 61"
    ]
    assert read.sampled(7).drawn_from == 61
    whole = corpus.choose(bert(), str(tmp_path / "lines.txt"), None, None, None, None, 40, sample=61)
    assert whole.notes == []
    assert all_ids(whole) == all_ids(corpus.text(bert(), str(tmp_path / "lines.txt")))
