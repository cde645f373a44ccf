"""Every model of the zoo is right, named or refused; and the zoo itself is right."""

from __future__ import annotations

import warnings

import pytest
from tests.zoo.handwritten import CASES
from tests.zoo.judge import judge


@pytest.mark.parametrize("name", CASES)
def test_truth_is_what_the_module_computes(name: str) -> None:
    case = CASES[name]()
    for inputs in (case.inputs, case.longer):
        if inputs is None or case.mixer is not None:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of models that use what torch deprecates
            got, want = case.run(case.model, inputs).double(), case.expected(inputs)[0]
        assert got.shape == want.shape
        assert (got - want).abs().max() < 5e-4 * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_silently_wrong(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verdict = judge(CASES[name]())
    assert not verdict.wrong, f"{name}: {'; '.join(verdict.wrong)}"
