"""Opaque kernels give the numbers that torch's own attention gives, or are named in `missed`."""

from __future__ import annotations

import sys
import types
import warnings
from itertools import pairwise

import pytest
import torch
import transformers
from tests.helpers import opaque_kernels as opaque
from tests.helpers.models import bert_config, gpt2_config, llama_config
from tests.helpers.opaque_kernels import OPAQUE, TRAINABLE, register_backend, use
from torch import nn

import manyheads as mh
from manyheads.capture import kernels

COLUMNS = ("tokens", "entropy", "confidence", "distance", "self", "first", "output_norm", "largest_logit")
SMALL = {"vocab_size": 97, "num_hidden_layers": 2, "max_position_embeddings": 131}
LLAMA = SMALL | {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
LLAMA |= {"intermediate_size": 28, "pad_token_id": 0}


def build(kind: str, **changes):
    torch.manual_seed(3)
    name = {"llama": "Llama", "mistral": "Mistral", "gemma": "Gemma2", "gpt_oss": "GptOss"}.get(kind)
    if name:
        config = getattr(transformers, f"{name}Config")(**LLAMA | changes)
        return getattr(transformers, f"{name}Model")(config).eval()
    if kind == "bert":
        config = bert_config(
            vocab_size=97, hidden_size=21, num_attention_heads=3, num_hidden_layers=2, intermediate_size=19
        )
        return transformers.BertModel(config).eval()
    config = gpt2_config(vocab_size=97, n_embd=21, n_head=3, n_layer=2, n_positions=131)
    return transformers.GPT2Model(config).eval()


def batch(left: bool = False):
    torch.manual_seed(5)
    ids = torch.randint(5, 97, (3, 19))
    real = torch.ones_like(ids)
    real[1, : 7 if left else None] = 0 if left else 1
    if not left:
        real[1, 12:] = 0
    return {"input_ids": ids, "attention_mask": real}


def watched(model, inputs, name: str):
    """The plain output, the watched one, and what was seen."""
    use(model, name)
    with torch.no_grad():
        plain = model(**inputs)
        with mh.watch(model, statistics="full") as seen:
            output = model(**inputs)
    return plain.last_hidden_state, output.last_hidden_state, seen


def same_tables(one: mh.HeadTable, two: mh.HeadTable, columns: tuple[str, ...] = COLUMNS) -> None:
    assert list(one["site"]) == list(two["site"])
    for column in columns:
        torch.testing.assert_close(one[column], two[column], rtol=1e-5, atol=1e-5, msg=column)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("kind", ["llama", "bert", "gpt2"])
def test_an_opaque_backend_gives_the_table_of_sdpa(kind: str, left: bool) -> None:
    model, inputs = build(kind), batch(left)
    _, _, wanted = watched(model, inputs, "sdpa")
    plain, output, seen = watched(model, inputs, OPAQUE)
    assert torch.equal(plain, output)
    assert seen.missed == {}
    assert all(site.verified for site in seen.sites)
    assert [site.kind for site in seen.sites] == [site.kind for site in wanted.sites]
    same_tables(seen.table, wanted.table)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_padding_as_flash_attention_takes_it(kind: str, left: bool, monkeypatch) -> None:
    opaque.flash_backend(monkeypatch)
    model, inputs = build(kind), batch(left)
    _, _, wanted = watched(model, inputs, "sdpa")
    plain, output, seen = watched(model, inputs, "flash_attention_2")
    assert torch.equal(plain, output)
    assert seen.missed == {}
    same_tables(seen.table, wanted.table)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("mistral", {"sliding_window": 5}),
        ("gemma", {"attn_logit_softcapping": 0.7, "sliding_window": 7, "query_pre_attn_scalar": 6}),
        ("gpt_oss", {"sliding_window": 5, "num_local_experts": 3, "num_experts_per_tok": 2}),
    ],
)
def test_windows_caps_and_sinks(kind: str, changes: dict[str, object], monkeypatch) -> None:
    opaque.flash_backend(monkeypatch)
    model, inputs = build(kind, **changes), batch()
    for module in model.modules():  # sinks and caps that matter
        if getattr(module, "sinks", None) is not None:
            nn.init.uniform_(module.sinks, -1, 2)
    _, _, wanted = watched(model, inputs, "eager")
    _, _, seen = watched(model, inputs, "flash_attention_2")
    assert seen.missed == {}
    # GPT-OSS, written by hand, subtracts the largest score from all before its softmax
    same_tables(seen.table, wanted.table, COLUMNS[: -1 if kind == "gpt_oss" else None])


