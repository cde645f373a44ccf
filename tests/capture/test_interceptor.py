"""Every way to write attention is seen as one call, at the right site; nothing is changed or left behind."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tests.helpers.models import Nano
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention as imported_by_name
from torch.nn.modules import module as hooks
from torch.utils import checkpoint

from manyheads.capture.call import Call
from manyheads.capture.interceptor import Interceptor
from manyheads.nn.attention import attention
from manyheads.nn.multihead import MultiHeadAttention

BATCH, HEADS, LENGTH, WIDTH = 3, 2, 5, 7


class Written(nn.Module):
    """Self-attention whose core is a function below, on q, k, v of (batch, heads, length, width)."""

    def __init__(self, core: Any) -> None:
        super().__init__()
        self.packed = nn.Linear(6, 3 * HEADS * WIDTH)
        self.core = core
        self.attend = nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.packed(x).view(BATCH, LENGTH, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
        return self.core(self, q, k, v)


def by_name(self: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return imported_by_name(q, k, v)


def by_operator(self: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.ops.aten.scaled_dot_product_attention.default(q, k, v)


def three_axes(self: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.reshape(BATCH * HEADS, LENGTH, WIDTH) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).view(BATCH, HEADS, LENGTH, WIDTH)


def ours(self: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, kernel="reference")


def matmuls(self: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / WIDTH**0.5
    return F.dropout(scores.softmax(-1), 0.0) @ v


def in_float32(self: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, k.mT) * WIDTH**-0.5
    return torch.matmul(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)


def softmax_module(self: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return self.attend(q @ k.swapaxes(2, 3) * WIDTH**-0.5).matmul(v)


def merged(self: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.reshape(-1, LENGTH, WIDTH) for x in (q, k, v))
    scores = torch.bmm(q * WIDTH**-0.5, k.transpose(1, 2))
    return torch.bmm(torch.softmax(scores, dim=2), v).view(BATCH, HEADS, LENGTH, WIDTH)


def merged_before_unpacking(self: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    packed = torch.stack([q, k, v]).reshape(3, BATCH * HEADS, LENGTH, WIDTH)
    q, k, v = packed.unbind(0)
    weights = F.softmax(q @ k.transpose(-2, -1) * WIDTH**-0.5, dim=-1)
    return (weights @ v).reshape(BATCH, HEADS, LENGTH, WIDTH)


def sequence_first(self: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.permute(2, 0, 1, 3).reshape(LENGTH, BATCH, HEADS * WIDTH) for x in (q, k, v))
    q, k, v = (x.contiguous().view(LENGTH, BATCH * HEADS, WIDTH).transpose(0, 1) for x in (q, k, v))
    weights = torch.softmax(torch.bmm(q, k.transpose(1, 2)) * WIDTH**-0.5, -1)
    return torch.bmm(weights, v).view(BATCH, HEADS, LENGTH, WIDTH)


def added(self: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    bias = torch.zeros(BATCH * HEADS, 1, LENGTH)
    scores = bias.baddbmm(batch1=q, batch2=k.transpose(1, 2), beta=1.0, alpha=WIDTH**-0.5)
    weights = F.softmax(scores.view(BATCH, HEADS, LENGTH, LENGTH), dim=-1)
    return torch.bmm(weights.view(-1, LENGTH, LENGTH), v).view(BATCH, HEADS, LENGTH, WIDTH)


def einsums(self: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (batch, length, heads, width)
    weights = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k) * WIDTH**-0.5, -1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).transpose(1, 2)


def einsums_of_another_order(self: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.permute(2, 0, 1, 3) for x in (q, k, v))  # (length, batch, heads, width)
    weights = torch.softmax(torch.einsum("ibnd, jbnd -> ijbn", q, k) * WIDTH**-0.5, 1)
    return torch.einsum("ijbn,jbnd->ibnd", weights, v).permute(1, 2, 0, 3)


def values_first(self: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = ((k @ q.mT) * WIDTH**-0.5).softmax(-2)  # (batch, heads, keys, queries)
    return (v.mT @ weights).mT


def one_key_head_each(self: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.unsqueeze(2) for x in (q, k, v))  # (batch, kv_heads, group, length, width)
    weights = (q @ k.mT * WIDTH**-0.5).softmax(-1)
    return (weights @ v).flatten(1, 2)


def softcapped(self: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.tanh(q @ k.mT * WIDTH**-0.5)
    return scores.softmax(-1) @ v


def by_logsumexp(self: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * WIDTH**-0.5
    return torch.exp(scores - torch.logsumexp(scores, dim=-1, keepdim=True)) @ v


def by_log_softmax(self: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.log_softmax(q @ k.mT * WIDTH**-0.5, dim=-1).exp() @ v


CORES = [
    by_name, by_operator, three_axes, ours, matmuls, in_float32, softmax_module, merged,
    merged_before_unpacking, sequence_first, added, einsums,
    einsums_of_another_order, values_first, one_key_head_each, softcapped,
    by_logsumexp, by_log_softmax,
]  # fmt: skip


def weights_of(call: Call) -> Tensor:
    """The softmax of a call, from whatever it holds."""
    if call.scores is not None:
        return call.scores.softmax(-1)
    scale = call.query.shape[-1] ** -0.5 if call.scale is None else call.scale
    return (call.query @ call.key.mT * scale).softmax(-1)


@pytest.mark.parametrize("core", CORES, ids=lambda core: core.__name__)
def test_every_way_to_write_it(core: Any) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"layer": nn.Sequential(nn.Identity(), Written(core))})
    x = torch.randn(BATCH, LENGTH, 6)
    layer = model["layer"]
    plain = layer(x)
    calls: list[Call] = []
    with Interceptor(model, calls.append):
        seen = layer(x)
    assert torch.equal(plain, seen)
    (call,) = calls
    assert call.site.name == "layer.1"
    assert (call.site.heads, call.site.cross) == (HEADS, False)
    q, k, v = layer[1].packed(x).view(BATCH, LENGTH, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
    for found, wanted in ((call.query, q), (call.key, k), (call.value, v), (call.output, plain)):
        if core in (merged, in_float32) and found is call.query:
            continue  # scaled before the product
        torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(weights_of(call) @ call.value, plain)

    def second_head_only(call: Call) -> Tensor:
        return call.output * torch.tensor([0.0, 1.0])[:, None, None]

    with Interceptor(model, second_head_only):
        edited = layer(x)
    torch.testing.assert_close(edited[:, 1], plain[:, 1])
    assert not edited[:, 0].any()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.softmax(-1) * x,
        lambda x: (x @ x.mT).softmax(-1).sum(),
        lambda x: torch.softmax(x, -1) @ torch.ones(6, 2),
        lambda x: torch.softmax(x, -1) @ x.mT,
        lambda x: (x @ x.mT).relu() @ x,
    ],
)
def test_what_is_no_attention(function: Any) -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    calls: list[Call] = []
    with Interceptor(Odd(), calls.append) as interceptor:
        interceptor.model(torch.randn(2, 3, 6))
    assert not calls


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_torch_multihead(need_weights: bool, batch_first: bool) -> None:
    layer = nn.MultiheadAttention(6, 3, batch_first=batch_first, kdim=5, vdim=5).eval()
    query, memory = torch.randn(2, 7, 6), torch.randn(2, 7, 5)
    if not batch_first:
        query, memory = query.transpose(0, 1), memory.transpose(0, 1)
    padding = torch.tensor([[False] * 7, [False] * 5 + [True] * 2])
    calls: list[Call] = []
    plain = layer(query, memory, memory, key_padding_mask=padding, need_weights=need_weights)
    with Interceptor(layer, calls.append):
        seen = layer(query, memory, memory, key_padding_mask=padding, need_weights=need_weights)
    assert torch.equal(plain[0], seen[0])
    assert (plain[1] is None) == (seen[1] is None)
    assert not need_weights or torch.equal(plain[1], seen[1])
    (call,) = calls
    assert call.query.shape == (2, 3, 7, 2)
    assert call.site.cross


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_torch_encoder_decoder_without_the_native_path() -> None:
    torch.manual_seed(1)
    model = nn.Transformer(6, 2, 2, 2, 11, batch_first=True).eval()
    source, target = torch.randn(2, 7, 6), torch.randn(2, 5, 6)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 4:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    calls: list[Call] = []
    with torch.no_grad():
        options = {"tgt_mask": causal, "src_key_padding_mask": padding, "memory_key_padding_mask": padding}
        plain = model(source, target, **options)
        with Interceptor(model, calls.append):
            seen = model(source, target, **options)
    torch.testing.assert_close(plain, seen, atol=1e-5, rtol=1e-5)
    assert [call.site.name for call in calls] == [
        *(f"encoder.layers.{i}.self_attn" for i in range(2)),
        *(f"decoder.layers.{i}.{name}" for i in range(2) for name in ("self_attn", "multihead_attn")),
    ]
    assert [call.site.cross for call in calls] == [False, False, False, True, False, True]


def test_our_module_is_one_call() -> None:
    model = nn.Sequential(MultiHeadAttention(6, 4, kv_heads=2, d_key=3, d_value=5, window=2))
    calls: list[Call] = []
    with Interceptor(model, calls.append):
        model(torch.randn(2, 5, 6))
    (call,) = calls
    assert (call.site.name, call.site.kv_heads, call.mask.window) == ("0", (0, 0, 1, 1), 2)


def test_keys_written_into_a_buffer_and_batches_of_one() -> None:
    """Keys stay of their own sequence in a preallocated cache; one set of queries may serve all."""

    class Buffered(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            q = x.view(3, 5, 2, 3).transpose(1, 2)
            cache = torch.zeros(3, 2, 9, 3)
            cache[:, :, :5] = q
            F.scaled_dot_product_attention(q, cache, cache)
            return F.scaled_dot_product_attention(torch.ones(1, 2, 4, 3), q, q)

    calls: list[Call] = []
    with Interceptor(Buffered(), calls.append) as interceptor:
        interceptor.model(torch.randn(3, 5, 6))
    assert [call.site.cross for call in calls] == [False, True]
    assert calls[1].query.shape == (3, 2, 4, 3)


@pytest.mark.parametrize("by_hand", [True, False])
def test_weights_used_on_two_sets_of_values_are_counted_once(by_hand: bool) -> None:
    class TwoValues(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = x.view(3, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
            if by_hand:
                weights = (q @ k.mT).softmax(-1)
                return torch.cat([weights @ v, weights @ v.flip(0)], -1)
            return torch.cat([F.scaled_dot_product_attention(q, k, x) for x in (v, v.flip(0))], -1)

    calls: list[Call] = []
    with Interceptor(TwoValues(), calls.append) as interceptor:
        for _ in range(2):
            interceptor.model(torch.randn(3, 5, 24))
    assert [(call.site.name, call.again) for call in calls] == [("", False), ("", True)] * 2


class Twice(nn.Module):
    """One module called twice in a forward, one whose attention comes in pieces of a packed batch."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.MultiheadAttention(6, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.shared(x, x, x, need_weights=False)[0]
        packed = x.flatten(0, 1).view(1, -1, 3, 2).transpose(1, 2)  # (1, heads, all tokens, width)
        pieces = packed.split([4, 6], dim=2)
        return torch.cat([F.scaled_dot_product_attention(p, p, p) for p in pieces], 2)


