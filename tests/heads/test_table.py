"""HeadTables merge exactly, survive a file, and refuse what does not belong together."""

from __future__ import annotations

import errno
import math
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.models import Nano, tokens

from manyheads.heads.call_statistics import Tally
from manyheads.heads.table import HeadTable, Row
from manyheads.heads.watch import watch

HEADS = 3
ROWS = [Row("a.0", 0, head, head, head, "self") for head in range(HEADS)]


def table_of(values: torch.Tensor, counted: torch.Tensor) -> HeadTable:
    tally = Tally(["entropy"], HEADS, profiles=True)
    tally.add({"entropy": values}, counted)
    return HeadTable(ROWS, tally.tokens, tally.sums, "model", {"a.0": tally.profiles or {}})


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6)), min_size=1, max_size=5),
    seed=st.integers(0, 2**16),
    data=st.data(),
)
def test_merging_equals_collecting_together(
    sizes: list[tuple[int, int]], seed: int, data: st.DataObject
) -> None:
    """Whatever the split and the order; whole numbers make float64 sums exact, so equal means equal."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for batch, length in sizes:
        values = torch.randint(-50, 50, (batch, HEADS, length), generator=generator).double()
        counted = torch.rand(batch, HEADS, length, generator=generator) < 0.7
        parts.append((values, counted))
    together = Tally(["entropy"], HEADS, profiles=True)
    for values, counted in parts:
        together.add({"entropy": values}, counted)
    order = data.draw(st.permutations(range(len(parts))))
    tables = [table_of(*parts[i]) for i in order]
    cut = data.draw(st.integers(1, len(tables)))
    merged = tables[0].merge(*tables[1:cut])
    for table in tables[cut:]:
        merged = merged.merge(table)
    assert torch.equal(merged.tokens, together.tokens)
    assert torch.equal(merged.sums["entropy"], together.sums["entropy"])
    assert together.profiles is not None
    assert torch.equal(merged.profiles["a.0"]["entropy"], together.profiles["entropy"])


def test_mean_and_standard_error_are_the_usual_ones() -> None:
    values = torch.randn(4, HEADS, 7, dtype=torch.float64)
    table = table_of(values, torch.ones(4, HEADS, 7, dtype=torch.bool))
    each = values.transpose(0, 1).flatten(1)
    torch.testing.assert_close(table["entropy"], each.mean(1))
    torch.testing.assert_close(table["entropy_se"], each.std(1) / math.sqrt(28))
    real = torch.arange(7) < torch.tensor([7, 5, 2, 0])[:, None]  # (batch, queries)
    padded = table_of(values, real[:, None].expand(-1, HEADS, -1))
    torch.testing.assert_close(padded["entropy"], values.transpose(1, 2)[real].mean(0))
    torch.testing.assert_close(padded["entropy_se"], values.transpose(1, 2)[real].std(0) / math.sqrt(14))
    one = table_of(values[:1, :, :1], torch.ones(1, HEADS, 1, dtype=torch.bool))
    assert one["entropy_se"].isnan().all()


def test_halves_of_a_corpus_merge_to_the_whole() -> None:
    model, batches = Nano().eval(), [tokens(seed)["input_ids"][:, : 5 + seed] for seed in range(3)]
    tables = []
    for part in (batches, batches[:1], batches[1:]):
        with torch.no_grad(), watch(model, "full", profiles=True) as seen:
            for batch in part:
                model(batch)
        tables.append(seen.table)
    whole, merged = tables[0], tables[1].merge(tables[2])
    assert merged.rows == whole.rows
    assert torch.equal(merged.tokens, whole.tokens)
    for column in whole.columns[7:]:
        exact = 1e-7 if column.endswith("_se") else 1e-12  # a spread of nearly nothing keeps few digits
        torch.testing.assert_close(merged[column], whole[column], rtol=1e-12, atol=exact)
    for name in ("entropy", "received"):
        torch.testing.assert_close(
            merged.profile("h.1", name), whole.profile("h.1", name), rtol=1e-12, atol=1e-12
        )


def test_a_site_seen_by_one_half_only_is_kept() -> None:
    a = table_of(torch.ones(1, HEADS, 2), torch.ones(1, HEADS, 2, dtype=torch.bool))
    b = HeadTable(
        [Row("b.0", 0, 0, 0, 0, "cross")], torch.tensor([5.0]), {"entropy": torch.ones(3, 1)}, "model"
    )
    merged = a.merge(b)
    assert merged["site"] == ["a.0", "a.0", "a.0", "b.0"]
    assert merged["tokens"].tolist() == [2.0, 2.0, 2.0, 5.0]


def test_what_does_not_belong_together_does_not_merge() -> None:
    ids = torch.zeros(2, 5, dtype=torch.long)
    tables = []
    for model, statistics in ((Nano(), "core"), (Nano(), "core")):
        with watch(model, statistics) as seen:  # type: ignore[arg-type]
            model(ids)
        tables.append(seen.table)
    with pytest.raises(
        ValueError, match=r"different models, .*; expected one model .* keep the tables of each"
    ):
        tables[0].merge(tables[1])
    with watch(model, "full") as seen:
        model(ids)
    with pytest.raises(ValueError, match=r"only one of the tables has .*confidence"):
        tables[1].merge(seen.table)
    with pytest.raises(TypeError, match="expected a HeadTable, got dict"):
        tables[0].merge({})  # type: ignore[arg-type]


@pytest.fixture
def table() -> HeadTable:
    model = Nano().eval()
    with torch.no_grad(), watch(model, "full") as seen:
        model(tokens()["input_ids"])
    return seen.table


@pytest.mark.parametrize("ending", ["json", "csv", "parquet"])
def test_files_keep_everything_exactly(table: HeadTable, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"heads.{ending}"
    table.save(path)
    again = HeadTable.load(path)
    assert again.rows == table.rows
    assert again.model == table.model
    assert again.columns == table.columns
    assert torch.equal(again.tokens, table.tokens)
    assert all(torch.equal(again.sums[name], value) for name, value in table.sums.items())
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    table.merge(again)


def test_profiles_need_json(tmp_path: Path) -> None:
    table = table_of(torch.rand(2, HEADS, 5).double(), torch.ones(2, HEADS, 5, dtype=torch.bool))
    table.save(tmp_path / "a.json")
    again = HeadTable.load(tmp_path / "a.json")
    assert torch.equal(again.profile("a.0", "entropy"), table.profile("a.0", "entropy"))
    with pytest.raises(ValueError, match=r"profiles .* only be kept in \.json"):
        table.save(tmp_path / "a.csv")


def test_parquet_without_pyarrow_says_so(
    table: HeadTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ImportError, match="Parquet files need pyarrow"):
        table.save(tmp_path / "a.parquet")
    assert not list(tmp_path.iterdir())


def test_other_programs_read_the_columns_of_a_parquet_file(table: HeadTable, tmp_path: Path) -> None:
    import pandas

    labelled = replace(table, labels={"roles": ["", "previous", "", "", "first, previous", ""]})
    labelled.save(tmp_path / "a.parquet")
    assert HeadTable.load(tmp_path / "a.parquet").labels == labelled.labels
    frame = pandas.read_parquet(tmp_path / "a.parquet")
    pandas.testing.assert_frame_equal(frame[labelled.columns], labelled.to_pandas())
    assert set(frame["model"]) == {table.model}
    assert frame["entropy_count"].tolist() == table.sums["entropy"][0].tolist()


def test_pandas_has_a_row_for_each_head(table: HeadTable) -> None:
    frame = table.to_pandas()
    assert list(frame.columns) == table.columns
    assert frame["head"].tolist() == [0, 1, 2, 0, 1, 2]
    assert frame["site"].tolist() == table["site"]
    assert frame["entropy"].tolist() == table["entropy"].tolist()
    by_layer = frame.groupby("layer")["previous"].mean()
    torch.testing.assert_close(torch.tensor(by_layer.tolist()), table["previous"].view(2, 3).mean(1).float())


def test_pandas_missing_says_so(table: HeadTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(ImportError, match="to_pandas needs pandas"):
        table.to_pandas()


def test_a_failed_write_leaves_the_old_file(
    table: HeadTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    table.save(path)
    before = path.read_bytes()

    def full_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.replace", full_disk)
    with pytest.raises(OSError, match=r"No space left on device: '.*a\.json'"):
        table.save(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("ending", ["json", "csv", "parquet"])
def test_a_disk_that_is_really_full(table: HeadTable, tmp_path: Path, ending: str) -> None:
    """Where files may not grow beyond a few bytes, the old one stays, and nothing else."""
    path = tmp_path / f"a.{ending}"
    table.save(path)
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)  # Python ignores the signal, so that writing raises
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match=f"File too large: '.*a.{ending}'"):
            table.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "content", ["", "{}", "[1, 2]", '{"format": "manyheads head table", "version": 99}', "a,b\n1"]
)
@pytest.mark.parametrize("ending", ["json", "csv"])
def test_damaged_files(tmp_path: Path, content: str, ending: str) -> None:
    path = tmp_path / f"a.{ending}"
    path.write_text(content)
    with pytest.raises(
        ValueError, match=f"table: .*a.{ending} is (damaged|not a table that manyheads wrote)"
    ):
        HeadTable.load(path)
    with pytest.raises(ValueError, match=r"ends in \.json, \.csv, \.parquet"):
        HeadTable.load(tmp_path / "a.txt")


def test_unknown_columns_are_listed(table: HeadTable) -> None:
    with pytest.raises(KeyError, match="no column 'colour'; there are site, layer"):
        table["colour"]


def test_labels_and_matrices_survive_a_file(tmp_path: Path) -> None:
    sums = {"entropy": torch.ones(3, HEADS)}
    words = {"roles": ["induction", "", "sink, previous"]}
    table = HeadTable(ROWS, torch.ones(HEADS), sums, "model", labels=words)
    assert table.columns[6:8] == ["roles", "tokens"]
    assert next(iter(table))["roles"] == "induction"
    for name in ("heads.json", "heads.csv"):
        table.save(tmp_path / name)
        assert HeadTable.load(tmp_path / name).labels == words
    pairs = torch.arange(HEADS**2, dtype=torch.float64).view(HEADS, HEADS)
    table.matrices["js"] = pairs
    table.save(tmp_path / "heads.json")
    assert torch.equal(HeadTable.load(tmp_path / "heads.json").matrices["js"], pairs)
    with pytest.raises(ValueError, match=r"matrices can only be kept in \.json"):
        table.save(tmp_path / "heads.csv")
    with pytest.raises(ValueError, match="expected 3 words, got 2"):
        HeadTable(ROWS, torch.ones(HEADS), sums, labels={"roles": ["", ""]})
    with pytest.raises(ValueError, match=r"expected shape \(3, 3\)"):
        HeadTable(ROWS, torch.ones(HEADS), sums, matrices={"js": torch.ones(3, 2)})
