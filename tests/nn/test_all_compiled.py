"""Under torch.compile without a graph break, torch.export with a free length, and ONNX: the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from manyheads.nn import mask
from manyheads.nn.attention import attention
from manyheads.nn.cache import KVCache
from manyheads.nn.multihead import MultiHeadAttention
from manyheads.nn.positions import Rotary


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    torch.manual_seed(5)
    yield
    torch.compiler.reset()


def tokens(length=13, width=32, batch=2):
    return torch.randn(batch, length, width)


MODULES = {
    "plain": {},
    "grouped, wide values": {"kv_heads": 2, "d_key": 6, "d_value": 11},
    "normalised, rotary": {"qk_norm": True, "rotary": Rotary(8)},
    "window": {"window": 4},
    "chunk": {"chunk": 5},
    "tiled": {"kernel": "tiled"},
    "reference": {"kernel": "reference"},
}
CALLS = {
    "all": {},
    "causal": {"causal": True},
    "padding": {"mask": mask.padding(torch.tensor([13, 6]))},
    "padding everywhere": {"mask": mask.padding(torch.tensor([13, 6]), queries=torch.tensor([13, 6]))},
    "boolean": {"mask": torch.ones(13, 13, dtype=torch.bool).tril(2)},
    "alibi": {"mask": mask.alibi(4), "causal": True},
}
PAIRS = [(m, "causal") for m in MODULES] + [("plain", c) for c in CALLS if c != "causal"]


def train(run, module, x, **options):
    """The output, and the gradients of the input and of every parameter."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    out = run(x, **options)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


def same(found, expected, tolerance=1e-5):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("module", "call"), PAIRS)
def test_compile(module, call):
    mha, x = MultiHeadAttention(32, 4, **MODULES[module]), tokens()
    compiled = torch.compile(mha, backend="aot_eager", fullgraph=True)
    same(train(compiled, mha, x, **CALLS[call]), train(mha, mha, x, **CALLS[call]), tolerance=1e-4)


# torch's own code, and its own warning about it
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_compile_with_inductor():
    mha, x = MultiHeadAttention(32, 4, kv_heads=2, qk_norm=True).eval(), tokens()
    compiled = torch.compile(mha, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, causal=True), mha(x, causal=True), rtol=1e-4, atol=1e-4)


def test_compile_with_dropout_draws_the_same():
    mha, x = MultiHeadAttention(32, 4, dropout=0.3), tokens()
    compiled = torch.compile(mha, backend="aot_eager", fullgraph=True)
    results = []
    for run in (compiled, mha, mha):
        torch.manual_seed(3)
        results.append(train(run, mha, x, causal=True))
    same(results[1], results[2], tolerance=0)
    same(results[0], results[1], tolerance=1e-4)
    assert not torch.allclose(compiled(x), compiled(x))


def test_compile_with_a_learned_bias():
    q, k, v = (torch.randn(2, 4, 13, 8) for _ in range(3))
    bias = torch.randn(4, 13, 13, requires_grad=True)
    grads = []
    for run in (attention, torch.compile(attention, backend="aot_eager", fullgraph=True)):
        grads.append(torch.autograd.grad(run(q, k, v, mask=bias, causal=True).square().sum(), bias)[0])
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-5, atol=1e-5)


def test_compile_with_other_lengths():
    mha = MultiHeadAttention(32, 4, window=6, kv_heads=2).eval()
    compiled = torch.compile(mha, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for length in (13, 17, 101):
            x = tokens(length)
            torch.testing.assert_close(compiled(x, causal=True), mha(x, causal=True), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own, where statistics interrupt the graph
def test_compile_with_weights_and_statistics():
    mha, x = MultiHeadAttention(32, 4).eval(), tokens()
    compiled = torch.compile(mha, backend="aot_eager")
    out, weights, seen = compiled(x, causal=True, return_weights=True, return_statistics="full")
    expected, expected_weights, expected_seen = mha(
        x, causal=True, return_weights=True, return_statistics="full"
    )
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-5)
    for name in seen:
        torch.testing.assert_close(seen[name], expected_seen[name], rtol=1e-5, atol=1e-4)


def test_compile_with_a_cache():
    mha, x, cache = MultiHeadAttention(32, 4, kv_heads=2, rotary=Rotary(8)).eval(), tokens(), KVCache(13)
    compiled = torch.compile(mha, backend="aot_eager")
    with torch.no_grad():
        steps = [compiled(piece, causal=True, cache=cache) for piece in x.split([9, 1, 1, 1, 1], dim=1)]
        torch.testing.assert_close(torch.cat(steps, dim=1), mha(x, causal=True), rtol=1e-5, atol=1e-5)


class Caller(nn.Module):
    """A model around attention: exporters take tensors, the options stay in the module."""

    def __init__(self, padded=False, **options):
        super().__init__()
        self.mha = MultiHeadAttention(32, 4, **options)
        self.padded = padded

    def forward(self, x, lengths):
        return self.mha(x, mask=mask.padding(lengths) if self.padded else None, causal=True)


EXPORTED = {
    "plain": {},
    "padded": {"padded": True},
    "grouped, rotary, normalised": {"kv_heads": 2, "rotary": Rotary(8), "qk_norm": True},
    "window, wide values": {"window": 4, "d_value": 11},
}


@pytest.mark.parametrize("case", EXPORTED)
def test_export_with_a_free_length(case):
    model = Caller(**EXPORTED[case]).eval()
    free = {"x": {1: torch.export.Dim("length", min=2, max=4096)}, "lengths": None}
    program = torch.export.export(model, (tokens(), torch.tensor([13, 6])), dynamic_shapes=free)
    for length in (13, 29, 70):
        given = tokens(length), torch.tensor([length, 6])
        torch.testing.assert_close(program.module()(*given), model(*given), rtol=1e-5, atol=1e-5)


# the exporter's own code, and torch's warning about it
@pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning")
@pytest.mark.parametrize("case", ["padded", "grouped, rotary, normalised"])
def test_onnx(case, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, path = Caller(**EXPORTED[case]).eval(), tmp_path / "model.onnx"
    free = {"x": {1: torch.export.Dim("length", min=2, max=4096)}, "lengths": None}
    given = tokens(), torch.tensor([13, 6])
    torch.onnx.export(model, given, path, dynamo=True, dynamic_shapes=free, verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]
    for length in (13, 29):
        tensors = {"x": tokens(length), "lengths": torch.tensor([length, 6])}
        found = session.run(None, {name: tensors[name].numpy() for name in names})[0]
        expected = model(tensors["x"], tensors["lengths"]).detach()
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-4, atol=1e-5)