def test_sites_are_numbered_by_call_and_pieces_share_one() -> None:
    calls: list[Call] = []
    model = Twice()
    with Interceptor(model, calls.append) as interceptor:
        for _ in range(2):
            model(torch.randn(2, 5, 6))
    assert [call.site.name for call in calls] == ["shared", "shared#2", "", ""] * 2
    assert [site.layer for site in interceptor.sites.by_name.values()] == [0, 1, 0]


def everything_patched() -> tuple[Any, ...]:
    return (
        dict(hooks._global_forward_hooks), dict(hooks._global_forward_pre_hooks),
        F.scaled_dot_product_attention,
        checkpoint._checkpoint_without_reentrant_generator, checkpoint.CheckpointFunction,
        torch.overrides._get_current_function_mode_stack(),
    )  # fmt: skip


class Breaks(nn.Module):
    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.attention, self.error = nn.MultiheadAttention(6, 3), error

    def forward(self, x: Tensor) -> Tensor:
        self.attention(x, x, x)
        raise self.error("broken")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_is_left_behind_when_the_model_raises(error: type[BaseException]) -> None:
    before = everything_patched()
    model, calls = Breaks(error), []
    with Interceptor(model, calls.append):
        for _ in range(2):  # and the second time is like the first
            with pytest.raises(error, match="broken"):
                model(torch.randn(2, 5, 6))
    # the probe meets the error first; Ctrl-C ends that, too
    assert [call.site.name for call in calls] == ["attention", "attention"] * (error is not KeyboardInterrupt)
    assert everything_patched() == before


