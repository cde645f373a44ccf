"""Attention modules drawn at random: watch, maps, silence and cut are right, named or refused on each.

`python -m bench.zoo --drawn 2000` draws many more.
"""

from __future__ import annotations

import warnings

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.zoo.drawn import draw
from tests.zoo.judge import judge

seeds = st.integers(0, 10**6)
# The same seeds in every run: a failure must not depend on luck. Nothing is timed.
drawing = settings(
    max_examples=40, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


@drawing
@given(seeds)
def test_truth_is_what_the_drawn_module_computes(seed: int) -> None:
    case = draw(seed)
    for inputs in (case.inputs, case.longer):
        if inputs is not None:
            got, want = case.run(case.model, inputs).double(), case.expected(inputs)[0]
            assert got.shape == want.shape, case.name
            assert (got - want).abs().max() < 5e-3, (
                case.name
            )  # scores moved by -7000 lose that much in float32


@drawing
@given(seeds)
@example(1883)  # a loop over the batch whose queries read more keys than there are queries
def test_nothing_is_silently_wrong_on_a_drawn_module(seed: int) -> None:
    case = draw(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verdict = judge(case)
    assert not verdict.wrong, f"{case.name}: {'; '.join(verdict.wrong)}"
