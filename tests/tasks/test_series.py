"""Series: windows and splits against counting by hand, what the model does not mind, and bad files."""

import pytest
import torch

from manyheads.data.readers.table import read_table
from manyheads.models.config import build
from manyheads.tasks.series import Forecaster, Series, tokens

SIZES = {"d_model": 12, "heads": 3, "layers": 1, "dropout": 0.0}
SHORT = {"context": 7, "horizon": 3, "patch": 4, "stride": 2}


def table(path, rows=40, header="date,a,b", start=0):
    lines = [f"2020-01-01 {n // 60:02}:{n % 60:02},{n},{100 - n * n}" for n in range(start, start + rows)]
    path.write_text("\n".join([header, *lines]) + "\n")
    return str(path)


def opened(tmp_path, **options):
    task = Series(**(SIZES | SHORT | options))
    return task, task.open(table(tmp_path / "t.csv"))


def test_the_model_does_not_mind_where_a_series_lies_and_how_large_it_is():
    torch.manual_seed(0)
    model = Forecaster({"a": [0, 1]}, 17, 5, patch=6, stride=3, d_model=12, heads=3, layers=2).double().eval()
    x = torch.randn(4, 17, dtype=torch.float64)
    assert torch.allclose(model(3 * x + 50), 3 * model(x) + 50, rtol=1e-4)
    assert torch.allclose(
        model(torch.full((1, 17), 7.0, dtype=torch.float64)), torch.tensor(7.0).double(), rtol=1e-3
    )


def test_the_last_patch_ends_with_the_present():
    seen = []
    model = Forecaster({"a": [0, 1]}, 10, 2, patch=4, stride=3, d_model=6, heads=2, layers=1).eval()
    model.enter.register_forward_hook(lambda module, given, made: seen.append(given[0]))
    x = torch.arange(10.0)[None]
    model(x)
    z = (x - x.mean()) / x.std(correction=0)
    assert seen[0].shape == (1, tokens(10, 4, 3), 4)
    assert torch.allclose(seen[0][0, -1], z[0, -4:], atol=1e-4)
    assert torch.allclose(seen[0][0, 0], z[0, :4], atol=1e-4)
    assert tokens(11, 4, 3) == 4


def test_windows_of_every_part_forecast_its_own_rows_only(tmp_path):
    task, data = opened(tmp_path, split="20,8,12", columns="a")
    (mean, spread) = task.scale["a"]
    assert (mean, spread) == (9.5, pytest.approx(5.766281, rel=1e-6))  # of rows 0 to 19
    path = str(tmp_path / "t.csv")
    for examples, first, last in ((data.train, 7, 19), (data.valid, 20, 27), (task.read(path), 28, 39)):
        rows = []
        for x, y in examples.take(range(len(examples))):
            whole = torch.cat([x, y]) * spread + mean
            assert torch.allclose(whole.diff(), torch.ones(9), atol=1e-4)
            rows += (y * spread + mean).round().tolist()
        assert (min(rows), max(rows)) == (first, last)
        assert len(examples) == last - first + 1 - 3 + 1


def test_shares_are_rows_and_columns_are_series_of_their_own(tmp_path):
    task, data = opened(tmp_path, split="0.5,0.25,0.25")
    assert len(data.train) == 2 * (20 - 7 - 3 + 1)
    assert len(data.valid) == 2 * (10 - 3 + 1)
    one, other = data.train.take([4, 5])
    assert not torch.equal(one[0], other[0])
    assert list(task.scale) == ["a", "b"]
    assert data.train.sizes[0] == 3 == tokens(7, 4, 2)


def test_the_split_of_the_literature_can_be_said(tmp_path):
    path = table(tmp_path / "t.csv", rows=30)
    task = Series(**SIZES, **SHORT, split="12,4,4")  # the last ten rows are nobody's
    data = task.open(path)
    assert len(data.valid) == 2 * 2
    assert len(task.read(path)) == 2 * 2


def test_another_file_is_read_as_a_whole(tmp_path):
    task, _ = opened(tmp_path)
    other = table(tmp_path / "other.csv", rows=15, header="date,b,a")
    examples = task.read(other)
    assert len(examples) == 2 * (15 - 7 - 3 + 1)
    x, _ = examples.take([0])[0]  # columns by their names, scaled as in training
    mean, spread = task.scale["a"]
    assert (x[0] * spread + mean).item() == pytest.approx(100.0)


