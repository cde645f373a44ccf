"""The parts of diversity, its summaries and pictures, and what it says to bad input."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import pytest
import torch
from tests.helpers import models
from torch import Tensor, nn

import manyheads as mh
from manyheads import cli
from manyheads.capture.call import Call
from manyheads.capture.site import Site
from manyheads.heads.diversity import diversity, layers, output_moments
from manyheads.heads.diversity.attention_distance import RowSums, attention_rows, jensen_shannon
from manyheads.heads.diversity.collect import seeing
from manyheads.heads.diversity.map_layout import islands, layout, stress
from manyheads.heads.diversity.output_moments import Moments, Outputs
from manyheads.heads.diversity.summary import effective_number, extreme
from manyheads.heads.diversity.weight_subspaces import angles, bases
from manyheads.heads.table import HeadTable
from manyheads.view.figures.diversity import draw_map, draw_matrices
from manyheads.view.terminal.diversity import diversity_text

BATCH, HEADS, KV_HEADS, QUERIES, KEYS, WIDTH = 3, 6, 2, 7, 11, 5


def masks() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    allowed = torch.rand(BATCH, HEADS, QUERIES, KEYS, generator=generator) < 0.6
    allowed[..., 0] = True
    added = torch.randn(BATCH, 1, QUERIES, KEYS, generator=generator, dtype=torch.float64)
    return {
        "none": mh.Mask(),
        "causal": mh.mask.causal(),
        "window": mh.mask.window(3) & mh.mask.causal(),
        "chunk": mh.mask.chunk(4),
        "padding": mh.mask.padding(torch.tensor([11, 5, 2])),
        "alibi": mh.mask.alibi(HEADS),
        "bool by head": mh.Mask() & allowed,
        "float": mh.Mask() & added & mh.mask.causal(),
    }


def call_with(mask: mh.Mask, scale: float | None = None) -> Call:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(BATCH, heads, length, WIDTH, generator=generator, dtype=torch.float64)
        for heads, length in ((HEADS, QUERIES), (KV_HEADS, KEYS), (KV_HEADS, KEYS))
    )
    site = Site("attn", layer=0, heads=HEADS, kv_heads=(0, 0, 0, 1, 1, 1))
    output = mh.attention(q, k, v, mask=mask, scale=scale, kernel="reference")
    return Call(site, q, k, v, output, mask, scale)


@pytest.mark.parametrize("name", masks())
@pytest.mark.parametrize("scale", [None, 0.3])
def test_rows_times_values_are_the_output(name: str, scale: float | None):
    """Chosen rows, in any order within a sequence, under every kind of mask."""
    call = call_with(masks()[name], scale)
    sequences, queries = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([6, 1, 3, 0, 5])
    rows = attention_rows(call, sequences, queries)
    assert rows.shape == (HEADS, 5, KEYS)
    value = call.value.repeat_interleave(HEADS // KV_HEADS, 1)
    for number, (n, i) in enumerate(zip(sequences, queries, strict=True)):
        given = rows[:, number].unsqueeze(1) @ value[n]
        torch.testing.assert_close(given[:, 0], call.output[n, :, i], atol=1e-10, rtol=0)


def test_keys_far_from_zero_cost_no_digits():
    call = call_with(mh.Mask())
    single = Call(
        call.site, call.query.float(), call.key.float() + 3000.0, call.value, call.output.float(), mh.Mask()
    )
    exact = Call(call.site, single.query.double(), single.key.double(), call.value, call.output, mh.Mask())
    places = torch.tensor([0, 2]), torch.tensor([3, 4])
    found, wanted = attention_rows(single, *places), attention_rows(exact, *places)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, atol=5e-6, rtol=0)


@pytest.mark.parametrize("name", masks())
def test_queries_that_see_nothing_are_known(name: str):
    mask = masks()[name]
    assert seeing(call_with(mask)).all()
    hidden = torch.ones(BATCH, 1, QUERIES, KEYS, dtype=torch.bool)
    hidden[1, :, 4] = False
    found = seeing(call_with(mask & hidden))
    assert not found[1, 4]
    assert found.sum() == BATCH * QUERIES - 1


def test_padded_queries_do_not_count():
    lengths = torch.tensor([7, 2, 5])
    torch.manual_seed(0)
    layer = mh.MultiHeadAttention(12, heads=3).double()
    x = torch.randn(3, 7, 12, dtype=torch.float64)
    masked = {"query": x, "mask": mh.mask.padding(lengths, queries=lengths)}
    measures = ["attention", "outputs"]
    together = diversity(layer, [masked], rows=100, measures=measures)
    apart = diversity(layer, [x[n : n + 1, :length] for n, length in enumerate(lengths)], measures=measures)
    assert together["tokens"].tolist() == [14.0] * 3
    for name, matrix in together.matrices.items():
        torch.testing.assert_close(matrix, apart.matrices[name], atol=1e-10, rtol=0, msg=name)


def test_rows_of_small_batches_weigh_less():
    """Two rows that stand for one query each, and one that stands for four."""
    sums, heads = RowSums(), torch.arange(2)
    rows = torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]]], dtype=torch.float64)
    sums.add(rows, heads, weight=1.0)
    sums.add(rows[:, :1], heads, weight=4.0)
    assert sums.mean("js")[0, 1].item() == pytest.approx(5 / 6)
    spread = (1 / 6) ** 2 + (5 / 6) ** 2 + 16 * (1 / 6) ** 2
    assert sums.error("js")[0, 1].item() == pytest.approx(math.sqrt(spread * 3 / 2) / 6)


def test_identical_rows_in_float32_are_near_zero():
    rows = torch.randn(1, 50, 301).softmax(-1).repeat(2, 1, 1)
    assert jensen_shannon(rows).sqrt().max() < 2e-3


def test_moments_do_not_depend_on_how_tokens_are_split():
    """Also far from zero, where sums of squares as they are would lose their digits in float32."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(211, 2, 5, generator=generator) + 300.0
    y = torch.randn(211, 3, 7, generator=generator) - 200.0 + x[:, :1, :1]
    whole, split = Moments(), Moments()
    whole.add([Outputs("x", x.double()), Outputs("y", y.double())])
    for start in range(0, 211, 31):
        split.add([Outputs("x", x[start : start + 31]), Outputs("y", y[start : start + 31])])
    for pair in (("x", "x"), ("x", "y")):
        most = 1e-5 * whole.dependence("x", "x").max().item()
        torch.testing.assert_close(split.dependence(*pair), whole.dependence(*pair), atol=most, rtol=0)
    torch.testing.assert_close(split.second("x", "y"), whole.second("x", "y"), atol=0, rtol=1e-5)
    assert whole.rank("x")[0] == split.rank("x")[0] == 10


