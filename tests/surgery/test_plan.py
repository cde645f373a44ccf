"""Plans: what they remove, what they keep equal, what they refuse."""

import json

import pytest
import torch

import manyheads as mh
from manyheads.heads.fingerprint import fingerprint
from manyheads.heads.table import HeadTable, Row
from manyheads.surgery.plan import check_plan


def table(*sites, kv=None, model="here"):
    """A table with these importances, one list for each site."""
    rows, values = [], []
    for layer, found in enumerate(sites):
        name = found[0] if isinstance(found[0], str) else f"h.{layer}.attn"
        found = [value for value in found if not isinstance(value, str)]
        for head, value in enumerate(found):
            kv_head = head if kv is None else head * kv // len(found)
            rows.append(Row(name, layer, head, head, kv_head, "causal"))
            values.append(float(value))
    each = torch.tensor(values, dtype=torch.float64)
    sums = torch.stack([torch.full_like(each, 2.0), 2 * each, 2 * each**2])
    return HeadTable(rows, torch.ones(len(rows)), {"importance": sums}, model)


def test_the_least_important_heads_of_the_whole_model_go_first():
    made = mh.plan(table([5, 1, 4, 9, 2], [3, 8, 7, 6, 0]), keep=0.6)
    assert dict(made) == {"h.0.attn": [1, 4], "h.1.attn": [0, 4]}
    assert made.removed == 4
    assert made.keep == pytest.approx(0.6)


def test_by_layer_each_site_loses_the_same_share():
    made = mh.plan(table([5, 1, 4, 9, 2], [30, 80, 70, 60, 10]), keep=0.6, scope="layer")
    assert dict(made) == {"h.0.attn": [1, 4], "h.1.attn": [0, 4]}


def test_never_fewer_than_asked_for_are_kept():
    for keep in (0.05, 0.31, 0.5, 0.77, 0.92):
        made = mh.plan(table(list(range(7)), list(range(20, 27))), keep, floor=0)
        assert made.keep >= keep
        assert made.removed == int((1 - keep) * 14 + 1e-9)


def test_a_floor_holds_in_every_site():
    unimportant = table([1, 2, 3, 4, 5], [10, 20, 30, 40, 50])
    assert mh.plan(unimportant, 0.5, floor=0)["h.0.attn"] == [0, 1, 2, 3, 4]
    assert dict(mh.plan(unimportant, 0.5, floor=2)) == {"h.0.attn": [0, 1, 2], "h.1.attn": [0, 1]}


def test_protected_heads_stay():
    made = mh.plan(table([1, 2, 3], [4, 5, 6]), keep=0.5, protect={0: [0], "h.1.attn": [1]})
    assert dict(made) == {"h.0.attn": [1, 2], "h.1.attn": [0]}


@pytest.mark.parametrize(
    ("values", "removed"),
    [
        ([1, 1, 9, 9, 9, 9], [0, 1]),  # a whole group is cheapest
        ([1, 9, 1, 9, 1, 9], [0, 2, 4]),  # one head of each is
    ],
)
def test_grouped_heads_leave_so_that_groups_stay_equal(values, removed):
    assert mh.plan(table(values, [50] * 6, kv=3), keep=0.7)["h.0.attn"] == removed


def test_any_plan_for_grouped_heads_can_be_cut():
    torch.manual_seed(0)
    model = mh.Decoder(12, heads=6, layers=3, vocabulary=11, kv_heads=3).eval()
    for seed in range(3):
        values = torch.rand(3, 6, generator=torch.Generator().manual_seed(seed)).tolist()
        rows = table(
            *([f"blocks.{i}.attention", *v] for i, v in enumerate(values)), kv=3, model=fingerprint(model)
        )
        small = mh.cut(model, mh.plan(rows, 0.45), torch.randint(11, (2, 5)))
        assert small.original_heads


def test_calls_of_one_shared_module_lose_the_same_heads():
    shared = table(["mixer", 1, 5, 3], ["mixer#2", 9, 2, 3])
    assert dict(mh.plan(shared, keep=0.5)) == {"mixer": [2], "mixer#2": [2]}


@pytest.mark.parametrize("keep", [0, 1, -0.5, 1.5, True, "0.5"])
def test_a_share_outside_0_and_1_is_refused(keep):
    with pytest.raises(ValueError, match="keep: got"):
        mh.plan(table([1, 2]), keep)