def test_only_this_model_is_seen() -> None:
    mine, other = Nano(), Nano()
    calls: list[Call] = []
    with Interceptor(mine, calls.append):
        other(torch.arange(5)[None])
        F.scaled_dot_product_attention(*torch.randn(3, 1, 2, 5, 7))
    assert not calls


def test_threads_see_their_own_runs() -> None:
    model = Nano()
    names: list[str] = []
    lock = threading.Lock()

    def see(call: Call) -> None:
        with lock:
            names.append(call.site.name)

    def work() -> None:
        for _ in range(5):
            model(torch.randint(0, 90, (2, 7)))

    before = everything_patched()
    with Interceptor(model, see):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(names) == ["h.0"] * 20 + ["h.1"] * 20
    assert everything_patched() == before


def test_overlapping_contexts_end_in_any_order() -> None:
    before = everything_patched()
    model, first, second = Nano(), [], []
    a, b = Interceptor(model, first.append, reruns=True), Interceptor(model, second.append, reruns=True)
    a.__enter__()
    b.__enter__()
    model(torch.zeros(1, 5, dtype=torch.long))
    a.__exit__(None, None, None)
    model(torch.zeros(1, 5, dtype=torch.long))
    b.__exit__(None, None, None)
    assert (len(first), len(second)) == (2, 4)
    assert everything_patched() == before


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_scripted_and_other_things_are_refused() -> None:
    scripted = torch.jit.trace(nn.Linear(2, 3), torch.ones(1, 2), check_trace=False)
    with pytest.raises(TypeError, match="traced or scripted"):
        Interceptor(scripted, lambda call: None)
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got str"):
        Interceptor("bert", lambda call: None)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["wrapped", "in place", "part"])