def test_sites_that_met_only_at_times_are_not_compared():
    moments_of = Moments()
    x = torch.randn(5, 1, 3)
    moments_of.add([Outputs("a", x), Outputs("b", x)])
    assert moments_of.comparable("a", "b")
    moments_of.add([Outputs("a", x)])
    assert not moments_of.comparable("a", "b")


def test_too_wide_models_keep_what_is_within_layers(monkeypatch: pytest.MonkeyPatch):
    model, batch = models.bert().double(), models.tokens()
    measures = ["outputs", "contributions"]
    whole = diversity(model, [batch], measures=measures)
    monkeypatch.setattr(output_moments, "LARGEST", 10)
    with pytest.warns(UserWarning, match="within each layer"):
        found = diversity(model, [batch], measures=measures)
    inside = torch.block_diag(torch.ones(3, 3), torch.ones(3, 3)).bool()
    for name, matrix in found.matrices.items():
        assert matrix[~inside].isnan().all()
        torch.testing.assert_close(matrix[inside], whole.matrices[name][inside])


def test_subspaces_of_different_spaces_have_no_angle():
    degrees, orthogonal = angles(bases([torch.randn(2, 7), torch.randn(2, 5), torch.randn(3, 7)]))
    assert degrees[0, 1].isnan()
    assert orthogonal[1, 2].isnan()
    assert 0 < degrees[0, 2] < 90


