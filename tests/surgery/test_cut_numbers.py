"""cut changes no number that need not change: numbers that equal those of heads, settings of every head.

Every case must equal the silenced model at lengths far beyond the batch that it was cut with, or be refused.
"""

from __future__ import annotations

import copy
import math
import types

import pytest
import torch
import transformers as hf
from tests.helpers.models import bert_config, t5_config
from torch import Tensor, nn
from torch.nn import functional as F

import manyheads as mh
from manyheads.common.compare_outputs import relative_difference
from manyheads.common.run_batch import run
from manyheads.models.changes import changes_of

WIDTH, HEADS, WINDOWS = 24, 4, (3, 40, 9, 70)


class Attention(nn.Module):
    """Four heads of width 6, with something else that subclasses add."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.n_head = HEADS
        self.add()

    def add(self):
        pass

    def bias(self, length):
        return None

    def split(self, x):
        return x.unflatten(-1, (self.n_head, -1)).transpose(1, 2)

    def heads(self, x):
        q, k, v = (self.split(make(x)) for make in (self.query, self.key, self.value))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias(x.shape[1]))

    def forward(self, x):
        return self.output(self.heads(x).transpose(1, 2).flatten(2))


def distances(length):
    """How far each query (row) is behind each key."""
    positions = torch.arange(length)
    return positions[:, None] - positions


def awake(module, seed=0):
    """In eval mode, with attention that is far from uniform."""
    torch.manual_seed(seed)
    model = nn.Sequential(module() if isinstance(module, type) else module).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("query.weight", "key.weight")):
                parameter.mul_(4)
    return model


def off(model, small, heads, batch):
    """How far the cut model is from the silenced one."""
    with torch.no_grad():
        with mh.silence(model, heads):
            wanted = run(model, batch)
        return relative_difference(wanted, run(small, batch))


def held(model, heads, batch, others):
    """The cut model, which equals the silenced one also on other batches."""
    small = mh.cut(model, heads, batch)
    for other in others:
        assert off(model, small, heads, other) < 1e-5
    return small


# Numbers that have nothing to do with heads.


class Block(Attention):
    """A limit on how far a query looks back."""

    number = WIDTH

    def add(self):
        self.block_size = self.number

    def bias(self, length):
        return (distances(length) >= 0) & (distances(length) < self.block_size)


class Ahead(Block):
    """A look-ahead."""

    def bias(self, length):
        return distances(length) >= -self.block_size


class Dilated(Block):
    """Only every n-th key."""

    def bias(self, length):
        return distances(length) % self.block_size == 0


class Chunked(Block):
    """Only keys of the same chunk."""

    def bias(self, length):
        chunk = torch.arange(length) // self.block_size
        return chunk[:, None] == chunk


class Limited(Block):
    """Only the last tokens."""

    def forward(self, x):
        return super().forward(x[:, -self.block_size :])

    def bias(self, length):
        return None


class Scaled(Block):
    """A number that distances are divided by."""

    def bias(self, length):
        return -distances(length).abs() / self.block_size


class Bucketed(Block):
    """Distances in logarithmic buckets, as T5 has them, each with a bias for every head."""

    def add(self):
        self.num_buckets = self.number
        self.table = nn.Parameter(torch.randn(self.number, HEADS))

    def bias(self, length):
        distance, exact = distances(length).abs(), self.num_buckets // 2
        far = torch.log(distance.clamp(min=1) / exact) / math.log(128 / exact) * (self.num_buckets - exact)
        bucket = torch.where(
            distance < exact, distance, exact + far.long().clamp(max=self.num_buckets - exact - 1)
        )
        return self.table[bucket].permute(2, 0, 1)[None]


class Top(Block):
    """Only the keys with the largest scores."""

    def heads(self, x):
        q, k, v = (self.split(make(x)) for make in (self.query, self.key, self.value))
        scores = q @ k.transpose(-1, -2) / 2
        least = scores.topk(min(self.block_size, scores.shape[-1]), -1).values[..., -1:]
        return scores.masked_fill(scores < least, -math.inf).softmax(-1) @ v


class Registers(Block):
    """Some learned tokens in front."""

    number = HEADS

    def add(self):
        self.many, self.registers = HEADS, nn.Parameter(torch.randn(HEADS, WIDTH))

    def forward(self, x):
        x = torch.cat([self.registers[: self.many].expand(len(x), -1, -1), x], 1)
        return super().forward(x)[:, self.many :]

    def bias(self, length):
        return None


UNRELATED = (Block, Ahead, Dilated, Chunked, Limited, Scaled, Bucketed, Top)


@pytest.mark.parametrize("kind", UNRELATED, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("number", [HEADS, WIDTH // HEADS * (HEADS - 1), WIDTH])
def test_a_number_that_equals_one_of_heads_stays(kind, number):
    model = awake(type(kind.__name__, (kind,), {"number": number}))
    small = held(model, {0: [1]}, torch.randn(2, 5, WIDTH), [torch.randn(2, 150, WIDTH)])
    assert changes_of(small).attributes == {"0": {"n_head": 3}}


def test_registers_stay():
    small = held(awake(Registers), {0: [1]}, torch.randn(2, 5, WIDTH), [torch.randn(2, 90, WIDTH)])
    assert small[0].many == HEADS


class Checked(Attention):
    """Reads a number that changes nothing."""

    def add(self):
        self.max_heads = HEADS

    def forward(self, x):
        if self.max_heads < 1:
            raise ValueError("no heads")
        return super().forward(x)


def test_a_number_that_is_right_either_way_stays():
    small = held(awake(Checked), {0: [1]}, torch.randn(2, 5, WIDTH), [torch.randn(2, 90, WIDTH)])
    assert changes_of(small).attributes == {"0": {"n_head": 3}}


class Normed(Attention):
    """Groups and kernels behind the output projection, as many as there are heads."""

    def add(self):
        self.norm = nn.GroupNorm(HEADS, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, HEADS, padding=HEADS - 1, groups=HEADS)

    def forward(self, x):
        return self.conv(self.norm(super().forward(x).mT))[..., : x.shape[1]].mT


def test_groups_and_kernels_of_other_modules_stay():
    small = held(awake(Normed), {0: [0, 3]}, torch.randn(2, 7, WIDTH), [torch.randn(2, 90, WIDTH)])
    assert (small[0].norm.num_groups, small[0].conv.groups, small[0].n_head) == (4, 4, 2)


class Both(Block):
    """One number for the heads and for a window."""

    def add(self):
        self.n = HEADS

    def split(self, x):
        return x.unflatten(-1, (self.n, -1)).transpose(1, 2)

    def bias(self, length):
        return distances(length).abs() < 8 * self.n


class WidthAndWindow(Attention):
    """Takes the width of its input for that of all heads, and for a window."""

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (
            make(x).view(batch, length, self.n_head, width // self.n_head).transpose(1, 2)
            for make in (self.query, self.key, self.value)
        )
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=distances(length).abs() < width)
        return self.output(heads.transpose(1, 2).reshape(batch, length, width))


@pytest.mark.parametrize("kind", [Both, WidthAndWindow])
def test_one_number_with_two_meanings_is_refused(kind):
    with pytest.raises(RuntimeError, match=r"without heads \[1\] does not give the output"):
        mh.cut(awake(kind), {0: [1]}, torch.randn(2, 5, WIDTH))


class Fixed(Both):
    """The same, for sequences of one length only: whether the window is one does not show."""

    def add(self):
        self.n, self.positions = HEADS, nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, x):
        return super().forward(x + self.positions)

    def bias(self, length):
        return distances(length).abs() < self.n


def test_a_batch_that_cannot_be_longer_is_noted_and_numbers_beyond_it_are_refused():
    with pytest.raises(ValueError, match=r"n = 4 would have to change, and no batch longer than 3"):
        mh.cut(awake(Fixed), {0: [1]}, torch.randn(2, 3, WIDTH))

    class Plain(Fixed):
        def bias(self, length):
            return None

    small = mh.cut(awake(Plain), {0: [1]}, torch.randn(2, 3, WIDTH))
    assert changes_of(small).notes == [
        "the batch, of length 3, could not be made longer, so the copy was not checked on longer ones"
    ]


def test_t5_with_as_many_heads_as_buckets():
    torch.manual_seed(0)
    config = t5_config(
        vocab_size=99, d_model=16, d_kv=2, d_ff=8, num_layers=1, num_heads=32, decoder_start_token_id=0
    )
    model = hf.T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1)
    site = "decoder.block.0.layer.0.SelfAttention"
    ids = torch.randint(5, 99, (2, 150))
    batch = {"input_ids": ids[:, :11], "decoder_input_ids": ids}
    small = held(model, {site: range(8)}, None, [batch])
    assert small.get_submodule(site).relative_attention_num_buckets == 32


# Settings of every head.


class Windows(Attention):
    """Each head has a window of its own; ``keep`` says where they are kept."""

    def keep(self, windows):
        self.windows = windows

    def of(self, head):
        return self.windows[head]

    def add(self):
        self.keep(list(WINDOWS))

    def bias(self, length):
        return torch.stack([distances(length).abs() < self.of(h) for h in range(self.n_head)])[None]


class InTuple(Windows):
    def keep(self, windows):
        self.windows = tuple(windows)


class InDict(Windows):
    def keep(self, windows):
        self.windows = dict(enumerate(windows))


class InBuffer(Windows):
    def keep(self, windows):
        self.register_buffer("windows", torch.tensor(windows))


class InHiddenBuffer(Windows):
    def keep(self, windows):
        self.register_buffer("windows", torch.tensor(windows), persistent=False)


class InTensor(Windows):
    def keep(self, windows):
        self.windows = torch.tensor(windows)


class InParameter(Windows):
    def keep(self, windows):
        self.windows = nn.Parameter(torch.tensor(windows).float())


class InMasks(Windows):
    """A mask (heads, longest, longest) that is made once."""

    def keep(self, windows):
        self.register_buffer("masks", torch.stack([distances(300).abs() < window for window in windows]))

    def bias(self, length):
        return torch.stack([self.masks[head, :length, :length] for head in range(self.n_head)])[None]


class Broadcast(Windows):
    def bias(self, length):
        return distances(length).abs() < torch.tensor(self.windows)[:, None, None]


class Slopes(Windows):
    """ALiBi with slopes in a list."""

    def keep(self, windows):
        self.slopes = [0.5, 0.25, 0.125, 0.0625]

    def bias(self, length):
        return -distances(length).abs() * torch.tensor(self.slopes[: self.n_head])[:, None, None]


class Temperatures(Attention):
    def add(self):
        self.temperatures = (1.0, 2.0, 3.0, 4.0)

    def heads(self, x):
        q, k, v = (self.split(make(x)) for make in (self.query, self.key, self.value))
        q = torch.stack([q[:, head] * self.temperatures[head] for head in range(self.n_head)], 1)
        return F.scaled_dot_product_attention(q, k, v)


class Looks(Windows):
    """How far each head looks ahead."""

    def bias(self, length):
        return torch.stack([distances(length) >= -self.of(head) for head in range(self.n_head)])[None]


FOLLOW = (
    Windows, InTuple, InDict, InBuffer, InHiddenBuffer, InTensor, InParameter, InMasks, Broadcast, Slopes,
    Temperatures, Looks,
)  # fmt: skip


@pytest.mark.parametrize("kind", FOLLOW, ids=lambda kind: kind.__name__)
def test_settings_follow_their_heads(kind, tmp_path):
    model, batch, longer = awake(kind), torch.randn(2, 5, WIDTH), torch.randn(2, 290, WIDTH)
    small = held(model, {0: [1]}, batch, [longer])
    again = mh.cut(small, {0: [0]}, batch)  # head 0 of those that are left
    assert off(model, again, {0: [0, 1]}, longer) < 1e-5
    mh.save(again, tmp_path / "small")
    loaded = mh.load(tmp_path / "small", factory=lambda: awake(kind, seed=5))
    with torch.no_grad():
        assert torch.equal(loaded(longer), again(longer))


class InObject(Windows):
    def keep(self, windows):
        self.options = types.SimpleNamespace(windows=windows)

    def of(self, head):
        return self.options.windows[head]


class InClass(Windows):
    kept = WINDOWS

    def keep(self, windows):
        pass

    def of(self, head):
        return self.kept[head]


class InCode(InClass):
    def of(self, head):
        return 4 * 4**head


class ComputedSlopes(InClass):
    def bias(self, length):
        slopes = 2.0 ** (-8 * torch.arange(1, self.n_head + 1) / self.n_head)
        return -distances(length).abs() * slopes[:, None, None]


@pytest.mark.parametrize("kind", [InObject, InClass, InCode, ComputedSlopes], ids=lambda kind: kind.__name__)
def test_settings_that_cannot_follow_are_refused(kind):
    with pytest.raises(RuntimeError, match=r"without heads \[1\] does not give the output"):
        mh.cut(awake(kind), {0: [1]}, torch.randn(2, 5, WIDTH))


class Far(Windows):
    def keep(self, windows):
        self.windows = [30_000, 40_000, 90_000, 70_000]


def test_settings_that_no_batch_shows_are_refused():
    with pytest.raises(ValueError, match=r"does not show whether .*windows depends on the number of heads"):
        mh.cut(awake(Far), {0: [1]}, torch.randn(2, 5, WIDTH))


class KeyWindows(nn.Module):
    """Four heads in two groups; a window for each key head, and unrelated twos."""

    def __init__(self):
        super().__init__()
        self.query, self.output = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 12)
        self.kv_heads, self.group, self.first, self.windows = 2, 2, 2, [5, 60]

    def forward(self, x):
        q, k, v = (
            make(x).unflatten(-1, (many, -1)).transpose(1, 2)
            for make, many in (
                (self.query, self.kv_heads * self.group),
                (self.key, self.kv_heads),
                (self.value, self.kv_heads),
            )
        )
        near = torch.stack([distances(x.shape[1]).abs() < self.windows[h] for h in range(self.kv_heads)])
        mask = near.repeat_interleave(self.group, 0) | (torch.arange(x.shape[1]) < self.first)
        k, v = (part.repeat_interleave(self.group, 1) for part in (k, v))
        return self.output(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("heads", "numbers"), [([0, 1], {"kv_heads": 1}), ([0, 2], {"group": 1})], ids=["group", "one of each"]
)
def test_grouped_heads(heads, numbers):
    small = held(awake(KeyWindows), {0: heads}, torch.randn(2, 5, WIDTH), [torch.randn(2, 200, WIDTH)])
    assert changes_of(small).attributes == {"0": numbers}
    assert small[0].windows == ([60] if heads == [0, 1] else [5, 60])


# Batches of every form.


class Model(nn.Module):
    """Token ids, learned positions up to some length, and a layer that takes a mask or not."""

    def __init__(self, longest=1000, layer=Block):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, WIDTH), nn.Embedding(longest, WIDTH)
        self.layer = layer()

    def forward(self, ids):
        return self.layer(self.tokens(ids) + self.positions(torch.arange(ids.shape[1])))


def ids(*shape):
    return torch.randint(50, shape)


@pytest.mark.parametrize(
    "batch",
    [ids(2, 7), ids(7, 7), ids(1, 7), ids(2, 1), torch.full((2, 7), 3), {"ids": ids(2, 7)}, [ids(3, 24)]],
)
def test_short_batches_are_made_longer(batch):
    model = awake(Model)[0]
    small = held(model, {0: [1]}, batch, [ids(2, 150)])
    assert changes_of(small).attributes == {"layer": {"n_head": 3}}
    assert changes_of(small).notes == []


def test_batches_are_as_long_as_the_model_allows():
    small = held(awake(Model(100))[0], {0: [1]}, ids(2, 7), [ids(2, 100)])
    assert changes_of(small).notes == []


class LengthFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Block()

    def forward(self, x):
        return self.layer(x.transpose(0, 1)).transpose(0, 1)


class Cross(Block):
    """A second sequence, of which only the first tokens count."""

    def forward(self, x, memory):
        q, k, v = self.split(self.query(x)), self.split(self.key(memory)), self.split(self.value(memory))
        near = (torch.arange(memory.shape[1]) < self.block_size).expand(x.shape[1], -1)
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=near)
        return self.output(heads.transpose(1, 2).flatten(2))


class Masked(Block):
    """A mask (length, length) that is given, True may attend."""

    def forward(self, x, mask):
        q, k, v = (self.split(make(x)) for make in (self.query, self.key, self.value))
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=mask & self.bias(x.shape[1]))
        return self.output(heads.transpose(1, 2).flatten(2))


class Takes(nn.Module):
    """A model of one layer that takes what the layer takes."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer()

    def forward(self, *given):
        return self.layer(*given)