@pytest.mark.parametrize("by", ["position_ids", "cu_seq_lens"])
def test_packed_sequences_are_read_as_sequences(by: str, monkeypatch) -> None:
    opaque.flash_backend(monkeypatch)
    model = build("llama")
    torch.manual_seed(7)
    pieces = [torch.randint(5, 97, (1, length)) for length in (11, 17, 5)]
    use(model, "sdpa")
    with torch.no_grad(), mh.watch(model, statistics="full") as wanted:
        apart = [model(input_ids=ids).last_hidden_state for ids in pieces]
    positions = torch.cat([torch.arange(ids.shape[1]) for ids in pieces])[None]
    inputs = {"input_ids": torch.cat(pieces, 1), "position_ids": positions}
    if by == "cu_seq_lens":
        starts = torch.tensor([0, 11, 28, 33], dtype=torch.int32)
        inputs |= {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 17, "max_length_k": 17}
    _, output, seen = watched(model, inputs, "flash_attention_2")
    torch.testing.assert_close(output, torch.cat(apart, 1), rtol=1e-4, atol=1e-5)
    same_tables(seen.table, wanted.table)
    with mh.silence(model, {1: [2]}, unverified="allow"), torch.no_grad():
        silenced = model(**inputs).last_hidden_state
    use(model, "sdpa")
    with mh.silence(model, {1: [2]}), torch.no_grad():
        expected = torch.cat([model(input_ids=ids).last_hidden_state for ids in pieces], 1)
    torch.testing.assert_close(silenced, expected, rtol=1e-4, atol=1e-5)


def test_silence_and_gradients_go_through_a_backend() -> None:
    model, inputs = build("llama"), batch()
    results = {}
    for name in ("sdpa", TRAINABLE):
        use(model, name)
        with mh.gates(model) as gates:
            model(**inputs).last_hidden_state[inputs["attention_mask"].bool()].square().sum().backward()
        with mh.silence(model, {0: [1]}), torch.no_grad():
            silenced = model(**inputs).last_hidden_state[inputs["attention_mask"].bool()]
        ranking = mh.importance(model, [inputs], method="fisher")["importance"]
        results[name] = [gate.grad for gate in gates.values()], silenced, ranking
    torch.testing.assert_close(results[TRAINABLE], results["sdpa"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_cut_goes_through_a_kernel_without_a_gradient(kind: str) -> None:
    model, inputs = use(build(kind), OPAQUE), batch()
    heads = {1: [2, 3]} if kind == "llama" else {1: [2], 0: [0]}
    with mh.silence(model, heads), torch.no_grad():
        expected = model(**inputs).last_hidden_state
    small = mh.cut(model, heads)
    with torch.no_grad():
        output = small(**inputs).last_hidden_state
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())


def test_a_backend_whose_parts_are_seen_is_counted_once() -> None:
    def around_sdpa(module, query, key, value, attention_mask, scaling=None, **others):
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        causal = attention_mask is None and query.shape[2] > 1
        out = nn.functional.scaled_dot_product_attention(
            query, key, value, attention_mask, scale=scaling, is_causal=causal
        )
        return out.transpose(1, 2), None

    model, inputs = build("llama"), batch()
    _, _, wanted = watched(model, inputs, "sdpa")
    _, _, seen = watched(model, inputs, register_backend("manyheads_tests_around_sdpa", around_sdpa))
    assert seen.missed == {}
    same_tables(seen.table, wanted.table)


def test_a_backend_that_computes_something_else_is_refuted() -> None:
    def wrong(module, query, key, value, attention_mask, scaling=None, **others):
        return opaque.backend(module, query, key, value, attention_mask, scaling * 1.7)

    model, inputs = build("llama"), batch()
    _, _, seen = watched(model, inputs, register_backend("manyheads_tests_wrong", wrong))
    assert set(seen.missed) == {"layers.0.self_attn", "layers.1.self_attn"}
    with pytest.raises(ValueError, match="no attention was seen"):
        _ = seen.table
    with pytest.raises(ValueError, match="could not be proved"), mh.silence(model, {0: [1]}):
        model(**inputs)


def test_what_a_kernel_does_only_at_length_is_seen_at_length() -> None:
    """The probe is short: the rows of a real call tell."""

    def windowed(module, query, key, value, attention_mask, scaling=None, **others):
        out = opaque.opaque(
            query, key, value, None, True, 20 if query.shape[2] > 40 else -1, -1, scaling, 0.0, None
        )
        return out.transpose(1, 2), None

    model = build("llama")
    name = register_backend("manyheads_tests_windowed", windowed)
    _, _, seen = watched(model, {"input_ids": torch.randint(5, 97, (2, 19))}, name)
    assert seen.missed == {}
    _, _, seen = watched(model, {"input_ids": torch.randint(5, 97, (2, 59))}, name)
    assert "its kernel does not give" in seen.missed["layers.0.self_attn"]


def test_a_paged_cache_is_named_in_missed() -> None:
    def paged(module, query, key, value, attention_mask, **others):
        return opaque.backend(module, query, key, value, attention_mask, others.get("scaling"))

    model = build("llama")
    name = register_backend("manyheads_tests_paged", paged)
    forward = type(model.layers[0].self_attn).forward
    for layer in model.layers:
        layer.self_attn.forward = lambda *a, _m=layer.self_attn, **k: forward(_m, *a, block_table=1, **k)
    _, _, seen = watched(model, {"input_ids": torch.randint(5, 97, (2, 19))}, name)
    assert "paged cache" in seen.missed["layers.1.self_attn"]


class Block(nn.Module):
    """A model that calls a function of ours by a name of its own."""

    def __init__(self, function, packed: bool = False, **options) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.qkv, self.out = nn.Linear(15, 45), nn.Linear(15, 15)
        self.function, self.packed, self.options = function, packed, options

    def forward(self, x, starts=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 5)).unbind(-3)  # (..., length, heads, width)
        out = self.function(q, k, v, **self.options) if starts is None else self.function(q, k, v, starts)
        out = out[0] if isinstance(out, tuple) else out
        return x + self.out(out.flatten(-2))


