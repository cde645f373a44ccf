"""Further runs of a probe: what is computed again, and tokens that are chosen by what is in others."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.capture import probing
from manyheads.capture.probe_inputs import Inputs
from manyheads.capture.proof import ForwardCall, Proof
from manyheads.capture.second_run import _Reused
from manyheads.capture.token_mixing import Baseline


class Chosen(nn.Module):
    """The best seven tokens, best first, and attention between them: their places change with one token."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.embed, self.score, self.attention = nn.Linear(6, 12), nn.Linear(12, 1), attention

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        best = self.score(x).squeeze(-1).topk(7, 1).indices
        return self.attention(x.gather(1, best[..., None].expand(-1, -1, 12)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(12, 36), nn.Linear(12, 12)

    def heads(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.o(self.heads(x))


class WithGate(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.o(self.heads(x)) * (x @ x.mT).sigmoid().mean(-1, keepdim=True)


class Sorting(Attention):
    def forward(self, x: Tensor) -> Tensor:
        order = x.argsort(1)  # every channel by itself, so that it is no choice of whole tokens
        return x + self.o(self.heads(x)) + torch.cos(order.to(x.dtype))


def proof_of_chosen(attention: nn.Module, seed: int) -> Proof:
    torch.manual_seed(seed)
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.4)
    model = Chosen(attention).eval()
    proof = probing.prove(ForwardCall(model, model, "", Inputs((torch.randn(2, 11, 6),), {})), None)
    assert not proof.failed
    return proof


def test_a_choice_of_tokens_is_named_and_the_attention_behind_it_is_proved() -> None:
    proofs = [proof_of_chosen(Attention(), seed) for seed in range(6)]
    assert [proof.sites["attention"].verified for proof in proofs] == [True] * 6
    text = "Chosen mixes tokens without attention that was seen (a choice of tokens by what is in others)"
    assert [proof.missed for proof in proofs] == [{"": text}] * 6


@pytest.mark.parametrize("kind", [WithGate, Sorting])
def test_what_is_half_seen_stays_so_behind_a_choice(kind: type[Attention]) -> None:
    for seed in range(4):
        proof = proof_of_chosen(kind(), seed)
        assert not proof.sites["attention"].verified
        assert "one part of it was seen" in proof.missed["attention"]


@pytest.mark.parametrize("func", [F.linear, torch.addmm])
def test_rows_that_did_not_change_are_taken_from_the_first_run(func) -> None:
    torch.manual_seed(0)
    weight, bias, data = torch.randn(5, 3), torch.randn(5), torch.randn(7, 3)

    def arguments(x: Tensor, w: Tensor = weight) -> tuple[Tensor, ...]:
        return (x, w, bias) if func is F.linear else (bias, x, w.mT)

    first = Baseline(nn.Identity(), {})
    kept = func(*arguments(data))
    first.keep(func, arguments(data), data, kept + 1.0, kept.clone())  # not the truth, to be told from it
    changed = data.clone()
    changed[2] += 1.0
    other = weight.clone()
    with _Reused(first):
        reused = func(*arguments(changed))
        again = func(*arguments(changed))  # the first run had no second such call
    with _Reused(first):
        elsewhere = func(*arguments(changed, other))
    truth = func(*arguments(changed))
    torch.testing.assert_close(reused[2], truth[2])
    rest = [0, 1, 3, 4, 5, 6]
    torch.testing.assert_close(reused[rest], truth[rest] + 1.0)
    torch.testing.assert_close(again, truth)
    torch.testing.assert_close(elsewhere, truth)