def causal(length):
    return torch.ones(length, length, dtype=torch.bool).tril()


def noise(*shape):
    return torch.randn(*shape, WIDTH)


@pytest.mark.parametrize(
    ("make", "batch", "longer"),
    [
        (LengthFirst, noise(7, 2), noise(150, 2)),
        (LengthFirst, noise(7, 7), noise(150, 2)),
        (lambda: Takes(Block), noise(2, WIDTH), noise(2, 150)),
        (lambda: Takes(Cross), (noise(2, 3), noise(2, 5)), (noise(2, 150), noise(2, 170))),
        (lambda: Takes(Masked), (noise(2, 7), causal(7)), (noise(2, 150), causal(150))),
    ],
    ids=["length first", "square", "as long as wide", "cross", "mask"],
)
def test_axes_of_sequences_are_found_by_trying(make, batch, longer):
    small = held(awake(make())[0], {0: [1]}, batch, [longer])
    assert changes_of(small).attributes == {"layer": {"n_head": 3}}
    assert changes_of(small).notes == []


@pytest.mark.parametrize("dead", ["output", "query"])
def test_weights_that_begin_as_zeros_hide_nothing(dead):
    model = awake(Attention)
    trained = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in getattr(model[0], dead).parameters():
            parameter.zero_()
    small = mh.cut(model, {0: [1, 3]}, noise(2, 7))
    assert small[0].n_head == 2
    rows = [*range(6), *range(12, 18)]
    with torch.no_grad():  # as if it had been trained
        whole, part = getattr(trained[0], dead), getattr(small[0], dead)
        part.weight.copy_(whole.weight[:, rows] if dead == "output" else whole.weight[rows])
        part.bias.copy_(whole.bias if dead == "output" else whole.bias[rows])
    assert off(trained, small, {0: [1, 3]}, noise(2, 90)) < 1e-5


