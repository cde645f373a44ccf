"""compare: heads are matched by what they do, changes come with errors, nothing is found where nothing is."""

import copy
import math

import pytest
import torch
from scipy import stats

import manyheads as mh
from manyheads.heads.comparison.matching import matched_heads

HEADS, LAYERS, WIDTH, VOCABULARY = 5, 3, 25, 31


def model_of(seed=0):
    torch.manual_seed(seed)
    model = mh.Encoder(d_model=WIDTH, heads=HEADS, layers=LAYERS, vocabulary=VOCABULARY).eval()
    with torch.no_grad():  # attention that differs between heads
        for block in model.blocks:
            block.attention.query.weight.mul_(3)
            block.attention.key.weight.mul_(3)
    return model


def texts(count=13, seed=1, low=0, high=VOCABULARY):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(low, high, (1, 11), generator=draw) for _ in range(count)]


def permuted(model, seed):
    """The same function with the heads of each layer in another order; the order of each."""
    model, draw = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    width, orders = WIDTH // HEADS, []
    for block in model.blocks:
        order = torch.randperm(HEADS, generator=draw)
        rows = (order[:, None] * width + torch.arange(width)).flatten()
        attention = block.attention
        with torch.no_grad():
            for linear in (attention.query, attention.key, attention.value):
                linear.weight.copy_(linear.weight[rows])
                if linear.bias is not None:
                    linear.bias.copy_(linear.bias[rows])
            attention.output.weight.copy_(attention.output.weight[:, rows])
        orders.append(order.tolist())
    return model, orders


@pytest.mark.parametrize("seed", [2, 3, 5])
def test_a_permuted_copy_is_matched_completely(seed):
    model, (other, orders) = model_of(), permuted(model_of(), seed)
    batches = texts()
    torch.testing.assert_close(model(batches[0]), other(batches[0]))
    compared = mh.compare(model, other, batches)
    assert len(compared.pairs) == HEADS * LAYERS
    for i, j in compared.pairs:
        one, two = compared.before.rows[i], compared.after.rows[j]
        assert (one.layer, one.head) == (two.layer, orders[two.layer][two.head])
    assert compared.moved() == []
    assert compared.changes["attention"].max() < 1e-3


def test_profiles_alone_match_a_permuted_copy():
    model, (other, orders) = model_of(), permuted(model_of(), 7)
    compared = mh.compare(model, other, texts())
    pairs = matched_heads(compared.before, compared.after, None, "function")
    for i, j in pairs:
        one, two = compared.before.rows[i], compared.after.rows[j]
        assert (one.layer, one.head) == (two.layer, orders[two.layer][two.head])


def test_by_number_a_permuted_copy_has_moved():
    model, (other, orders) = model_of(), permuted(model_of(), 2)
    compared = mh.compare(model, other, texts(), match="number")
    stayed = [order[head] == head for order in orders for head in range(HEADS)]
    far = compared.changes["attention"] > 1e-3
    assert far.tolist() == [not stays for stays in stayed]
    assert 0 < len(compared.moved()) <= sum(not stays for stays in stayed)


def test_original_heads_of_a_cut_model_are_recovered():
    model = model_of()
    small = mh.cut(model, {0: [1], 1: [0, 3], 2: [4]}, texts()[0])
    compared = mh.compare(model, small, texts())
    assert len(compared.pairs) == len(compared.after) == HEADS * LAYERS - 4
    for i, j in compared.pairs:
        one, two = compared.before.rows[i], compared.after.rows[j]
        assert (one.site, one.head) == (two.site, two.original_head)
    first = [row for row, head in enumerate(compared.changes.rows) if head.layer == 0]
    assert not set(first) & set(compared.moved())  # nothing before them was cut


def test_the_head_that_was_changed_has_moved():
    model, other = model_of(), model_of()
    width = WIDTH // HEADS
    with torch.no_grad():
        other.blocks[LAYERS - 1].attention.query.weight[2 * width : 3 * width] *= -1
    compared = mh.compare(model, other, texts(29), match="number")
    moved = [(compared.changes.rows[row].layer, compared.changes.rows[row].head) for row in compared.moved()]
    assert moved == [(LAYERS - 1, 2)]
    assert compared.changes["attention"].argmax() == (LAYERS - 1) * HEADS + 2


