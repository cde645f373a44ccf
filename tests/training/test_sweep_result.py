"""Which settings of a sweep can be told apart, and the words for it."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tests.helpers.sweeps import sweep_result

from manyheads.training.sweep_result import compare


def by_hand(values, higher):
    """Tukey's test in a complete block design, by its textbook sums."""
    y = np.array([list(seeds.values()) for seeds in values.values()], dtype=np.float64)  # (settings, seeds)
    k, n = y.shape
    residual = y - y.mean(1, keepdims=True) - y.mean(0, keepdims=True) + y.mean()
    error = (residual**2).sum() / ((k - 1) * (n - 1))
    margin = stats.studentized_range.ppf(0.95, k, (k - 1) * (n - 1)) * math.sqrt(error / n)
    means = y.mean(1) if higher else -y.mean(1)
    return means.max() - means, margin


@pytest.mark.parametrize("higher", [True, False])
@pytest.mark.parametrize(("k", "n"), [(2, 3), (5, 3), (7, 2)])
def test_complete_sweeps_are_compared_as_blocks(k, n, higher):
    random = np.random.default_rng(k * n)
    drawn = random.normal(size=(k, n)) + 5 * random.normal(size=n) + np.arange(k)[:, None]
    values = {f"heads={h}": dict(enumerate(row)) for h, row in enumerate(drawn.tolist(), 1)}
    result = compare(values, higher)
    differences, margin = by_hand(values, higher)
    assert result.paired
    assert result.freedom == (k - 1) * (n - 1)
    for (name, (by, its_margin)), expected in zip(result.worse_by.items(), differences, strict=True):
        assert by == pytest.approx(expected, abs=1e-9)
        assert its_margin == pytest.approx(margin if name != result.best else 0.0, abs=1e-9)
        assert (name in result.apart) == (expected > margin)


def test_without_common_seeds_it_is_tukeys_test_of_scipy():
    groups = [[3.1, 2.7, 3.6], [5.2, 5.9], [4.4, 4.1, 4.9, 4.0]]
    starts = (0, 100, 200)
    values = {
        name: {start + number: value for number, value in enumerate(group)}
        for name, start, group in zip("abc", starts, groups, strict=True)
    }
    result = compare(values, higher_is_better=True)
    theirs = stats.tukey_hsd(*groups).confidence_interval(0.95)
    assert (result.best, result.paired, result.freedom) == ("b", False, 6)
    for number, name in enumerate("abc"):
        if name != "b":
            by, margin = result.worse_by[name]
            assert by - margin == pytest.approx(theirs.low[1, number])
            assert by + margin == pytest.approx(theirs.high[1, number])


def test_a_run_that_is_missing_leaves_the_others_paired():
    values = {"a": {0: 1.0, 1: 3.0, 2: 5.0}, "b": {0: 2.0, 1: 4.1}, "c": {0: 0.9, 1: 3.0, 2: 5.2}}
    result = compare(values, higher_is_better=True)
    assert result.paired
    assert result.freedom == 8 - 5
    # the mean of b is below those of a and c, which have the seed that is good for all
    assert result.best == "b"
    assert result.worse_by["a"][0] == pytest.approx(1.05, abs=0.1)


def test_false_claims_are_as_rare_as_promised():
    """Settings that are all the same: a difference is claimed in at most about 5% of sweeps."""
    random = np.random.default_rng(0)
    claims = 0
    for _ in range(400):
        drawn = random.normal(size=(5, 3)) + 3 * random.normal(size=3)
        values = {str(h): dict(enumerate(row)) for h, row in enumerate(drawn.tolist())}
        claims += bool(compare(values, True).apart)
    assert claims <= 30  # 20 are expected, and 30 or more have a probability of 2% for 5%


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=6), st.integers(2, 4))
@settings(max_examples=40, deadline=None)
def test_equal_numbers_are_never_apart(offsets, seeds):
    values = {"a": {s: offsets[s % len(offsets)] for s in range(seeds)}}
    values["b"] = dict(values["a"])
    result = compare(values, higher_is_better=False)
    assert not result.apart
    assert result.worse_by["a"][0] == pytest.approx(0.0, abs=1e-6)


