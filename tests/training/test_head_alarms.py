"""The rules of the alarms, on looks that are written down by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyheads.heads.table import Row
from manyheads.training.head_alarms import LOOKS, Alarms, History, Look, trends

ROWS = [Row(f"h.{layer}", layer, head, head, head, "causal") for layer in range(2) for head in range(4)]
ORDINARY = {
    "entropy_normalised": 0.6, "largest_logit": 9.0, "redundancy": 0.4, "gradient_norm": 1.0, "dead": 0.0,
}  # fmt: skip


def look(step, loss=2.0, rows=ROWS, **changed):
    """One look, ordinary but for ``metric={row: value}`` or ``metric=value`` for all heads."""
    values = {name: torch.full((len(rows),), value) for name, value in ORDINARY.items()}
    for name, change in changed.items():
        for row, value in (
            change if isinstance(change, dict) else dict.fromkeys(range(len(rows)), change)
        ).items():
            values[name][row] = value
    return Look(step, rows, values, (loss, 0.01))


def judged(looks):
    """The alarms of each look in turn."""
    history, alarms = History(), Alarms()
    raised = []
    for each in looks:
        history.add(each)
        raised.append(alarms.judge(history))
    return raised


def flat(raised):
    return [alarm for alarms in raised for alarm in alarms]


def test_ordinary_looks_raise_nothing():
    assert not flat(judged([look(100 * n) for n in range(1, 20)]))


def test_a_logit_that_tends_to_the_extreme():
    raised = judged([look(100 * n, largest_logit={6: 5 * 2.0 ** (n / 1.2)}) for n in range(1, 6)])
    (alarm,) = flat(raised)
    assert (alarm.site, alarm.layer, alarm.head, alarm.metric) == ("h.1", 1, 2, "largest_logit")
    assert alarm.message == (
        "layer 1 head 2: largest logit 28 and doubling every 120 steps; expect divergence; try qk_norm or a "
        "lower rate"
    )
    assert str(alarm).startswith("step 300: layer 1")
    assert alarm.trend.doubling == pytest.approx(120, rel=1e-3)


def test_a_large_logit_that_stays_is_none_until_it_is_extreme():
    assert not flat(judged([look(n, largest_logit={1: 80.0}) for n in range(1, 9)]))
    (alarm,) = flat(judged([look(n, largest_logit={1: 120.0, 3: 110.0}) for n in range(1, 9)]))
    assert "largest logit 120 (and 1 more head of the layer)" in alarm.message


def test_an_alarm_comes_again_only_after_a_rest():
    bad, good = {"largest_logit": {1: 200.0}}, {}
    looks = [bad, bad, good, bad, *[good] * (LOOKS + 1), bad]
    raised = judged([look(n, **change) for n, change in enumerate(looks, 1)])
    assert [n for n, alarms in enumerate(raised, 1) if alarms] == [1, len(looks)]


def test_a_collapse_of_one_head_among_open_ones():
    (alarm,) = flat(judged([look(1), look(2, entropy_normalised={5: 0.01}, largest_logit={5: 30.0})]))
    assert (alarm.metric, alarm.layer, alarm.head) == ("entropy_normalised", 1, 1)
    assert "collapsed to single keys (entropy 1.0% of its largest)" in alarm.message
    settled = look(2, entropy_normalised={5: 0.01})  # it finds its key with small logits
    assert not flat(judged([look(1), settled]))


def test_twins_dead_heads_gradients_and_losses():
    alike = {0: 0.99, 1: 0.99, 2: 0.999, 3: 0.98}
    assert not flat(judged([look(1, redundancy=alike), look(2, redundancy=alike)]))  # they began so
    (alarm,) = flat(judged([look(1), look(2, redundancy=alike), look(3, redundancy=alike)]))
    assert (alarm.metric, alarm.layer, alarm.head) == ("redundancy", 0, -1)
    assert alarm.message.startswith("layer 0: 4 of 4 heads say the same as another")
    (alarm,) = flat(judged([look(1), look(2), look(3, dead={4: 1.0, 7: 1.0})]))
    assert (alarm.metric, alarm.value) == ("dead", 2.0)
    assert alarm.message.startswith("layer 1: 2 of 4 heads are dead, 0 were 2 looks ago")
    (alarm,) = flat(judged([*(look(n) for n in range(1, 5)), look(5, gradient_norm=30.0)]))
    assert (alarm.metric, alarm.site, alarm.layer) == ("gradient_norm", "", -1)
    assert "is 30 times its median before" in alarm.message
    (alarm,) = flat(judged([look(1, 2.0), look(2, 1.9), look(3, 1.94), look(4, 2.0)]))
    assert alarm.message.startswith("the loss is 2.000, up from 1.900")
    (alarm,) = flat(judged([look(1, 2.0), look(2, math.inf)]))
    assert "not a number any more" in alarm.message


def test_layers_of_the_same_number_are_told_apart_by_their_site():
    rows = [
        Row(site, 0, head, head, head, "self") for site in ("encoder.0", "decoder.0") for head in range(4)
    ]
    (alarm,) = flat(judged([look(1, rows=rows, largest_logit={5: 150.0})]))
    assert alarm.message.startswith("decoder.0 head 1: largest logit 150")


@given(
    st.floats(-0.02, 0.02), st.floats(0.1, 100), st.integers(3, 9), st.floats(0.0, 1000.0), st.integers(0, 8)
)
def test_a_trend_is_that_of_exponential_growth_whatever_one_look_says(rate, start, looks, odd, which):
    steps = [50 * n for n in range(looks)]
    values = [start * math.exp(rate * step) for step in steps]
    if looks > 4 and 0 < which < looks - 1:
        values[which] = odd + 1e-3  # one look that is off, and not the last
    row = ROWS[:1]
    history = History(
        [Look(s, row, {"largest_logit": torch.tensor([v])}) for s, v in zip(steps, values, strict=True)]
    )
    (trend,) = trends(history, "largest_logit")
    if looks <= 4:
        expected = math.log(2) / rate if rate > 1e-4 else None
        if expected is not None:
            assert trend.doubling == pytest.approx(expected, rel=1e-2)
        assert trend.ahead == pytest.approx(values[-1] ** 2 / values[0], rel=1e-2)
    assert trend.doubling > 0


def test_too_few_looks_have_no_trend():
    assert trends(History([look(1), look(2)]), "largest_logit") == [None] * 8
    with pytest.raises(KeyError, match="no metric 'entropi'; there are entropy_normalised"):
        History([look(1)])["entropi"]
