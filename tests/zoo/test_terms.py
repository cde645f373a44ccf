"""The terms of diversity on models of the zoo: right, values and gradients, or refused in a sentence."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from tests.zoo.case import doubled
from tests.zoo.catalogue import HANDWRITTEN
from torch import Tensor

import manyheads as mh
from manyheads.common.run_batch import run

SOME = sorted(HANDWRITTEN)[::5]
# A sink is one more key for the term, and no key for the truth.
WITH_SINKS = {"a learned sink of each head (GPT-OSS), causal", "softmax1, a one in the sum"}
UNTRAINABLE = {"weights *= mask in place"}  # torch refuses to differentiate the model itself


def cosines(x: Tensor) -> Tensor:
    """Of every pair of heads, (pairs, batch, queries), from (batch, heads, queries, n)."""
    directions = x / x.norm(dim=-1, keepdim=True).clamp(min=1e-100)
    pairs = [(a, b) for b in range(x.shape[1]) for a in range(b)]
    return torch.stack([(directions[:, a] * directions[:, b]).sum(-1) for a, b in pairs])


@pytest.mark.parametrize("name", [name for name in SOME if name not in WITH_SINKS | UNTRAINABLE])
def test_terms_are_right_or_refused(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case = HANDWRITTEN[name]()
        model, refusal = case.model, ""
        try:
            terms = mh.diversity_terms(model, attention=1, outputs=1)
            torch.manual_seed(7)
            with terms:
                run(model, case.inputs) if case.drive is None else case.drive(model, case.inputs)
            loss = terms.loss()
        except ValueError as error:
            refusal = str(error)
        if refusal:
            assert "expected" in refusal
            return
        exact = copy.deepcopy(model).double()
        torch.manual_seed(7)
        truths = case.plain(exact, doubled(case.inputs), {})[1]
        with mh.watch(model) as seen:
            run(model, case.inputs) if case.drive is None else case.drive(model, case.inputs)
    wanted = []
    truths = [truth for truth in truths if truth.path not in seen.missed]  # which terms cannot be about
    for truth in truths:
        weights, outputs = truth.weights, truth.outputs
        counted = weights.any(-1).any(1) if truth.counted is None else truth.counted & weights.any(-1).any(1)
        visible = weights > 0 if truth.hidden is None else (~truth.hidden).expand_as(weights)
        choice = counted & (visible.sum(-1) > 1).any(1)
        wanted.append(cosines(weights).mean(0)[choice].mean())
        if outputs is not None:
            wanted[-1] = wanted[-1] + cosines(outputs).square().mean(0)[counted].mean()
    if any(truth.outputs is None for truth in truths):
        loss = terms.weights["attention"] * torch.tensor(terms.values["attention"])
    total = torch.stack(wanted).mean()
    assert loss.item() == pytest.approx(total.item(), abs=4e-4)
    if loss.requires_grad:
        ours, theirs = (
            torch.autograd.grad(x, list(m.parameters()), allow_unused=True, materialize_grads=True)
            for x, m in ((loss, model), (total, exact))
        )
        size = sum(grad.square().sum() for grad in theirs) ** 0.5
        off = sum((a - b).square().sum() for a, b in zip(ours, theirs, strict=True)) ** 0.5
        assert off <= 1e-2 * size
