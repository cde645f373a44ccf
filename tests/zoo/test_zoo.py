"""Every model of the zoo is right, named or refused; and the zoo itself is right.

Models of libraries that are not installed are skipped; `python -m bench.zoo` judges them all.
"""

from __future__ import annotations

import warnings

import pytest
from tests.zoo.case import Case
from tests.zoo.catalogue import HANDWRITTEN, LIBRARY
from tests.zoo.judge import judge

ALL = HANDWRITTEN | LIBRARY


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Case:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of models that use what torch deprecates
        try:
            return ALL[request.param]()
        except ImportError as error:
            pytest.skip(str(error))


@pytest.mark.parametrize("case", ALL, indirect=True)
def test_truth_is_what_the_model_computes(case: Case) -> None:
    for inputs in (case.inputs, case.longer):
        if inputs is None or case.mixer is not None:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got, want = case.run(case.model, inputs).double(), case.expected(inputs)[0]
        assert got.shape == want.shape
        assert (got - want).abs().max() < 5e-4 * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("case", ALL, indirect=True)
def test_nothing_is_silently_wrong(case: Case) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verdict = judge(case)
    assert not verdict.wrong, f"{case.name}: {'; '.join(verdict.wrong)}"
