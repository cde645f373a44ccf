"""What is kept of an attention call that was looked at, and calls that are looked at in pieces."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from manyheads.capture import destinations, head_axes, probed_call, probing
from manyheads.capture.probe_inputs import Inputs, structure_copy
from manyheads.capture.proof import ForwardCall, Proof


class Attention(nn.Module):
    """Causal, heads folded into the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4).flatten(1, 2)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = (q @ k.mT).masked_fill(hidden, -torch.inf).softmax(-1)
        return x + self.o((weights @ v).unflatten(0, (-1, 3)).transpose(1, 2).flatten(2))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Attention(), Attention()).eval()


@pytest.fixture
def inputs() -> Inputs:
    return Inputs((torch.randn(3, 7, 12, generator=torch.Generator().manual_seed(1)),), {})


def test_of_a_call_that_was_looked_at_only_sizes_stay(model: nn.Module, inputs: Inputs) -> None:
    records, _ = probing._first_run(structure_copy(model), "", inputs, Proof())
    assert len(records) == 2
    for record in records:
        call, origin = record.call, record.origin
        tensors = {
            name: x for name in ("query", "key", "value", "output", "scores", "weights")
            if (x := getattr(call, name)) is not None
        }  # fmt: skip
        assert {"value", "output", "scores"} <= tensors.keys()
        for x in (*tensors.values(), origin.tensor):
            assert x.untyped_storage().nbytes() <= 8
            assert x.grad_fn is None
        assert call.value.shape == (9, 1, 7, 4)
        assert torch.equal(record.reads, torch.ones(7, 7, dtype=torch.bool).tril())


def test_calls_are_the_same_in_pieces(
    model: nn.Module, inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def proved() -> dict[str, object]:
        proof = probing.prove(ForwardCall(model, model, "", inputs), None)
        return {field.name: getattr(proof, field.name) for field in dataclasses.fields(proof)}

    whole = proved()
    monkeypatch.setattr(probed_call, "_PIECE", 7 * 9 * 2)  # two queries, or two heads
    monkeypatch.setattr(destinations, "_PIECE", 5)
    monkeypatch.setattr(head_axes, "_ROWS", 1)
    assert proved() == whole
    assert whole["failed"] == ""


class Biased(nn.Module):
    """A fused kernel with a bias that the queries make."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 18), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 3)).permute(2, 0, 3, 1, 4)
        bias = q.mean(-1, keepdim=True) + k.mean(-1)[..., None, :]
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.o(out.transpose(1, 2).flatten(2))


def test_a_bias_that_depends_on_queries_makes_no_scores_to_differentiate() -> None:
    torch.manual_seed(0)
    model, inputs, sizes = Biased().eval(), Inputs((torch.randn(3, 31, 6),), {}), [0]

    def keep(x: Tensor) -> Tensor:
        sizes.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), torch.enable_grad():
        records, _ = probing._first_run(structure_copy(model), "", inputs, Proof())
    assert not records[0].problem
    assert sizes.count(3 * 2 * 31 * 31) == 1  # the bias alone


def test_other_hidden_scores_have_another_digest() -> None:
    scores = torch.randn(2, 3, 5, 7)
    hidden = scores.clone()
    hidden[1, 2, 4, 0] = -1e9
    assert probed_call.shown_digest(scores) == probed_call.shown_digest(scores * 2)
    assert probed_call.shown_digest(hidden) != probed_call.shown_digest(scores)