def test_what_cannot_be_planned_is_said():
    with pytest.raises(ValueError, match="removes no head"):
        mh.plan(table([1, 2, 3]), keep=0.9)
    with pytest.raises(ValueError, match="a whole group at a time"):
        mh.plan(table([1, 2, 3, 4, 5, 6], kv=2), keep=0.8)
    with pytest.raises(ValueError, match="leaves no head at all"):
        mh.plan(table(list(range(7))), keep=1e-12, floor=0)
    with pytest.raises(ValueError, match=r"there is no head 7"):
        mh.plan(table([1, 2, 3]), protect={0: [7]})
    with pytest.raises(ValueError, match="never called"):
        mh.plan(table([1, 2, 3]), protect={5: [0]})
    with pytest.raises(ValueError, match="floor"):
        mh.plan(table([1, 2, 3]), floor=-1)
    with pytest.raises(ValueError, match="scope"):
        mh.plan(table([1, 2, 3]), scope="everywhere")
    with pytest.raises(ValueError, match="no finite importance"):
        mh.plan(table([1, float("nan"), 3]))
    broken = table([1, 2, 3])
    broken.sums = {"entropy": broken.sums["importance"]}
    with pytest.raises(ValueError, match=r"column importance.*mh\.importance"):
        mh.plan(broken)


def test_a_plan_comes_back_from_its_file(tmp_path):
    made = mh.plan(table([5, 1, 4], [3, 8, 7]), keep=0.5)
    made.save(tmp_path / "plan.json")
    again = mh.Plan.load(tmp_path / "plan.json")
    assert (again.heads, again.sizes, again.model) == (made.heads, made.sizes, made.model)


def test_a_plan_of_another_model_is_refused():
    torch.manual_seed(0)
    one, other = (mh.Encoder(8, heads=2, layers=2, vocabulary=11).eval() for _ in range(2))
    ids = torch.randint(11, (3, 5))
    made = mh.plan(mh.importance(one, [ids], "elimination"), keep=0.75)
    made.check(one)
    with pytest.raises(ValueError, match="plan: it was made for the model"):
        mh.prune(other, [ids], using=made)
    with pytest.raises(ValueError, match="plan: it was made for the model"):
        mh.cut(other, made, ids)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.pop("remove"), "damaged"),
        (lambda d: d.update(format="head table"), "its format is .head table.; expected .manyheads plan."),
        (lambda d: d.update(version=2), "newer manyheads"),
        (lambda d: d["remove"].update({"h.0.attn": [3]}), "no such heads"),
    ],
)
def test_files_that_are_no_plan_are_refused(change, said, tmp_path):
    path = tmp_path / "plan.json"
    mh.plan(table([5, 1, 4]), keep=0.5).save(path)
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=said):
        mh.Plan.load(path)
    with pytest.raises(ValueError, match="there is no file"):
        mh.Plan.load(tmp_path / "nothing.json")


def test_whole_groups_leave_to_the_nearest_share():
    torch.manual_seed(0)
    model = mh.Decoder(d_model=24, heads=6, kv_heads=3, layers=2, vocabulary=17).eval()
    table = mh.importance(model, [torch.randint(17, (2, 9))], "random")
    for keep, left in ((0.7, 4), (0.5, 4), (0.4, 2), (0.3, 2)):
        chosen = mh.plan(table, keep, scope="layer", groups=True)
        for heads in chosen.values():
            stay = sorted(set(range(6)) - set(heads))
            assert len(stay) == left
            assert all({2 * (h // 2), 2 * (h // 2) + 1} <= set(stay) for h in stay)
    with pytest.raises(
        ValueError, match=r"keep: 0\.9 removes no head \(heads that share keys leave a whole group"
    ):
        mh.plan(table, 0.9, scope="layer", groups=True)


def test_what_cannot_be_kept_is_said_before_ranking(tmp_path):
    model = mh.Decoder(d_model=24, heads=6, kv_heads=3, layers=2, vocabulary=17)
    ids = torch.randint(17, (1, 5))
    check_plan(model, ids, 0.5, groups=True)
    with pytest.raises(ValueError, match=r"keep: 0\.99 removes no head"):
        check_plan(model, ids, 0.99, groups=True)