def test_compiled_models_run_uncompiled(way: str) -> None:
    torch.compiler.reset()
    model = Nano().eval()
    compiled: nn.Module = model
    counter: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        counter.append(1)
        return graph.forward

    if way == "wrapped":
        compiled = torch.compile(model, backend=backend)
    elif way == "in place":
        model.compile(backend=backend)
    else:
        model.h[1] = torch.compile(model.h[1], backend=backend)
    ids = torch.arange(5)[None]
    with torch.no_grad():
        compiled(ids)
        assert counter
        calls: list[Call] = []
        with Interceptor(compiled, calls.append):
            compiled(ids)
        assert [call.site.name for call in calls] == ["h.0", "h.1"]
        count = len(counter)
        compiled(ids)  # and is compiled again, from the cache, afterwards
        assert len(counter) == count


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_flex_attention_with_its_score_function() -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16), torch.randn(2, 2, 5, 16)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 5, 5, device="cpu")

    class Flex(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return torch.compile(flex_attention)(
                q,
                k,
                v,
                score_mod=lambda s, b, h, i, j: s - (i - j) * (h + 1),
                block_mask=mask,
                enable_gqa=True,
            )

    calls: list[Call] = []
    model = Flex()
    with torch.no_grad(), Interceptor(model, calls.append):
        out = model(q)
    (call,) = calls
    i, j, h = torch.arange(5)[:, None], torch.arange(5), torch.arange(4)[:, None, None]
    scores = q @ k.repeat_interleave(2, 1).mT / 4 - (i - j) * (h + 1)
    weights = scores.masked_fill(i < j, -torch.inf).softmax(-1)
    torch.testing.assert_close(call.scores.softmax(-1), weights)
    torch.testing.assert_close(out, weights @ v.repeat_interleave(2, 1))
    assert call.site.kv_heads == (0, 0, 1, 1)