def textbook(q, k, v, causal=False):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def tables_of(function, x, **options):
    model = Block(function, **options)
    with torch.no_grad():
        plain = model(x)
        with mh.watch(model, statistics="full") as seen:
            output = model(x)
    assert torch.equal(plain, output)
    return seen


@pytest.fixture
def _forget():
    """Readers that a test registers are gone afterwards."""
    before = dict(kernels._readers)
    yield
    kernels._readers.clear()
    kernels._readers.update(before)


@pytest.mark.usefixtures("_forget")
def test_a_registered_function_is_seen_under_every_name() -> None:
    scale = 5**-0.5

    def kernel(q, k, v, causal=False):  # with a cell, as decorated functions have
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return opaque.opaque(q, k, v, None, causal, -1, -1, scale, 0.0, None).transpose(1, 2)

    def read(q, k, v, causal):
        return mh.AttentionArguments(
            query=q, key=k, value=v, layout="batch length heads width", causal=causal
        )

    x = torch.randn(3, 13, 15)
    code = kernel.__code__
    seen = tables_of(kernel, x, causal=True)
    assert "mixes tokens" in seen.missed[""]
    mh.register_attention(kernel, read)
    alias = kernel
    seen = tables_of(alias, x, causal=True)
    assert seen.missed == {}
    same_tables(seen.table, tables_of(textbook, x, causal=True).table)
    assert kernel.__code__ is code


@pytest.mark.usefixtures("_forget")
def test_a_registered_operator_is_seen() -> None:
    def read(q, k, v, causal, scale, **others):
        return mh.AttentionArguments(query=q, key=k, value=v, causal=causal, scale=scale)

    def around(q, k, v, causal=False):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.ops.manyheads_tests.opaque(
            q, k, v, None, causal, -1, -1, 5**-0.5, 0.0, None
        ).mT.mT.transpose(1, 2)

    x = torch.randn(3, 13, 15)
    assert "mixes tokens" in tables_of(around, x, causal=True).missed[""]
    mh.register_attention(opaque.opaque, read)
    seen = tables_of(around, x, causal=True)
    assert seen.missed == {}
    same_tables(seen.table, tables_of(textbook, x, causal=True).table)


@pytest.mark.usefixtures("_forget")
def test_a_wrong_reader_and_a_broken_one_are_named() -> None:
    def kernel(q, k, v, causal=False):
        return opaque.flash_attn_func(q, k, v, causal=causal)

    def wrong(q, k, v, causal):
        return mh.AttentionArguments(query=q, key=k, value=v, layout="batch length heads width", scale=2.0)

    def broken(q, k, v, causal):
        raise KeyError("scale")

    x = torch.randn(3, 13, 15)
    mh.register_attention(kernel, wrong)
    seen = tables_of(kernel, x)
    assert "does not give what its arguments were taken for" in seen.missed[""]
    mh.register_attention(kernel, broken)
    assert "kernel cannot be read: KeyError: 'scale'" in tables_of(kernel, x).missed[""]
    mh.register_attention(kernel, lambda q, k, v, causal: (q, k, v))
    assert "its reader returned tuple" in tables_of(kernel, x).missed[""]


