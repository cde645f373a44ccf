"""Tables of every kind give the same rows; what is broken is one sentence with its line."""

import csv
import json

import pytest

from manyheads.data.readers.records import read_records

ROWS = [{"text": 'so, "so"\nand so', "label": "1"}, {"text": "ünï", "label": "2"}]


def test_every_format_gives_the_same_rows(tmp_path):
    import datasets
    import pandas

    frame = pandas.DataFrame(ROWS)
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame.to_parquet(tmp_path / "t.parquet")
    (tmp_path / "t.jsonl").write_text("\n\n".join(json.dumps(row) for row in ROWS))
    (tmp_path / "t.json").write_text(json.dumps(ROWS))
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    for name in ("t.csv", "t.parquet", "t.jsonl", "t.json", "saved"):
        table = read_records(str(tmp_path / name))
        assert table.columns == ["text", "label"]
        assert [dict(row.values) for row in table.rows] == ROWS, name
    assert [row.where for row in read_records(str(tmp_path / "t.csv")).rows] == ["line 2", "line 4"]
    assert [row.where for row in read_records(str(tmp_path / "t.jsonl")).rows] == ["line 1", "line 3"]


def test_tsv_keeps_its_quotation_marks(tmp_path):
    (tmp_path / "t.tsv").write_text('text\tlabel\nsay "no\t1\n')
    assert read_records(str(tmp_path / "t.tsv")).rows[0].values == {"text": 'say "no', "label": "1"}


def test_semicolons_and_a_byte_order_mark(tmp_path):
    (tmp_path / "t.csv").write_text("\ufefftext;label\na,b;1\n", encoding="utf-8")
    assert read_records(str(tmp_path / "t.csv")).rows[0].values == {"text": "a,b", "label": "1"}


def test_parts_of_objects_are_columns(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"translation": {"en": "a", "de": "b"}}\n{"other": 1}')
    table = read_records(str(tmp_path / "t.jsonl"))
    assert table.columns == ["translation", "translation.en", "translation.de", "other"]
    assert table.rows[0].values["translation.de"] == "b"
    assert table.rows[1].values["translation.de"] is None


def test_names_of_classes_and_splits_of_datasets(tmp_path):
    import datasets

    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])}
    )
    part = datasets.Dataset.from_list([{"text": "a", "label": 1}], features=features)
    datasets.DatasetDict({"train": part, "test": part}).save_to_disk(tmp_path / "saved")
    part.to_parquet(tmp_path / "t.parquet")
    table = read_records(str(tmp_path / "saved"))
    assert table.what.endswith("test")  # there is no validation split
    assert table.class_names == {"label": ["no", "yes"]}
    assert read_records(str(tmp_path / "t.parquet")).class_names == {"label": ["no", "yes"]}
    assert read_records(str(tmp_path / "saved"), split="train").what.endswith("train")
    with pytest.raises(ValueError, match=r"split: .* has no 'dev'; it has train, test"):
        read_records(str(tmp_path / "saved"), split="dev")


def test_a_column_called_split_chooses_rows(tmp_path):
    (tmp_path / "t.csv").write_text("text,split\na,train\nb,test\n")
    assert [row.values["text"] for row in read_records(str(tmp_path / "t.csv"), split="test").rows] == ["b"]
    with pytest.raises(ValueError, match="has no 'dev'; its column 'split' has test, train"):
        read_records(str(tmp_path / "t.csv"), split="dev")
    (tmp_path / "u.csv").write_text("text\na\n")
    with pytest.raises(ValueError, match="has no column 'split'"):
        read_records(str(tmp_path / "u.csv"), split="test")


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("t.csv", "", "is empty"),
        ("t.csv", "text,label\n", "has no row"),
        ("t.csv", 'text,label\n"a,1\n', "line 2 of .* is not a row of a table"),
        ("t.csv", "text,label\na,1\nb\n", "line 3 of .* has 1 cells; expected 2"),
        ("t.csv", "text,text\na,1\n", "two columns called 'text'"),
        ("t.csv", b"text\n\xff\n", "line 2 of .* is not UTF-8"),
        ("t.jsonl", '{"text": "a"}\n{"text": \n', "line 2 of .* is not a JSON object"),
        ("t.jsonl", '{"text": "a"}\n[1]\n', "line 2 of .* is not a JSON object"),
        ("t.jsonl", "\n\n", "is empty"),
        ("t.parquet", "no", "is not a readable Parquet file"),
        ("t.xlsx", "no", "ends in .xlsx; expected a .csv"),
    ],
)
def test_bad_files_are_one_sentence(tmp_path, name, content, sentence):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=sentence):
        read_records(str(path))


def test_long_fields_are_read_and_endless_ones_are_refused(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("text,label\n" + "a" * 200_000 + ",1\n")
    before = csv.field_size_limit()
    assert len(read_records(str(path)).rows[0].values["text"]) == 200_000
    path.write_text("text,label\n" + "a" * 10_000_001 + ",1\n")
    with pytest.raises(ValueError, match=r"line 2 of .* larger than field limit"):
        read_records(str(path))
    assert csv.field_size_limit() == before


def test_what_is_not_there(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="there is no file"):
        read_records(str(tmp_path / "none.csv"))
    with pytest.raises(ValueError, match="has no folders with images or sounds"):
        read_records(str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets

    monkeypatch.setattr(
        datasets, "load_dataset", lambda *names: (_ for _ in ()).throw(ConnectionError("offline"))
    )
    with pytest.raises(
        ValueError, match="'owner/name' is neither a file here nor a dataset that can be read"
    ):
        read_records("owner/name")


def test_a_dataset_of_the_hub_by_its_name_and_config(monkeypatch):
    import datasets

    part = datasets.Dataset.from_list([{"text": "a", "label": 1}])
    asked = []

    def load(name, config):
        asked.append((name, config))
        return datasets.DatasetDict({"validation": part})

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert read_records("owner/name:small").what == "owner/name:small, validation"
    assert asked == [("owner/name", "small")]


def test_a_limit_takes_rows_evenly(tmp_path):
    import datasets

    rows = [{"text": str(n)} for n in range(10)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    for name, where in (("t.jsonl", "line"), ("saved", "row")):
        chosen = read_records(str(tmp_path / name), limit=3).rows
        assert [row.values["text"] for row in chosen] == ["0", "3", "6"]
        assert [row.where for row in chosen] == [f"{where} 1", f"{where} 4", f"{where} 7"]