# What silence leaves.


class Positional(Attention):
    """Adds a convolution of the values to what attention gives, as CSWin does."""

    def add(self):
        self.extra = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)

    def forward(self, x):
        local = self.extra(self.value(x).mT).mT
        return self.output(self.heads(x).transpose(1, 2).flatten(2) + local)


class Memory(Positional):
    """Adds it to the output, as FunASR does."""

    def forward(self, x):
        return Attention.forward(self, x) + self.extra(self.value(x).mT).mT


class SubNorm(Attention):
    """One norm over all heads before the output projection, as BEiT-3 has it."""

    def add(self):
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.output(self.norm(self.heads(x).transpose(1, 2).flatten(2)))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Positional, "read more than what its attention gives"),
        (Memory, "the weights of the head are read by more than its attention"),
        (SubNorm, "one norm goes over the outputs"),
    ],
)
def test_heads_that_leave_something_when_they_are_silent_are_refused(kind, message):
    with pytest.raises(ValueError, match=message):
        mh.cut(awake(kind), {0: [1]}, noise(2, 7))


def test_flags_and_random_numbers_stay_as_they_were():
    torch.manual_seed(0)
    config = bert_config(
        vocab_size=50, hidden_size=12, num_attention_heads=3, num_hidden_layers=2, intermediate_size=8
    )
    model = hf.BertModel(config).train()
    model.encoder.layer[0].eval()
    model.embeddings.requires_grad_(False)
    flags = [module.training for module in model.modules()]
    gradients = [parameter.requires_grad for parameter in model.parameters()]
    state = torch.get_rng_state()
    small = mh.cut(model, {1: [0]})
    assert torch.equal(state, torch.get_rng_state())
    for each in (model, small):
        assert [module.training for module in each.modules()] == flags
        assert [parameter.requires_grad for parameter in each.parameters()] == gradients
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in each.modules())


class MappedConfig(nn.Module):
    """Reads its number of heads from a config by a name that stands for another (Moonshine)."""

    def __init__(self) -> None:
        super().__init__()
        self.config = hf.T5Config(num_heads=4)
        self.q, self.k, self.v, self.o = (nn.Linear(24, 24) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.config.num_attention_heads
        q, k, v = (f(x).view(*x.shape[:2], heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_a_number_that_a_config_keeps_under_another_name() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(MappedConfig()).eval(), torch.randn(2, 7, 24)
    small = mh.cut(model, {0: [1]}, batch=x)
    with torch.no_grad(), mh.silence(model, {0: [1]}):
        expected = model(x)
    torch.testing.assert_close(small(x), expected, atol=1e-5, rtol=1e-5)