def test_metrics_are_what_counting_gives(tmp_path):
    task, data = opened(tmp_path)
    model = build(task.describe()).eval()
    with torch.no_grad():
        parts = [task.measure(model, task.collate(data.valid.take(part))) for part in (range(3), range(3, 4))]
        batch = task.collate(data.valid.take(range(4)))
        off = model(batch["x"]) - batch["y"]
    found = task.metrics(parts)
    assert found["mse"] == pytest.approx(off.square().mean().item(), rel=1e-5)
    assert found["mae"] == pytest.approx(off.abs().mean().item(), rel=1e-5)
    summed, count = task.loss(model, batch)
    assert (summed / count).item() == pytest.approx(found["mse"], rel=1e-5)


def test_a_forecast_is_a_table_in_the_units_of_the_file(tmp_path):
    task, _ = opened(tmp_path)
    model = build(task.describe())
    (said,) = task.predict(model, [str(tmp_path / "t.csv")])
    lines = said.splitlines()
    assert lines[0] == "step,a,b"
    assert [line.split(",")[0] for line in lines[1:]] == ["1", "2", "3"]
    past = read_table(tmp_path / "t.csv").values[-7:]
    mean, spread = torch.tensor(list(task.scale.values()), dtype=torch.float64).T
    with torch.no_grad():
        wanted = model(((past - mean) / spread).float().T).T.double() * spread + mean
    found = torch.tensor([[float(cell) for cell in line.split(",")[1:]] for line in lines[1:]])
    assert torch.allclose(found.double(), wanted, rtol=1e-4)
    with pytest.raises(ValueError, match="5 rows are too few; expected 7"):
        task.predict(model, [table(tmp_path / "short.csv", rows=5)])


def changed(tmp_path, line, text, rows=12):
    path = tmp_path / "bad.csv"
    table(path, rows=rows)
    lines = path.read_text().splitlines()
    lines[line - 1] = text
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize(
    ("line", "text", "why"),
    [
        (5, "2020-01-01 00:03,x,1", r"line 5 of .*bad\.csv has 'x' in the column 'a'; expected a number"),
        (7, "2020-01-01 00:05,,1", r"line 7 of .*bad\.csv has nothing in the column 'a'"),
        (7, "2020-01-01 00:05,1,nan", r"line 7 of .*bad\.csv has 'nan' in the column 'b'"),
        (4, "2020-01-01 00:02,1", r"line 4 of .*bad\.csv has 2 columns; expected 3"),
        (6, "2019-01-01 00:04,1,2", r"line 6 of .*bad\.csv, 2019-01-01 00:04, is not later"),
        (1, "date,a,a", r"bad\.csv has two columns called 'a'"),
        (1, "p,a,b", None),
        (1, "0,a,b", None),
    ],
)
def test_bad_rows_are_told_with_file_line_and_column(tmp_path, line, text, why):
    path = changed(tmp_path, line, text)
    if why is None:  # the first column holds no numbers, so it says when, whatever it is called
        assert read_table(path).columns == ["a", "b"]
        return
    with pytest.raises(ValueError, match=why):
        read_table(path)


def test_which_column_says_when(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a;year;b\n1;2000;2\n3;2001;4\n5;2003;6\n")
    found = read_table(path)
    assert (found.columns, found.uneven) == (["a", "b"], 1)
    assert read_table(path, "none").columns == ["a", "year", "b"]
    assert read_table(path, "a", "b").values.tolist() == [[2.0], [4.0], [6.0]]
    path.write_text("a,b\n1,2\n3,4\n")
    with pytest.raises(ValueError, match=r"which column of .* has the times"):
        read_table(path)
    with pytest.raises(ValueError, match=r"time: .* has no column 'c'; it has a, b"):
        read_table(path, "c")
    with pytest.raises(ValueError, match=r"columns: .* has no column 'd'; it has a, b"):
        read_table(path, "a", "b, d")
    path.write_text("date,a\n")
    with pytest.raises(ValueError, match="has no row of numbers"):
        read_table(path)
    with pytest.raises(ValueError, match="there is no file"):
        read_table(tmp_path / "nothing.csv")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"split": "0.5,0.5"}, "split: expected three shares"),
        ({"split": "0.9,0.2,0.2"}, "split: expected three shares"),
        ({"split": "8,8,80"}, "asks for more rows than the 40 there are"),
        ({"split": "20,2,12"}, "2 rows to validate on are too few; expected 3 or more"),
        ({"split": "9,8,8"}, "9 rows to train on are too few; expected 10 or more"),
        ({"patch": 8}, "patch: expected at most the context, 7, got 8"),
        ({"horizon": 0}, "horizon: expected 1 or more"),
    ],
)
def test_options_that_do_not_fit(tmp_path, options, why):
    with pytest.raises(ValueError, match=why):
        opened(tmp_path, **options)
