"""The reference of `bench.coverage_check`: attention weights as the model itself makes them.

Shares no code with manyheads. The model runs in eager mode, with the textbook formula in place of torch's
fused kernel; every softmax it takes and every weight its modules return is written down, with the scores that
went in and the outputs that came of them.
"""

import contextlib
import inspect
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

HIDING = -3e4  # where no score is above this, all keys are hidden
SHOWN = -5e3  # a score below this is somebody's way of hiding a key
SOFTMAXES = {F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax}
MATMULS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}
MAPS = {F.linear, F.conv1d, F.conv2d, F.conv3d}


@dataclass(eq=False)
class Weights:
    """Attention weights that the model itself made: (..., queries, keys), and the module that was running.

    how: "returned" by a module, "softmax", "sdpa" (the textbook formula), "multi_head" (torch's module).
    keys, logit: (..., queries) how many keys each query may see, and its largest score, where known.
    output: (..., queries, d_value), what the weights made of the values, where it was seen.
    mapped: the scores are a linear map of one sequence: there were no queries and keys.
    """

    path: str
    kind: str
    value: Tensor
    how: str
    keys: Tensor | None = None
    logit: Tensor | None = None
    output: Tensor | None = None
    mapped: bool = False
    claimed: bool = False


class Spy(TorchFunctionMode):
    """Writes down each softmax, and computes torch's fused attention by the textbook."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.stack: list[tuple[str, str]] = []
        self.seen: list[Weights] = []
        self.returned: list[Weights] = []
        self._maps: deque[Any] = deque(maxlen=16)  # where the last results of linear maps are

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            out, weights, scores = textbook(*args, **kwargs)
            self._note(weights, scores, "sdpa", out)
            return out
        if func is F.multi_head_attention_forward:
            return self._multi_head(inspect.signature(func).bind(*args, **kwargs))
        out = func(*args, **kwargs)
        if func in SOFTMAXES and out.dim() >= 3:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
            scores = args[0] if args else kwargs["input"]
            place = scores.untyped_storage().data_ptr()
            mapped = any(storage.data_ptr() == place for storage in self._maps)
            self._note(out.movedim(dim, -1), scores.movedim(dim, -1), "softmax", mapped=mapped)
        elif func in MAPS:
            self._maps.append(out.untyped_storage())
        elif func in MATMULS and len(args) == 2:
            self._applied(args[0], lambda: out)
        elif func is torch.einsum:
            factors = args[1] if isinstance(args[1], list | tuple) else args[1:]
            for mine, factor in enumerate(factors if len(factors) == 2 else ()):
                self._applied(factor, lambda mine=mine: _in_order(args[0], factors, mine))
        return out

    def _multi_head(self, call: inspect.BoundArguments) -> tuple[Tensor, Tensor | None]:
        """torch's own module, asked for the weights of each head whatever the caller wanted."""
        call.apply_defaults()
        wanted, averaged = call.arguments["need_weights"], call.arguments["average_attn_weights"]
        call.arguments.update(need_weights=True, average_attn_weights=False)
        products: list[Tensor] = []

        def noting(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def run(*args: Any, **kwargs: Any) -> Tensor:
                products.append(function(*args, **kwargs))
                return products[-1]

            return run

        with (
            mock.patch.object(torch, "bmm", noting(torch.bmm)),
            mock.patch.object(torch, "baddbmm", noting(torch.baddbmm)),
        ):
            out, weights = F.multi_head_attention_forward(*call.args, **call.kwargs)
        lead = weights.shape[:-1]
        scores, output = (products[0], products[-1]) if len(products) == 2 else (weights, None)
        output = None if output is None else output.reshape(*lead, -1)
        self._note(weights, scores.reshape(weights.shape), "multi_head", output)
        return out, (weights.mean(-3) if averaged else weights) if wanted else None

    def _note(
        self, weights: Tensor, scores: Tensor, how: str, output: Tensor | None = None, mapped: bool = False
    ) -> None:
        if weights.shape[-1] > 1 or weights.dim() > 3:
            scores = scores.detach().expand(weights.shape)
            nothing = scores.amax(-1, keepdim=True) < HIDING  # a row of biases that hide every key is uniform
            keys, logit = (scores > SHOWN).sum(-1), scores.amax(-1)
            weights = weights.detach().masked_fill(nothing, 0.0)
            path, kind = self.stack[-1] if self.stack else ("", "")
            found = Weights(path, kind, weights, how, keys, logit, output, mapped)
            sums = scores.float().logsumexp(-1)
            if bool((sums[sums.isfinite()].abs() < 1e-5).all()):
                found.logit = None  # logarithms of weights, not scores
            self.seen.append(found)

    def _applied(self, factor: Any, output: Callable[[], Tensor | None]) -> None:
        """Weights seen a moment ago have multiplied something: perhaps the values."""
        for weights in reversed(self.seen[-3:]):
            if weights.output is None and isinstance(factor, Tensor) and _but_a_sink(weights.value, factor):
                out = output()
                if out is not None:
                    weights.output = out.detach().reshape(*weights.value.shape[:-1], -1).clone()
                return

    @contextlib.contextmanager
    def watching(self) -> Iterator["Spy"]:
        """Follow which module runs."""
        handles = []
        for path, module in self.model.named_modules():
            name = (path, type(module).__name__)
            handles.append(module.register_forward_pre_hook(self._enter(name)))
            handles.append(module.register_forward_hook(self._leave(name), always_call=True))
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with self:
                yield self
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            for handle in handles:
                handle.remove()

    def _enter(self, name: tuple[str, str]) -> Callable[..., None]:
        return lambda *_: self.stack.append(name)

    def _leave(self, name: tuple[str, str]) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            while self.stack and self.stack.pop() != name:
                pass
            if type(module).__module__.startswith("torch.nn.") and not isinstance(
                module, nn.MultiheadAttention
            ):
                return
            with torch._C.DisableTorchFunction():
                for tensor in tensors(output):
                    if not any(tensor is other.value for other in self.returned) and _look_like_weights(
                        tensor
                    ):
                        self.returned.append(Weights(*name, tensor.detach(), "returned"))

        return leave


def textbook(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """softmax(scale q k' + mask) v, the weights and the scores, as torch documents its fused kernel."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = scores.float().softmax(-1).nan_to_num(0.0).to(value.dtype)
    return weights @ value, weights, scores


def _in_order(equation: str, factors: Sequence[Tensor], mine: int) -> Tensor | None:
    """The einsum once more, its result in the order (axes of the weights but the keys, width)."""
    left, _, right = equation.replace(" ", "").partition("->")
    words = left.split(",")
    if len(words) != 2 or not right or words[mine][-1] in right:
        return None
    kept = words[mine][:-1]
    width = "".join(c for c in right if c not in kept and c != ".")
    return torch.einsum(f"{left}->{kept}{width}", *factors)


def _look_like_weights(tensor: Tensor) -> bool:
    if tensor.dim() != 4 or not tensor.is_floating_point() or min(tensor.shape) == 0:
        return False
    sums = tensor.detach().float().sum(-1)
    return bool((tensor >= 0).all() and (sums < 1.001).all() and sums.mean() > 0.05)


def tensors(output: Any) -> Iterator[Tensor]:
    """Every tensor in what a module returned."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from tensors(value)


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether these are the same weights, however folded; rows of nothing aside."""
    if not b.is_floating_point() or a.shape[-1] != b.shape[-1] or a.numel() != b.numel():
        return False
    a, b = a.reshape(-1, a.shape[-1]).float(), b.reshape(-1, b.shape[-1]).float()
    both = (a.sum(-1) > 0) & (b.sum(-1) > 0)
    return torch.allclose(a[both], b[both], atol=1e-6)


def _but_a_sink(weights: Tensor, factor: Tensor) -> bool:
    """Whether the factor is these weights, perhaps without a first or last column."""
    keys = factor.shape[-1] if factor.dim() else 0
    if weights.shape[-1] - keys not in (0, 1):
        return False
    return equal(weights[..., :keys], factor) or equal(weights[..., -keys:], factor)


def within(path: str, outer: str) -> bool:
    """Whether a module is this one or a part of it."""
    return path == outer or not outer or path.startswith(f"{outer}.")


def is_attention(kind: str) -> bool:
    """Whether a class says by its name that it is attention."""
    return "ttention" in kind or "ttn" in kind


def reference(spy: Spy) -> list[Weights]:
    """What the spy saw, each call once: weights that a module returned take the place of its softmax."""
    found = list(spy.seen)
    for mine in spy.returned:
        inside = [x for x in found if x.how != "returned" and within(x.path, mine.path)]
        if any(x.how == "multi_head" for x in inside):
            continue  # which returns the mean of the heads
        same = [x for x in inside if equal(x.value, mine.value)]
        if not same and any(x.how == "returned" and equal(x.value, mine.value) for x in found):
            continue  # passed on by an outer module
        alike = [
            x for x in inside
            if x.value.shape[:-1].numel() == mine.value.shape[:-1].numel()
            and x.value.shape[-1] - mine.value.shape[-1] in (0, 1)
            and x.value.shape[-2] == mine.value.shape[-2]
        ]  # fmt: skip
        if same or alike:
            old = (same or alike)[0]
            old.how = "returned"
            if not same:
                _replaced(old, mine.value)
        elif is_attention(mine.kind) and not any(_holds(x.value, mine.value) for x in found):
            found.append(mine)
    return found


def _replaced(old: Weights, value: Tensor) -> None:
    """Take the weights a module returned for those of its softmax, of which it may have dropped a sink."""
    lead = value.shape[:-1]
    empty = old.value.reshape(*lead, -1).sum(-1, keepdim=True) == 0
    old.value = value.masked_fill(empty, 0.0)
    old.keys = None if old.keys is None else old.keys.reshape(lead)
    old.logit = None if old.logit is None else old.logit.reshape(lead)
    old.output = None if old.output is None else old.output.reshape(*lead, -1)


def _holds(whole: Tensor, part: Tensor) -> bool:
    """Whether the weights are these, or their first or last columns (two sequences in one softmax)."""
    keys = part.shape[-1]
    return keys <= whole.shape[-1] and (equal(whole[..., :keys], part) or equal(whole[..., -keys:], part))
