"""A small model of tokens with an attention that is proved, one that is not, and one that needs a note."""

import torch
from torch import Tensor, nn

from manyheads.capture.probe_inputs import Inputs
from manyheads.capture.proof import ForwardCall, proof_of

HEADS, WIDTH = 4, 24


class Proved(nn.Module):
    """Attention as it is usually written."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.o(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v)


class Damped(Proved):
    """The weights are made smaller after the softmax: rows do not sum to one."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) * 0.8) @ v


class Half(Proved):
    """Of half of its heads the attention is not seen, so that nobody knows what the others are."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        half = self.heads // 2
        seen = nn.functional.scaled_dot_product_attention(q[:, :half], k[:, :half], v[:, :half])
        unseen = (t[:, half:].contiguous() for t in (q, k, v))
        return torch.cat([seen, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*unseen)[0]], 1)


class Doubtful(nn.Module):
    """Token ids (batch, length) to hidden states (batch, length, width)."""

    def __init__(self, *kinds: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(101, WIDTH)
        self.layers = nn.ModuleList(kind() for kind in kinds)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return x


def proved() -> nn.Module:
    """A model of which everything is proved."""
    torch.manual_seed(0)
    return Doubtful(Proved, Proved).eval()


def doubtful() -> nn.Module:
    """Layer 0 is proved, layer 1 is not, layer 2 has a note."""
    torch.manual_seed(0)
    return Doubtful(Proved, Half, Damped).eval()


def unproved() -> nn.Module:
    """A model that could be cut everywhere, of which layer 1 is not proved."""
    model = proved()
    for args, kwargs in (((ids(length=13),), {}), ((), {"input_ids": ids(length=13)})):  # no longer ones
        site = proof_of(ForwardCall(model, model, "", Inputs(args, kwargs))).sites["layers.1"]
        site.verified, site.reason = False, "for want of means"
    return model


def ids(batch: int = 5, length: int = 11, seed: int = 1) -> Tensor:
    return torch.randint(101, (batch, length), generator=torch.Generator().manual_seed(seed))
