"""What stands for cached keys can reach attention, and nothing else."""

import pytest
import torch
from torch.nn import functional as F

import manyheads as mh
from manyheads.nn.stand_in import StandIn, stand_ins

BATCH, HEADS, KV_HEADS, LENGTH, WIDTH = 2, 6, 3, 17, 5


class Holder:
    """Remembers what it was asked."""

    def attend(self, q, mask, scale, dropout):
        self.mask, self.scale = mask, scale
        return q * 2


@pytest.fixture
def pair():
    x = torch.zeros(BATCH, KV_HEADS, 1, WIDTH)
    return stand_ins(Holder(), x, x, LENGTH)


def query(heads=HEADS, length=1):
    return torch.ones(BATCH, heads, length, WIDTH)


def repeat_kv(x, times):
    """As transformers repeats grouped heads."""
    batch, heads, length, width = x.shape
    x = x[:, :, None, :, :].expand(batch, heads, times, length, width)
    return x.reshape(batch, heads * times, length, width)


@pytest.mark.parametrize(
    "repeat",
    [
        lambda x: x,
        lambda x: repeat_kv(x, 2),
        lambda x: x.repeat_interleave(2, dim=1),
        lambda x: torch.repeat_interleave(x, repeats=2, dim=1).contiguous(),
        lambda x: x.to(torch.float32),
    ],
)
def test_attention_reaches_the_holder(pair, repeat):
    k, v = map(repeat, pair)
    assert k.shape[2:] == (LENGTH, WIDTH)
    mask = torch.ones(BATCH, 1, 1, LENGTH, dtype=torch.bool)
    grouped = k.shape[1] != HEADS
    out = F.scaled_dot_product_attention(query(), k, v, attn_mask=mask, scale=0.3, enable_gqa=grouped)
    assert torch.equal(out, query() * 2)
    assert pair[0].holder.scale == 0.3
    assert pair[0].holder.mask.tensors[0] is mask
    assert torch.equal(mh.attention(query(), k, v), query() * 2)


@pytest.mark.parametrize(
    "use",
    [
        lambda k, v: k + 1,
        lambda k, v: query(KV_HEADS) @ k.transpose(2, 3),
        lambda k, v: k[:, :, 1:],
        lambda k, v: k[:, :1],
        lambda k, v: torch.cat([k, k], 2),
        lambda k, v: k.repeat_interleave(2, dim=2),
        lambda k, v: k.to(torch.float64),
        lambda k, v: k.reshape(BATCH, -1),
        lambda k, v: k.sum(),
    ],
)
def test_nothing_else_can_be_computed(pair, use):
    with pytest.raises(ValueError, match="attn_implementation='sdpa'"):
        use(*pair)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda k, v: F.scaled_dot_product_attention(query(KV_HEADS), v, k), "attends to values with keys"),
        (
            lambda k, v: F.scaled_dot_product_attention(query(KV_HEADS), k, torch.zeros(BATCH, 3, 17, 5)),
            "different caches",
        ),
        (lambda k, v: F.scaled_dot_product_attention(query(), repeat_kv(k, 2), v), "do not fit"),
        (
            lambda k, v: F.scaled_dot_product_attention(query(KV_HEADS, 3), k, v, is_causal=True),
            "not aligned",
        ),
        (lambda k, v: F.scaled_dot_product_attention(query(KV_HEADS, 3), k, v), "looks ahead"),
        (lambda k, v: mh.attention(query(), k, v, window=3), "a window or chunks"),
    ],
)
def test_attention_that_cannot_be_right(pair, use, message):
    with pytest.raises(ValueError, match=message):
        use(*pair)


def test_there_is_no_memory_behind_it(pair):
    assert isinstance(pair[0], StandIn)
    with torch._C.DisableTorchFunctionSubclass():
        assert pair[0].untyped_storage().nbytes() == 4
        assert pair[0].isnan().all()
