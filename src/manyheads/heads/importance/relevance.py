"""Layer-wise relevance: how much of the output goes back to each head.

**A word of caution.** Layer-wise relevance propagation is patented in some uses and countries. This module is
separate from everything else, never used by default, and can be deleted without loss to the other methods.
Find out whether you may use it before you build on it.

Relevance is gradient times input, in a model whose nonlinear parts are held fixed at what they were:
attention weights, the scale of norms, the slope of activations. Such a model is a linear map of its input, so
without biases what arrives equals the output: relevance is conserved from layer to layer (Ali and others,
"XAI for transformers: better explanations through conservative propagation", 2022). Where two parts that both
depend on the input are multiplied, each gets half.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from manyheads.capture.call import SDPA
from manyheads.common.devices import batches_to_device
from manyheads.common.types import Arguments, Function, Keywords
from manyheads.heads.importance.request import Request
from manyheads.heads.model_outputs import Output
from manyheads.heads.observer import Sums, gate_gradients, observed
from manyheads.heads.table import HeadTable
from manyheads.nn.attention import attention

# A torch function and its arguments, which may be anything, and what to return instead.
Rule = Callable[[Function, Arguments, Keywords], Any]


def relevance(request: Request) -> HeadTable:
    """How much of the output goes through each head, over sequences: ``relevance`` with its sign,
    ``importance`` without.

    The output: the largest logit, on average over tokens; for embeddings, their length.
    """
    sums = Sums()
    with observed(request.model) as observer:
        for number, batch in enumerate(batches_to_device(request.batches, observer.device), 1):
            with Linear():
                forward = observer.forward(batch, gradients=True)
            gradients = gate_gradients(forward.heads, forward.output.value, output_weights(forward.output))
            each = {site: g * (len(g) / len(forward.output.value)) for site, g in gradients.items()}
            sums.add({site: g.abs() for site, g in each.items()})
            sums.add(each, column="relevance")
            request.report("relevance", number)
        return observer.table(sums.by_column, "relevance for the output")


def output_weights(output: Output) -> Tensor:
    """The part of an output whose relevance is traced, as weights shaped like its value.

    >>> output_weights(Output(torch.tensor([[3.0, 4.0]]), None))  # the length of an embedding
    tensor([[0.6000, 0.8000]])
    >>> output_weights(Output(torch.tensor([[[3.0, 4.0]]]), torch.tensor([[True]])))  # the largest logit
    tensor([[[0., 1.]]])
    """
    value = output.value.detach()
    if output.real is None:
        return F.normalize(value, dim=-1)
    weights = output.real.to(value.dtype) / output.real.sum(1, keepdim=True).clamp(min=1)
    largest = F.one_hot(value.argmax(-1), value.shape[-1])
    return largest.to(value.dtype) * weights.unsqueeze(-1)


class Linear(TorchFunctionMode):
    """A context in which torch functions compute as usual, and differentiate as linear maps.

    >>> x = torch.tensor([2.0, -3.0], requires_grad=True)
    >>> with Linear():
    ...     y = torch.softmax(x, 0) * torch.nn.functional.gelu(x)
    >>> y.sum().backward()
    >>> torch.allclose((x.grad * x).sum(), y.sum())                           # conserved
    True
    """

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        rule = _RULES.get(func)
        return func(*args, **(kwargs or {})) if rule is None else rule(func, args, kwargs or {})


def _call_detached(func: Function, args: Arguments, kwargs: Keywords) -> object:
    """The result is a constant factor: a weight, a scale."""
    out = func(*args, **kwargs)
    return out.detach() if isinstance(out, Tensor) else tuple(item.detach() for item in out)


def _slope(func: Callable[..., object], args: Arguments, kwargs: Keywords) -> object:
    """An activation is its input times a slope."""
    x = args[0] if args else kwargs["input"]
    with torch.no_grad():
        out = func(x.detach().clone(), *args[1:], **{k: v for k, v in kwargs.items() if k != "input"})
        slope = torch.where(x == 0, 0.0, out / x)
    return x * slope


def _attention(func: Callable[..., object], args: Arguments, kwargs: Keywords) -> object:
    """The values, weighted by attention that is held fixed."""
    fixed_args = [x.detach() for x in args[:2]] + list(args[2:])
    fixed_kwargs = {k: v.detach() if k in ("query", "key") else v for k, v in kwargs.items()}
    return func(*fixed_args, **fixed_kwargs)


def _power(func: Callable[..., object], args: Arguments, kwargs: Keywords) -> object:
    """A negative power is a scale."""
    exponent = args[1] if len(args) > 1 else kwargs.get("exponent")
    negative = isinstance(exponent, int | float) and exponent < 0
    return _call_detached(func, args, kwargs) if negative else func(*args, **kwargs)


def _product(func: Function, args: Arguments, kwargs: Keywords) -> object:
    """Half to each factor, where both depend on the input."""
    a, b = args if len(args) == 2 else (args[0], kwargs["other"])
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.requires_grad and b.requires_grad:
        return (func(a, b.detach()) + func(a.detach(), b)) / 2
    return func(*args, **kwargs)


def _quotient(func: Callable[..., object], args: Arguments, kwargs: Keywords) -> object:
    """The divisor is a constant scale."""
    return func(
        *(x.detach() if i == 1 and isinstance(x, Tensor) else x for i, x in enumerate(args)), **kwargs
    )


def _layer_norm(func: Callable[..., object], args: Arguments, kwargs: Keywords) -> object:
    arguments = dict(zip(("input", "normalized_shape", "weight", "bias", "eps"), args, strict=False)) | kwargs
    x, axes = arguments["input"], tuple(range(-len(arguments["normalized_shape"]), 0))
    centred = x - x.mean(axes, keepdim=True)
    scale = (centred.pow(2).mean(axes, keepdim=True) + arguments.get("eps", 1e-5)).rsqrt().detach()
    return _affine(centred * scale, arguments)


def _rms_norm(func: Callable[..., object], args: Arguments, kwargs: Keywords) -> object:
    arguments = dict(zip(("input", "normalized_shape", "weight", "eps"), args, strict=False)) | kwargs
    x, axes = arguments["input"], tuple(range(-len(arguments["normalized_shape"]), 0))
    eps = torch.finfo(x.dtype).eps if arguments.get("eps") is None else arguments["eps"]
    return _affine(x * (x.pow(2).mean(axes, keepdim=True) + eps).rsqrt().detach(), arguments)


def _affine(x: Tensor, arguments: Keywords) -> Tensor:
    weight, bias = arguments.get("weight"), arguments.get("bias")
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


_RULES: dict[object, Rule] = (
    dict.fromkeys(SDPA | {attention}, _attention)
    | dict.fromkeys(
        (
            torch.softmax, F.softmax, Tensor.softmax, torch.sigmoid, F.sigmoid, Tensor.sigmoid, torch.rsqrt,
            Tensor.rsqrt, torch.sqrt, Tensor.sqrt, torch.std, Tensor.std, torch.var, Tensor.var, torch.norm,
            Tensor.norm, torch.linalg.vector_norm,
        ),
        _call_detached,
    )
    | dict.fromkeys(
        (
            F.relu, torch.relu, Tensor.relu, F.gelu, F.silu, torch.tanh, F.tanh, Tensor.tanh, F.elu,
            F.leaky_relu, F.mish, F.hardswish, F.relu6,
        ),
        _slope,
    )
    | dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__), _product)
    | dict.fromkeys((torch.div, Tensor.div, Tensor.__truediv__), _quotient)
    | dict.fromkeys((torch.pow, Tensor.pow, Tensor.__pow__), _power)
    | {F.layer_norm: _layer_norm, F.rms_norm: _rms_norm}
)  # fmt: skip