def test_layout_finds_groups_and_keeps_islands_apart():
    generator = torch.Generator().manual_seed(0)
    points = torch.cat(
        [torch.randn(7, 2, generator=generator), torch.randn(5, 2, generator=generator) + 30.0]
    )
    distance = torch.cdist(points, points).double()
    alone = torch.full((13, 13), math.nan, dtype=torch.float64)
    alone[:12, :12] = distance
    alone[12, 12] = 0.0
    found = layout(alone)
    assert found.cluster.tolist() == [0] * 7 + [1] * 5 + [2]
    assert found.twin[12] == -1
    near = distance.clone().fill_diagonal_(math.inf)
    assert torch.equal(found.twin[:12], near.argmin(1))
    assert stress(distance, found.position[:12]) < 1e-3  # points of a plane fit into one
    assert [heads.tolist() for heads in islands(alone)] == [list(range(12)), [12]]
    assert found.silhouette[:12].min() > 0.8


def test_one_head_has_no_twin():
    table = diversity(mh.MultiHeadAttention(6, heads=1), [torch.randn(2, 5, 6)])
    assert table["twin"] == [""]
    assert table["twin_distance"].isnan().all()
    assert layers(table)[0].distinct_attention == pytest.approx(1.0)
    assert math.isnan(layers(table)[0].spread["js"])


def test_effective_number_of_heads():
    """Groups of copies count as one each, weighed by their sizes."""
    two_groups = torch.block_diag(torch.ones(3, 3), torch.ones(3, 3)).double()
    assert effective_number(two_groups) == pytest.approx(2.0)
    unequal = torch.block_diag(torch.ones(1, 1), torch.ones(3, 3)).double()
    assert effective_number(unequal) == pytest.approx(math.exp(0.25 * math.log(4) + 0.75 * math.log(4 / 3)))
    dead = torch.full((3, 3), math.nan, dtype=torch.float64)
    dead[:2, :2] = torch.eye(2)
    assert effective_number(dead) == pytest.approx(2.0)  # a head without outputs is left out


def test_a_head_that_says_nothing_is_unknown_not_alike():
    model = models.bert(num_hidden_layers=1)
    with torch.no_grad():
        value = model.encoder.layer[0].attention.self.value
        value.weight[5:10] = 0.0
        value.bias[5:10] = 0.0
    table = diversity(model, [models.tokens()])
    assert table.matrices["cka"][1].isnan().all()
    assert table.matrices["contribution_cosine"][1].isnan().all()
    assert table.matrices["cka"][0, 2].isfinite()
    assert "cka" in diversity_text(table).lower()