def test_changes_and_errors_are_those_of_the_formula():
    model, other, batches = model_of(), model_of(3), texts(7)
    compared = mh.compare(model, other, batches, match="number")
    differences = []
    for batch in batches:
        both = []
        for each in (model, other):
            with mh.watch(each, "full") as seen:
                each(batch)
            both.append(seen.table["entropy"])
        differences.append(both[1] - both[0])
    values = torch.stack(differences)
    torch.testing.assert_close(compared.changes["entropy_change"], values.mean(0))
    torch.testing.assert_close(compared.changes["entropy_change_se"], values.std(0) / math.sqrt(7))


def test_two_texts_are_tested_by_welch():
    model = model_of()
    first, second = texts(11, seed=1, high=7), texts(13, seed=2, low=19)
    compared = mh.compare(model, model, first, second, match="number")
    assert not compared.paired
    assert "attention" not in compared.changes.sums
    entropies = []
    for batches in (first, second):
        rows = []
        for batch in batches:
            with mh.watch(model, "full") as seen:
                model(batch)
            rows.append(seen.table["entropy"])
        entropies.append(torch.stack(rows))
    expected = stats.ttest_ind(entropies[1].numpy(), entropies[0].numpy(), equal_var=False)
    change, error = compared.changes["entropy_change"], compared.changes["entropy_change_se"]
    torch.testing.assert_close(change / error, torch.as_tensor(expected.statistic))


def test_the_same_texts_twice_and_halves_of_one_show_nothing():
    model, batches = model_of(), texts(40)
    assert mh.compare(model, model, batches).moved() == []
    assert mh.compare(model, model, batches[::2], batches[1::2]).moved() == []


def test_one_batch_has_no_error_and_is_not_tested():
    model, other = model_of(), model_of(3)
    compared = mh.compare(model, other, texts(1))
    assert set(compared.changes["moved"]) == {""}
    assert compared.moved() == []
    assert compared.changes["entropy_change_se"].isnan().all()


@pytest.mark.parametrize("counts", [(1, 1), (7, 1)])
def test_one_batch_of_another_text_has_no_error(counts):
    compared = mh.compare(model_of(), model_of(3), texts(counts[0]), texts(counts[1], seed=2))
    assert compared.changes["entropy_change_se"].isnan().all()
    assert compared.changes["entropy_change"].isfinite().all()
    assert math.isnan(compared.of(0)[0].se)
    assert compared.moved() == []


class Sometimes(torch.nn.Module):
    """A layer, and another before it that reads long texts only."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = torch.nn.Embedding(VOCABULARY, 12)
        self.late = mh.MultiHeadAttention(12, heads=3)
        self.early = mh.MultiHeadAttention(12, heads=2)

    def forward(self, ids):
        x = self.embedding(ids)
        x = x + self.early(x) if ids.shape[1] > 7 else x
        return x + self.late(x)


def test_sites_that_some_batches_do_not_reach_count_on_the_others():
    model, other = Sometimes(0).eval(), Sometimes(1).eval()
    batches = [ids[:, :5] if n % 3 else ids for n, ids in enumerate(texts(8), 1)]  # short ones come first
    compared = mh.compare(model, other, batches)
    apart = mh.compare(model, other, [ids for ids in batches if ids.shape[1] > 7])
    for one, row in enumerate(compared.changes.rows):
        twin = next(i for i, each in enumerate(apart.changes.rows) if each[:3] == row[:3])
        if row.site == "early":
            for column in ("entropy_change", "entropy_change_se", "attention"):
                assert compared.changes[column][one] == pytest.approx(float(apart.changes[column][twin]))
    assert {row.site for row in compared.changes.rows} == {"early", "late"}


def test_models_of_other_shapes_are_matched_across_layers():
    torch.manual_seed(0)
    wide = mh.Encoder(d_model=14, heads=7, layers=1, vocabulary=VOCABULARY).eval()
    compared = mh.compare(model_of(), wide, texts(5))
    assert len(compared.pairs) == 7
    assert len({j for _, j in compared.pairs}) == 7


def test_the_models_are_left_as_they_were():
    model, other = model_of().train(), model_of(3)
    before = [p.clone() for p in model.parameters()]
    mh.compare(model, other, texts(2))
    assert model.training
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"rate": 0}, "rate: got 0; expected a share"),
        ({"rows": 0}, "rows: got 0; expected a number of queries"),
        ({"match": "name"}, "match: got 'name'"),
        ({"other_batches": []}, "batches: expected at least one on each side"),
        ({"other_batches": texts(3), "paired": True}, "paired: got 2 batches and 3"),
    ],
)
def test_mistakes(options, error):
    with pytest.raises(ValueError, match=error):
        mh.compare(model_of(), model_of(3), texts(2), **options)