def test_arguments_are_checked() -> None:
    q = torch.randn(2, 3, 5, 7)
    with pytest.raises(ValueError, match="layout: got 'bhld'; expected one of"):
        mh.AttentionArguments(query=q, key=q, value=q, layout="bhld")
    with pytest.raises(ValueError, match="expected the axes 'tokens heads width'"):
        mh.AttentionArguments(query=q, key=q, value=q, layout="tokens heads width")
    with pytest.raises(ValueError, match="starts: packed sequences need it"):
        mh.AttentionArguments(query=q[0], key=q[0], value=q[0], layout="tokens heads width")
    with pytest.raises(TypeError, match="query: expected a tensor, got NoneType"):
        mh.AttentionArguments(query=None, key=q, value=q)
    with pytest.raises(TypeError, match="expected a Python function or an operator of torch, got type"):
        mh.register_attention(nn.Linear, lambda: None)
    with pytest.raises(TypeError, match="reader: expected a function, got int"):
        mh.register_attention(textbook, 3)


@pytest.mark.usefixtures("_forget")
def test_flash_attention_needs_no_registration(monkeypatch) -> None:
    with opaque.flash_package(monkeypatch) as package:
        x = torch.randn(3, 13, 15)
        seen = tables_of(package.flash_attn_func, x, causal=True)
        assert seen.missed == {}
        same_tables(seen.table, tables_of(textbook, x, causal=True).table)
        seen = tables_of(package.flash_attn_func, x, causal=True, window_size=(3, 0))
        banded = tables_of(lambda q, k, v: mh.attention(*(y.transpose(1, 2) for y in (q, k, v)), causal=True, window=4).transpose(1, 2), x)  # fmt: skip # noqa: E501
        same_tables(seen.table, banded.table)


def packed_tables(function):
    """The table of packed sequences of 7, 13 and 1 tokens, and that of the same one by one."""
    model, x, starts = Block(function), torch.randn(21, 15), torch.tensor([0, 7, 20, 21])
    with torch.no_grad(), mh.watch(model, statistics="full") as seen:
        model(x, starts)
    apart = Block(textbook, causal=True)
    with torch.no_grad(), mh.watch(apart, statistics="full") as wanted:
        for first, last in pairwise(starts):
            apart(x[None, first:last])
    return seen, wanted


@pytest.mark.usefixtures("_forget")
def test_packed_flash_attention(monkeypatch) -> None:
    with opaque.flash_package(monkeypatch) as package:
        seen, wanted = packed_tables(
            lambda q, k, v, starts: package.flash_attn_varlen_func(
                q, k, v, starts, starts, 13, 13, causal=True
            )
        )
    same_tables(seen.table, wanted.table)


@pytest.mark.usefixtures("_forget")
def test_packed_attention_of_torch() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")

    @varlen._varlen_attn.register_kernel("cpu")
    def _(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        is_causal=False,
        scale=None,
        window_size=None,
        **_,
    ):
        window = window_size or (-1, -1)
        out = opaque.flash_attn_varlen_func(
            query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, 0.0, scale, is_causal, window
        )
        return (
            out.contiguous(),
            query.new_zeros(query.shape[1], len(query)),
            torch.zeros(2, dtype=torch.uint64),
        )

    seen, wanted = packed_tables(
        lambda q, k, v, starts: varlen.varlen_attn(q, k, v, starts, starts, 13, 13, window_size=(-1, 0))
    )
    same_tables(seen.table, wanted.table)


@pytest.mark.usefixtures("_forget")
def test_xformers_needs_no_registration(monkeypatch) -> None:
    class LowerTriangularMask:
        pass

    class SomeOtherMask:
        pass

    def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None):
        tensor = attn_bias if isinstance(attn_bias, torch.Tensor) else None
        causal = isinstance(attn_bias, LowerTriangularMask)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return opaque.opaque(q, k, v, tensor, causal, -1, -1, 5**-0.5, 0.0, None).transpose(1, 2)

    package = types.ModuleType("xformers.ops")
    package.memory_efficient_attention = memory_efficient_attention
    monkeypatch.setitem(sys.modules, "xformers.ops", package)
    x = torch.randn(3, 13, 15)
    seen = tables_of(memory_efficient_attention, x, attn_bias=LowerTriangularMask())
    assert seen.missed == {}
    same_tables(seen.table, tables_of(textbook, x, causal=True).table)
    seen = tables_of(memory_efficient_attention, x, attn_bias=torch.full((13, 13), -torch.inf).triu(1))
    same_tables(seen.table, tables_of(textbook, x, causal=True).table)
    assert "SomeOtherMask" in tables_of(memory_efficient_attention, x, attn_bias=SomeOtherMask()).missed[""]


