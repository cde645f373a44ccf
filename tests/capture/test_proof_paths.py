"""Code paths: what is proved of the one that the probe takes is not believed of another."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import manyheads as mh
from manyheads.capture import probing
from manyheads.capture.probe_inputs import Inputs
from manyheads.capture.proof import ForwardCall, proof_of

LIMIT = 40


class Switching(nn.Module):
    """Attention (batch, heads, ...) that puts heads before the batch when ``switch`` says so."""

    def __init__(self, heads: int = 4, width: int = 6) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.qkv, self.o = nn.Linear(24, 3 * heads * width), nn.Linear(heads * width, 24)
        self.weights: Tensor | None = None

    def switch(self, x: Tensor) -> bool:
        return x.shape[1] > LIMIT

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, self.width)).permute(2, 0, 3, 1, 4)
        with torch.no_grad():
            self.weights = (q.double() @ k.double().mT * self.width**-0.5).softmax(-1)
        if self.switch(x):
            q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        y = (q @ k.mT * self.width**-0.5).softmax(-1) @ v
        y = y.transpose(0, 1) if self.switch(x) else y
        return self.o(y.transpose(1, 2).flatten(2))


class WhileTraining(Switching):
    def switch(self, x: Tensor) -> bool:
        return self.training


def model(kind: type[Switching]) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(kind()).eval()
    with torch.no_grad():
        made[0].qkv.weight.mul_(4)
    return made


def entropy(attention: Switching) -> Tensor:
    weights = attention.weights
    assert weights is not None
    return -torch.special.xlogy(weights, weights).sum(-1).mean((0, 2))


@pytest.mark.parametrize("batch", [3, 4, 5])  # four is the number of heads
@pytest.mark.parametrize("lengths", [(11, 90), (90, 11), (90, 300, 11)])
def test_each_code_path_is_proved_for_itself(batch, lengths) -> None:
    net = model(Switching)
    for length in lengths:
        with torch.no_grad(), mh.watch(net) as seen:
            net(torch.randn(batch, length, 24))
        assert [(site.heads, site.verified) for site in seen.sites] == [(4, True)]
        torch.testing.assert_close(seen.table["entropy"], entropy(net[0]), atol=1e-5, rtol=1e-5)


def test_a_code_path_is_proved_once(monkeypatch) -> None:
    net, proofs = model(Switching), []
    plain = probing._proof
    monkeypatch.setattr(probing, "_proof", lambda *args: proofs.append(args) or plain(*args))
    for length in (11, 90, 300, 12, 91, 11):
        with torch.no_grad(), mh.watch(net):
            net(torch.randn(3, length, 24))
    assert len(proofs) == 3  # of 11 tokens, of 13, and of as many as the other path needs


@pytest.mark.parametrize("batch", [3, 4])
def test_the_code_path_of_training_is_proved(batch) -> None:
    net = nn.Sequential(nn.Dropout(0.3), *model(WhileTraining)).train()
    for _ in range(2):
        with mh.watch(net) as seen:
            net(torch.randn(batch, 11, 24))
        assert [(site.heads, site.verified) for site in seen.sites] == [(4, True)]
        torch.testing.assert_close(seen.table["entropy"], entropy(net[1]), atol=1e-5, rtol=1e-5)


class Unique(Switching):
    """Takes a path that no copy takes, and so no probe."""

    def __init__(self) -> None:
        super().__init__()
        self.identity = id(self)

    def switch(self, x: Tensor) -> bool:
        return id(self) == self.identity


def test_a_code_path_that_no_probe_takes_is_not_verified() -> None:
    net = model(Unique)
    with torch.no_grad(), mh.watch(net) as seen:
        net(torch.randn(3, 11, 24))
    (site,) = seen.sites
    assert not site.verified
    assert "no probe" in seen.missed[site.name]
    with pytest.raises(ValueError, match="could not be proved"), mh.silence(net, {0: [1]}):
        net(torch.randn(3, 11, 24))


def test_one_interceptor_inside_another_takes_nothing_for_the_model() -> None:
    net = model(Switching)
    with torch.no_grad(), mh.watch(net) as outer, mh.silence(net, {0: [1]}), mh.watch(net) as inner:
        for length in (11, 90):
            net(torch.randn(3, length, 24))
    assert [site.verified for site in (*outer.sites, *inner.sites)] == [True, True]


class Chunked(Switching):
    """Long sequences in pieces of the queries."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, self.width)).permute(2, 0, 3, 1, 4)
        pieces = q.split(32, 2) if self.switch(x) else (q,)
        y = torch.cat([F.scaled_dot_product_attention(piece, k, v) for piece in pieces], 2)
        return self.o(y.transpose(1, 2).flatten(2))


def test_pieces_of_long_sequences_are_one_site() -> None:
    net = model(Chunked)
    with torch.no_grad(), mh.watch(net) as seen:
        for length in (11, 90, 33):
            net(torch.randn(2, length, 24))
    assert [(site.name, site.verified) for site in seen.sites] == [("0", True)]
    assert seen.table["tokens"].tolist() == [2 * (11 + 90 + 33)] * 4


def test_a_proof_says_how_long_its_probe_was() -> None:
    net = model(Switching)
    assert proof_of(ForwardCall(net, net, "", Inputs((torch.randn(2, 90, 24),), {}))).length == 13
