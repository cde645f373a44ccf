"""The judge of the zoo: it finds a lie, and tells a refusal from a crash."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from tests.zoo.axes import Textbook
from tests.zoo.base import CASES
from tests.zoo.case import Case, Silent, Truth
from tests.zoo.compare import REFUSED, RIGHT, WRONG
from tests.zoo.judge import judge
from torch import Tensor

import manyheads as mh

Change = Callable[[Tensor, list[Truth]], tuple[Tensor, list[Truth]]]


def changed(change: Change) -> Case:
    """A case that is right, with another truth."""
    case = CASES["textbook, fused"]()
    plain = case.plain

    def other(model: Any, inputs: Any, silent: Silent) -> tuple[Tensor, list[Truth]]:
        return change(*plain(model, inputs, silent))

    return dataclasses.replace(case, plain=other)


def test_what_is_right_is_called_right() -> None:
    verdict = judge(CASES["textbook, fused"]())
    assert set(verdict.outcomes.values()) == {RIGHT}
    assert not verdict.wrong


def test_other_weights_are_wrong() -> None:
    def swap(out: Tensor, truths: list[Truth]) -> tuple[Tensor, list[Truth]]:
        truths[0].weights = truths[0].weights[:, [1, 0, 2, 3]]
        return out, truths

    assert judge(changed(swap)).outcomes["weights"] == WRONG


@pytest.mark.parametrize(
    ("field", "value", "aspect"),
    [("kinds", ("causal",), "heads"), ("own", None, "weights"), ("path", "elsewhere", "heads")],
)
def test_another_truth_is_wrong(field: str, value: object, aspect: str) -> None:
    def change(out: Tensor, truths: list[Truth]) -> tuple[Tensor, list[Truth]]:
        setattr(truths[0], field, value)
        return out, truths

    assert judge(changed(change)).outcomes[aspect] == WRONG


def test_fewer_queries_that_count_are_wrong() -> None:
    def change(out: Tensor, truths: list[Truth]) -> tuple[Tensor, list[Truth]]:
        truths[0].counted = truths[0].all_views()[0].counted.clone()
        truths[0].counted[0, 0] = False
        return out, truths

    assert judge(changed(change)).outcomes["counts"] == WRONG


def test_a_head_that_gives_something_else_is_wrong() -> None:
    case = CASES["textbook, fused"]()
    plain = case.plain

    def other(model: Any, inputs: Any, silent: Silent) -> tuple[Tensor, list[Truth]]:
        return plain(model, inputs, {0: frozenset((head + 1) % 4 for head in silent.get(0, ()))})

    verdict = judge(dataclasses.replace(case, plain=other))
    assert verdict.outcomes["silence"] == verdict.outcomes["cut"] == WRONG


def test_a_refusal_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["textbook, fused"]()
    assert judge(dataclasses.replace(case, cut={0: frozenset({9})})).outcomes["cut"] == REFUSED

    def crash(*args: object, **options: object) -> None:
        raise IndexError("list index out of range")

    monkeypatch.setattr(mh, "cut", crash)
    verdict = judge(CASES["textbook, fused"]())
    assert verdict.outcomes["cut"] == WRONG
    assert "crash" in verdict.reasons["cut"]


def test_mixers_must_be_named() -> None:
    case = CASES["textbook, fused"]()
    verdict = judge(dataclasses.replace(case, mixer="attn"))
    assert verdict.outcomes["heads"] == WRONG
    assert isinstance(case.model.get_submodule("attn"), Textbook)
