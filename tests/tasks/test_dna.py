"""DNA: words of bases, files of every kind, planted motifs, and letters that are none."""

import gzip

import pytest
import torch
from tokenizers import Tokenizer

from manyheads.data.readers.fasta import read_sequences
from manyheads.models.config import build
from manyheads.tasks.dna import CHANGED, DNA, JITTER, MOTIFS, planted, word_tokenizer

SIZES = {"d_model": 12, "heads": 3, "layers": 1}


@pytest.mark.parametrize("pooling", ["first", "mean"])
@pytest.mark.parametrize("word", [1, 2, 3])
def test_ids_are_those_of_the_tokenizer_that_people_get(tmp_path, word, pooling):
    task = DNA(word=word, pooling=pooling, **SIZES)
    task.save(tmp_path)
    given = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for sequence in ("ACGTTGCAN", "A", "GGNTTC"):
        assert task._ids(sequence).tolist() == given.encode(sequence).ids
    assert given.encode("acgu").tokens == given.encode("ACGT").tokens
    assert given.decode(given.encode("ACGTAAC").ids) == "ACGTAAC"
    assert given.get_vocab_size() == 2 + sum(4**size for size in range(1, word + 1))


def test_words_follow_each_other():
    assert word_tokenizer(3).encode("ACGTTGCA").tokens == ["ACG", "TTG", "CA"]


def test_padding_changes_nothing(tmp_path):
    for pooling in ("first", "mean"):
        task = DNA(pooling=pooling, positions="learned", **SIZES)
        task.open(None)
        model = build(task.describe()).double().eval()
        rows = [task._ids("ACGTACGTA"), task._ids("GGC")]
        both = task._padded(rows)
        assert both["lengths"].tolist() == [len(row) for row in rows]
        with torch.no_grad():
            together = model(**both)["logits"]
            alone = torch.cat([model(row[None])["logits"] for row in rows])
        assert torch.allclose(together, alone)


def test_planted_motifs_stand_where_they_should():
    pairs = planted(800)
    assert pairs == planted(800)
    first, second = MOTIFS
    for there in ((), (first,), (second,), (first, second)):
        mine = [sequence for name, sequence in pairs if name == (" ".join(there) or "none")]
        assert 150 < len(mine) < 250
        for motif, place in MOTIFS.items():
            starts = range(place, place + JITTER)
            found = [start for s in mine for start in starts if s[start : start + 6] == motif]
            share = len(found) / len(mine)
            if motif in there:  # unless one of its bases was changed into another one
                assert (1 - CHANGED) ** 6 - 0.12 < share < (1 - CHANGED * 3 / 4) ** 6 + 0.1
                assert set(found) == set(starts)
            else:
                assert share < 0.03
    assert {len(sequence) for _, sequence in pairs} == {60}


def test_fasta_by_class(tmp_path):
    (tmp_path / "ei.fa").write_text(">one\nacgt\nAC\n\n>two\n; a remark\nGGU\n")
    (tmp_path / "none.fasta.gz").write_bytes(gzip.compress(b">three\nTTTN\n>empty\n"))
    (tmp_path / "notes.md").write_text("not DNA")
    wanted = [("ei", "ACGTAC"), ("ei", "GGT"), ("none", "TTTN")], 1
    assert read_sequences(str(tmp_path), "all") == wanted
    files = f"{tmp_path / 'ei.fa'},{tmp_path / 'none.fasta.gz'}"
    assert read_sequences(files, "all") == wanted
    assert read_sequences(str(tmp_path), "train") is None


def test_parts_of_folders_and_tables(tmp_path):
    for part in ("train", "test"):
        (tmp_path / "a" / part).mkdir(parents=True)
        (tmp_path / "a" / part / "x.fa").write_text(f">1\n{part[0].upper()}\n".replace("\nT\n", "\nTT\n"))
    assert read_sequences(str(tmp_path / "a"), "test")[0] == [("x", "TT")]
    assert read_sequences(str(tmp_path / "a"), "valid") is None
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "train.tsv").write_text("class\tsequence\nx\tACG\ny\tGG\nx\t\n\n")
    (tmp_path / "b" / "val.tsv").write_text("y\tTTT\n")
    assert read_sequences(str(tmp_path / "b"), "train") == ([("x", "ACG"), ("y", "GG")], 1)
    data = DNA(**SIZES).open(str(tmp_path / "b"))
    assert (len(data.train), len(data.valid)) == (2, 1)
    assert data.notes[1] == "1 records without a class or a sequence were left out"


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("x.fa", ">1\nACGT\nACXT\n", r"line 3 of .*x\.fa has 'X', which is not a base"),
        ("x.fa", "ACGT\n>1\nACGT\n", r"line 1 of .*x\.fa comes before any header"),
        ("x.fa", "", r"x\.fa is empty"),
        ("x.fa", ">1\n>2\n", "holds headers and no sequence"),
        ("x.fa", "\x1f\x8bnothing", "is damaged|before any header"),
        ("x.tsv", "a\tACGT\nb\tAC-T\n", r"line 2 of .*x\.tsv has '-', which is not a base"),
        ("x.tsv", "a\tACGT\nb ACGT\n", r"line 2 of .*x\.tsv has 1 columns; expected 2"),
        ("x.tsv", "\n", r"x\.tsv holds no sequence"),
    ],
)
def test_bad_files_are_told_with_their_line(tmp_path, name, content, why):
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=why):
        read_sequences(str(tmp_path / name), "all")


def test_data_that_is_not_there(tmp_path):
    for data in (tmp_path / "no.tsv", tmp_path / "no.fa"):
        with pytest.raises(ValueError, match="there is no "):
            read_sequences(str(data), "all")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no FASTA file"):
        read_sequences(str(tmp_path / "empty"), "all")


def test_long_sequences_are_cut_and_counted(tmp_path):
    (tmp_path / "d.tsv").write_text("a\tACGTACGTAC\nb\tGG\n" * 6)
    task = DNA(max_tokens=3, word=2, **SIZES)
    data = task.open(str(tmp_path / "d.tsv"))
    assert max(data.train.sizes) == 3
    assert data.notes[-1] == "6 sequences longer than 3 tokens were truncated"


def test_predict_names_classes_and_refuses_other_letters(tmp_path):
    task = DNA(**SIZES)
    task.open(None)
    model = build(task.describe())
    named = task.predict(model, ["ACGT", "TTGACA" * 3])
    alone = [task.predict(model, [sequence])[0] for sequence in ("ACGT", "ttgaca" * 3)]
    assert named == alone
    assert set(named) <= set(task.labels)
    with pytest.raises(ValueError, match="'ACGE' has 'E', which is not a base"):
        task.predict(model, ["ACGE"])
    with pytest.raises(ValueError, match="at least one base"):
        task.predict(model, [" "])
    assert task.one("ACN")[1] == ["A", "C", "?"]
    assert DNA(pooling="first").one("AC")[1] == ["<class>", "A", "C"]


@pytest.mark.parametrize("option", ["word", "max_tokens"])
def test_options_are_checked(option):
    with pytest.raises(ValueError, match=f"{option}: expected 1"):
        DNA(**{option: 0})