def test_the_answer_names_the_best_and_what_cannot_be_told_apart():
    result = sweep_result({1: [23.9, 24.2, 24.0], 8: [25.8, 26.0, 25.9], 16: [25.9, 25.9, 26.0]})
    assert result.answer.startswith(
        "8 and 16 heads are the best and not distinguishable; 1 head is worse by 1.9"
    )
    assert "bleu, higher is better" in result.answer
    assert "paired by seed" in result.answer
    assert result.best == {"heads": 16}
    by, margin = result.comparison.worse_by["heads=1"]
    assert f"{by:.2f} ± {margin:.2f}" in result.answer


def test_for_a_loss_lower_is_better():
    result = sweep_result({1: [3.1, 3.2, 3.15], 2: [2.0, 2.1, 2.05]}, higher=False)
    assert result.answer.startswith("2 heads are the best; 1 head is worse by 1.1")
    assert "loss, lower is better" in result.answer
    assert result.best == {"heads": 2}
    assert [row["worse_by"] for row in result.table] == [pytest.approx(1.1), 0.0]


def test_one_head_can_be_the_best():
    assert sweep_result({1: [9.0, 9.1, 9.0], 2: [1.0, 1.1, 1.0]}).answer.startswith(
        "1 head is the best; 2 heads are"
    )


def test_ties_and_noise_are_said():
    same = sweep_result({2: [1.0, 1.0, 1.0], 4: [1.0, 1.0, 1.0]}).answer
    assert same.startswith("2 and 4 heads cannot be told apart")
    noise = sweep_result({2: [1.0, 3.0, 2.0], 4: [3.0, 1.0, 2.5], 8: [2.0, 2.5, 1.0]}).answer
    assert noise.startswith("2, 4 and 8 heads cannot be told apart: the largest difference, between ")


def test_one_seed_tells_nothing_apart():
    result = sweep_result({2: [1.0], 4: [900.0]})
    assert result.answer.startswith("One seed cannot tell settings apart: run at least 3.")
    assert not any(row["apart"] for row in result.table)
    assert math.isnan(result.table[0]["low"])


def test_other_options_are_named():
    result = sweep_result({1: [1.0, 1.1, 1.0], 2: [5.0, 5.1, 5.0]}, d_keys=[8])
    assert result.answer.startswith("heads=2-d_key=8 is the best; heads=1-d_key=8 is worse by 4.0 ± 0.0")


def test_failures_and_what_is_left_are_named():
    result = sweep_result({2: [1.0, 1.2, 1.1], 4: [1.0, None, 1.1]}, left=1)
    assert "1 run failed: heads=4-seed=1 (the loss became nan)." in result.answer
    assert result.answer.endswith("1 run is not done yet.")
    assert [row["failed"] for row in result.table] == [0, 1]
    nothing = sweep_result({2: [None], 4: []})
    assert nothing.answer.startswith("No run has finished")
    with pytest.raises(ValueError, match=r"best: no run in out has finished; No run"):
        _ = nothing.best


@pytest.mark.parametrize("values", [{1: [1.0, 2.0], 2: [2.0, 2.5], 4: [None]}, {3: [2.0]}, {2: [None]}])
def test_files_hold_it(tmp_path, values):
    result = sweep_result(values, out=tmp_path)
    result.save()
    document = json.loads((tmp_path / "table.json").read_text())
    assert document["answer"] == result.answer
    assert [row["heads"] for row in document["settings"]] == list(values)
    assert len((tmp_path / "table.csv").read_text().splitlines()) == 1 + len(values)
    drawn = any(value is not None for seeds in values.values() for value in seeds)
    assert (tmp_path / "curve.png").exists() == drawn
    with pytest.raises(ValueError, match=r"path: got .*curve.gif; expected a name that ends in .png or .svg"):
        result.plot(tmp_path / "curve.gif")
