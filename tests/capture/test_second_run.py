"""Further runs of a probe: what is computed again, and tokens that are chosen by what is in others."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import manyheads as mh
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


class Reader(nn.Module):
    """Places first, and more of them than tokens; then attention, and something that mixes tokens unseen."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.embed = nn.Embedding(64, 12), nn.Embedding(17, 12)
        self.attention, self.mix = Attention(), Mixed()

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[-1]).expand(ids.shape)
        return self.mix(self.attention(self.places(places) + self.embed(ids)))


class Mixed(nn.Linear):
    def __init__(self) -> None:
        super().__init__(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) @ x.mT).relu() @ x


IDS = {
    "all the same, and none": torch.zeros(2, 9, dtype=torch.long),
    "all the same": torch.ones(1, 9, dtype=torch.long),
    "of two kinds, as masks are": torch.randint(2, (2, 11), generator=torch.Generator().manual_seed(1)),
    "like those at the ends, where one is replaced": torch.tensor(
        [[1, 2, 3, 1, 4, 5, 2], [2, 4, 2, 2, 1, 4, 1], [3, 5, 4, 3, 2, 1, 3]]
    ),
}


@pytest.mark.parametrize("name", IDS)
def test_ids_that_say_little_still_show_what_mixes_tokens_and_which_table_is_the_vocabulary(
    name: str,
) -> None:
    torch.manual_seed(0)
    model, ids, chosen = Reader().eval(), IDS[name], [0, 1]
    with torch.no_grad(), mh.watch(model, tokens={"chosen": chosen}) as seen:
        model(ids)
    maps = mh.maps(model, ids, {"attention": [0, 1, 2]})["attention"].weights
    share = (maps * torch.isin(ids, torch.tensor(chosen))[:, None, None]).sum(-1).mean((0, 2))
    torch.testing.assert_close(seen.table["chosen"], share.double(), atol=1e-5, rtol=0)
    assert "mix" in seen.missed


def test_one_token_alone_shows_which_table_is_the_vocabulary() -> None:
    ids = torch.tensor([[5], [7], [1]])  # as in decoding: there is no other token, but another sequence
    model = Reader().eval()
    with torch.no_grad(), mh.watch(model, tokens={"chosen": [0, 5, 7]}) as seen:
        model(ids)
    assert seen.table["chosen"].tolist() == pytest.approx([2 / 3] * 3)


class OneSequence(Reader):
    """It is given the ids of one sequence, without an axis of sequences."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places(torch.arange(len(ids)))
        return self.mix(self.attention(x.unsqueeze(0)))


def test_ids_without_an_axis_of_sequences_show_what_mixes_tokens() -> None:
    model = OneSequence().eval()
    with torch.no_grad(), mh.watch(model) as seen:
        model(torch.tensor([3, 1, 4, 1, 5, 9, 2]))
    assert list(seen.missed) == ["mix"]


class Marked(Reader):
    """A second table, of more rows than the vocabulary, for ids of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.Embedding(50, 12)

    def forward(self, ids: Tensor, kinds: Tensor) -> Tensor:
        return self.attention(self.kinds(kinds) + self.embed(ids))


def test_tokens_are_the_main_ids_not_those_of_the_largest_table() -> None:
    torch.manual_seed(0)
    model, ids, kinds = Marked().eval(), torch.randint(17, (3, 11)), torch.randint(17, 50, (3, 11))
    with torch.no_grad(), mh.watch(model, tokens={"chosen": [1, 2, 3]}) as seen:
        model(ids, kinds)
    maps = mh.maps(model, (ids, kinds), {"attention": [0, 1, 2]})["attention"].weights
    share = (maps * torch.isin(ids, torch.tensor([1, 2, 3]))[:, None, None]).sum(-1).mean((0, 2))
    torch.testing.assert_close(seen.table["chosen"], share.double(), atol=1e-5, rtol=0)