class Bare(nn.Module):
    """Attention without any weights."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(2, (3, -1)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)


def test_heads_without_weights_have_no_angles():
    table = diversity(Bare(), [torch.randn(2, 7, 15)])
    assert table.matrices["query_angle"].isnan().all()
    assert table.matrices["contribution_cosine"].isnan().all()
    assert table.matrices["js"].isfinite().all()
    assert "Layer by layer" in diversity_text(table)


def test_tables_come_back_from_files(tmp_path: Any):
    table = diversity(models.llama(), [models.tokens()])
    table.save(tmp_path / "heads.json")
    again = HeadTable.load(tmp_path / "heads.json")
    assert again["twin"] == table["twin"]
    for name, matrix in table.matrices.items():
        torch.testing.assert_close(again.matrices[name], matrix, equal_nan=True)
    assert extreme(again, "js", 3, largest=False) == extreme(table, "js", 3, largest=False)


class Quantised(nn.Module):
    """Runs, but gives no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mh.MultiHeadAttention(6, heads=2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.inner(x)


def test_a_model_without_gradients_is_measured_without_them():
    with pytest.warns(UserWarning, match="the model's output has no gradient.*gradients are left out"):
        table = diversity(Quantised(), [torch.randn(2, 5, 6)] * 2, measures=["attention", "gradients"])
    assert "gradient_cosine" not in table.matrices
    assert "js" in table.matrices


def test_bad_input_is_told_in_a_sentence():
    model, x = mh.MultiHeadAttention(6, heads=2), torch.randn(2, 5, 6)
    with pytest.raises(ValueError, match="batches: expected at least one, got none"):
        diversity(model, [])
    with pytest.raises(ValueError, match=r"measures: expected some of attention, outputs, .* got 'colour'"):
        diversity(model, [x], measures=["colour"])
    with pytest.raises(ValueError, match=r"measures: .* got none"):
        diversity(model, [x], measures=[])
    with pytest.raises(TypeError, match=r"measures: expected several, as in \['attention'\]"):
        diversity(model, [x], measures="attention")
    with pytest.raises(ValueError, match="rows: expected at least 2"):
        diversity(model, [x], rows=1)
    with pytest.raises(TypeError, match=r"rows: expected a whole number, got 2\.5"):
        diversity(model, [x], rows=2.5)
    with pytest.raises(ValueError, match="model: no attention was seen"):
        diversity(nn.Linear(6, 5), [x])
    with pytest.raises(ValueError, match=r"batches: the model failed on one of input 0 \(2, 5, 4\)"):
        diversity(model, [torch.randn(2, 5, 4)])
    with pytest.raises(ValueError, match=r"loss: expected a floating tensor .* got float"):
        diversity(model, [x], loss=lambda output, batch: 1.0)
    with pytest.raises(TypeError, match="model"):
        diversity("bert", [x])


def test_pictures_are_drawn(tmp_path: Any):
    ids = models.tokens()["input_ids"]
    table = diversity(models.t5(), [{"input_ids": ids, "decoder_input_ids": ids[:, :5]}])
    draw_map(table, tmp_path / "deep" / "map.png", "T5")
    draw_matrices(table, tmp_path / "matrices.png", "T5 with $ in its name")
    for name in ("deep/map.png", "matrices.png"):
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG"
    assert not list(tmp_path.glob("**/*.part"))
    text = diversity_text(table, title="T5")
    for words in ("decoder.block.1.layer.1.EncDecAttention", "Most redundant", "(cross) together count as"):
        assert words in text


def test_the_command_tells_draws_and_writes(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    arguments = ["manyheads", "diversity", "--limit", "7", "--out", str(tmp_path / "found")]
    told = run(arguments, monkeypatch, capsys)
    for words in ("72 heads", "Pairs that cancel each other", "Groups of heads that look alike", "map.png"):
        assert words in told
    table = HeadTable.load(tmp_path / "found" / "diversity.json")
    assert len(table) == 72
    assert {file.name for file in (tmp_path / "found").iterdir()} == {
        "diversity.json", "diversity.txt", "map.png", "matrices.png",
    }  # fmt: skip
    machine = json.loads(run([*arguments, "--json", "--measures", "attention"], monkeypatch, capsys))
    assert len(machine["heads"]) == 72
    assert len(machine["layers"]) == 6
    assert machine["matrices"]["js"][0][0] == 0.0
    assert "cka" not in machine["matrices"]


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setenv("COLUMNS", "110")
    with pytest.raises(SystemExit) as done:
        cli.main()
    assert done.value.code == 0
    return capsys.readouterr().out


def test_the_command_names_a_mistake(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    arguments = ["manyheads", "diversity", "--limit", "2", "--measures", "js", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as done:
        cli.main()
    assert done.value.code == 2
    assert "measures: expected some of attention" in capsys.readouterr().err


def test_notes_are_printed():
    table = diversity(mh.MultiHeadAttention(6, heads=2), [torch.randn(2, 5, 6)], measures=["attention"])
    assert "Note: something was left out" in diversity_text(table, notes=["something was left out"])


def test_moments_about_different_starts_add_up():
    """Parts of the tokens, each relative to its first ones, against all tokens at once."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (2, 3), "b": (2, 3), "c": (5, 2)}
    values = {
        name: torch.randn(97, *shape, generator=generator, dtype=torch.float64) + 5 * number
        for number, (name, shape) in enumerate(shapes.items())
    }

    def moments(*parts):
        sums = Moments()
        for part in parts:
            sums.add([Outputs(name, x[part]) for name, x in values.items()])
        return sums

    parts = slice(0, 13), slice(13, 61), slice(61, 97)
    whole, merged = moments(*parts), moments(parts[2])
    merged.merge(moments(parts[1]))
    merged.merge(moments(parts[0]))
    for one, other in (("a", "a"), ("a", "b"), ("a", "c"), ("b", "c"), ("c", "c")):
        assert merged.comparable(one, other)
        for name in ("dependence", "second"):
            expected, merged_value = (getattr(sums, name)(one, other) for sums in (whole, merged))
            torch.testing.assert_close(merged_value, expected, rtol=1e-10, atol=1e-10 * 97 * 25)
    assert merged.rank("c") == whole.rank("c")