def test_plugins_are_loaded_once_and_broken_ones_are_named(monkeypatch) -> None:
    from manyheads.common import plugins

    class Point:
        def __init__(self, name: str, load) -> None:
            self.name, self.value, self.load = name, f"package:{name}", load

    def fail():
        raise ImportError("no module named other")

    calls = []
    points = [Point("good", lambda: lambda: calls.append(1)), Point("bad", fail)]
    plugins.load.cache_clear()
    monkeypatch.setattr(plugins, "entry_points", lambda group: points if group.endswith("attention") else [])
    try:
        with pytest.warns(
            UserWarning, match=r"the plugin bad \(package:bad\) of manyheads.attention was left"
        ):
            kernels.install()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kernels.install()
        assert calls == [1]
    finally:
        kernels.uninstall()
        plugins.load.cache_clear()


def test_nothing_is_left_behind() -> None:
    interface = transformers.modeling_utils.AttentionInterface
    with mh.watch(build("bert")):
        assert "__getitem__" in vars(interface)
        assert transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS[OPAQUE] is not opaque.backend
    assert "__getitem__" not in vars(interface)
    assert transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS[OPAQUE] is opaque.backend


def test_generation_with_a_cache(monkeypatch) -> None:
    opaque.flash_backend(monkeypatch)
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(llama_config(**LLAMA)).eval()
    tables = []
    for name in ("sdpa", OPAQUE, "flash_attention_2"):
        use(model, name)
        with torch.no_grad(), mh.watch(model, statistics="full") as seen:
            model.generate(**batch(left=True), max_new_tokens=4, do_sample=False)
        assert seen.missed == {}
        tables.append(seen.table)
    for table in tables[1:]:
        same_tables(table, tables[0])


def test_plugins_add_methods_roles_and_tasks(monkeypatch) -> None:
    from manyheads.common import plugins
    from manyheads.heads.importance import METHODS

    def constant(request):
        return METHODS["random"](request)

    monkeypatch.setattr(plugins, "load", lambda group: {"constant": constant} if "import" in group else {})
    monkeypatch.setattr(plugins, "plugin_paths", lambda group: {"chess": "nowhere.chess:Chess"})
    try:
        assert len(mh.importance(build("bert"), [batch()], method="constant")) == 6
    finally:
        METHODS.pop("constant", None)
    assert "chess" in mh.tasks.available()
    with pytest.raises(ValueError, match=r"task: the plugin chess \(nowhere.chess:Chess\) cannot be loaded"):
        mh.tasks.find("chess")


@pytest.mark.parametrize("drops", ["window", "sinks", "padding", "packing"])
def test_what_a_kernel_drops_is_not_reported_as_if_it_had_been_used(drops: str) -> None:
    """A backend that leaves out something it is given: the site is named, and has no numbers."""

    def careless(module, query, key, value, attention_mask, scaling=None, **others):
        mask = attention_mask if drops == "sinks" else None
        sinks = None if drops == "sinks" else others.get("s_aux")
        out = opaque.opaque(query, key, value, mask, mask is None, -1, -1, scaling, 0.0, sinks)
        return out.transpose(1, 2).contiguous(), None

    kind, changes = "llama", {}
    inputs = {"input_ids": torch.randint(5, 97, (2, 23), generator=torch.Generator().manual_seed(2))}
    if drops == "window":
        kind, changes = "mistral", {"sliding_window": 5}
    elif drops == "sinks":
        kind, changes = "gpt_oss", {"num_local_experts": 3, "num_experts_per_tok": 2}
    elif drops == "padding":
        inputs["attention_mask"] = torch.arange(23) >= torch.tensor([[0], [9]])
    else:
        positions = torch.cat([torch.arange(11), torch.arange(12)])[None]
        inputs = {"input_ids": inputs["input_ids"][:1], "position_ids": positions}
    model = build(kind, **changes)
    for module in model.modules():
        if getattr(module, "sinks", None) is not None:
            nn.init.uniform_(module.sinks, -1, 2)
    _, _, seen = watched(model, inputs, register_backend(f"manyheads_tests_drops_{drops}", careless))
    assert {"layers.0.self_attn", "layers.1.self_attn"} <= set(seen.missed), seen.missed
    with pytest.raises(ValueError, match="no attention was seen"):
        _ = seen.table
