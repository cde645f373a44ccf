"""Which weights touch each head, as one run of a model shows it; `weights` says what that means.

Every product with weights takes its other factor as a constant, so that a tensor's history goes back to the
last weights it passed and no further. At an attention call the head's queries, keys, values and output are
then differentiated by those weights: what is not zero belongs to the head. Behind the call, the output is
followed to the product that reads it, and the head's share of that product is differentiated in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.capture.call import Call
from manyheads.capture.call_rows import differentiable_output
from manyheads.capture.interceptor import Interceptor
from manyheads.capture.site import Site
from manyheads.capture.tensor_mode import TensorMode
from manyheads.common.devices import for_float64
from manyheads.common.nested_tensors import tensors_in
from manyheads.common.preserved_state import evaluating
from manyheads.common.run_batch import run
from manyheads.common.types import Arguments, Batch, Function, Keywords

_CONVOLUTIONS = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}
_PRODUCTS = {
    F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.mm, Tensor.mm,
    torch.bmm, Tensor.bmm, torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm, torch.einsum,
    torch.tensordot, F.bilinear, *_CONVOLUTIONS,
}  # fmt: skip
# What may be done to a parameter before it is used as a weight.
_VIEWS = (
    "T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Slice", "Select", "Split",
    "SplitWithSizes", "Unbind", "Narrow", "Unsqueeze", "Squeeze", "Expand", "Cat", "Stack", "ToCopy", "Alias",
    "Clone", "Index", "IndexSelect", "Mul", "Div",
)  # fmt: skip


def traces(model: nn.Module, batch: Batch) -> dict[str, Trace]:
    """What is known of each site after one run of the model, in eval mode; it is left as it was."""
    with _ready(model) as names:
        local = _Local(names)
        with local, Interceptor(model, local.see), torch.enable_grad():
            try:
                run(model, batch)
            except (RuntimeError, NotImplementedError) as error:
                raise ValueError(
                    f"model: it cannot be differentiated, which shows what weights a head has ({error}); "
                    "expected functions that have a gradient"
                ) from error
    for trace in local.traces.values():
        trace.factors, trace.added = local.factors, local.added
    return local.traces


@contextmanager
def _ready(model: nn.Module) -> Iterator[dict[int, str]]:
    """The model in eval mode with gradients for everything it holds: gives the names of those by id."""
    held = {
        id(tensor): (name, tensor)
        for name, tensor in (*_differentiable_buffers(model), *model.named_parameters())
        if tensor.is_floating_point()
    }
    frozen = [tensor for _, tensor in held.values() if not tensor.requires_grad]
    with evaluating(model):
        for tensor in frozen:
            tensor.requires_grad_(True)
        yield {key: name for key, (name, _) in held.items()}


def _differentiable_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers of a model, but for those of torch's own modules: running statistics have no gradient."""
    for name, buffer in model.named_buffers():
        holder = model.get_submodule(name.rpartition(".")[0])
        if not type(holder).__module__.startswith("torch.nn."):
            yield name, buffer


class Trace:
    """What is known of one site: for each role and parameter, which indices along each axis touch a head."""

    def __init__(self, site: Site, d_key: int | None, d_value: int) -> None:
        self.site, self.d_key, self.d_value = site, d_key, d_value
        # (role, parameter) -> for each axis (heads + 1, size): touched by the head, or by one channel of it
        self.touched: dict[tuple[str, str], list[Tensor]] = {}
        self.factors: set[str] = set()  # parameters that were a factor of a product
        self.added: set[str] = set()  # parameters that were added to one
        self.reading: set[str] = set()  # parameters of the products that read the heads

    def touch(self, role: str, name: str, head: int, gradient: Tensor) -> None:
        """Note that a gradient of this head by this parameter was found; ``head`` is -1 for the channel."""
        is_touched = gradient != 0  # True for NaN, too
        axes = self.touched.get((role, name))
        if axes is None:
            axes = [torch.zeros(self.site.heads + 1, size, dtype=torch.bool) for size in gradient.shape]
            self.touched[role, name] = axes
        for axis, rows in enumerate(axes):
            others = [other for other in range(is_touched.dim()) if other != axis]
            rows[head] |= (is_touched.any(others) if others else is_touched).cpu()


class _Local(TensorMode):
    """Takes the data that goes into products with weights as constants, and looks at what reads heads."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names = names
        self.traces: dict[str, Trace] = {}
        self.gates: dict[int, tuple[Tensor, Trace]] = {}
        self.factors: set[str] = set()
        self.added: set[str] = set()

    def called(self, func: Function, args: Arguments, kwargs: Keywords) -> object:
        """The result of a function; of a product with weights, one that forgets its other factor."""
        with _history():
            if func in _PRODUCTS and torch.is_grad_enabled():
                return self._product(func, args, kwargs)
            return func(*args, **kwargs)

    def see(self, call: Call) -> Tensor:
        """Differentiate one attention call, and put gates behind it."""
        with torch._C.DisableTorchFunction(), _history():
            site = call.site
            trace = self.traces.get(site.name)
            if trace is None:
                d_key = None if call.query is None else call.query.shape[-1]
                trace = self.traces[site.name] = Trace(site, d_key, call.output.shape[-1])
            for role, tensor in (("query", call.query), ("key", call.key), ("value", call.value)):
                if tensor is not None:
                    self._differentiate(trace, role, tensor)
            biases = [mask for mask in call.mask.tensors if mask.requires_grad and mask.dim() > 2]
            for tensor in (call.scores, *(mask[(None,) * (4 - mask.dim())] for mask in biases)):
                if tensor is not None and tensor.shape[1] == site.heads:
                    self._differentiate(trace, "extra", tensor.masked_fill(tensor.isinf(), 0.0))
            self._differentiate(trace, "extra", differentiable_output(call))
            gate = torch.ones(
                site.heads, call.output.shape[-1], dtype=call.output.dtype, device=call.output.device
            )
            gate.requires_grad_(True)
            self.gates[id(gate)] = gate, trace
            return call.output.detach() * gate.unsqueeze(1)

    def _differentiate(self, trace: Trace, role: str, tensor: Tensor) -> None:
        """Differentiate each head of a tensor (batch, heads or key heads, length, width)."""
        leaves = [leaf for leaf in _leaves(tensor) if id(leaf) in self.names]
        if not leaves:
            return
        count, heads = tensor.shape[1], trace.site.heads
        reads = range(heads) if count == heads else trace.site.kv_heads
        direction = _direction(tensor)
        parts = [tensor[:, head] * direction[:, head] for head in range(count)]
        parts.append(parts[0][..., :1])  # one channel, to tell rows from columns where heads cannot
        for number, part in enumerate(parts):
            gradients = torch.autograd.grad(part.sum(), leaves, retain_graph=True, allow_unused=True)
            reading = [head for head in range(heads) if reads[head] == number] if number < count else [-1]
            for leaf, gradient in zip(leaves, gradients, strict=True):
                for head in reading if isinstance(gradient, Tensor) else ():
                    trace.touch(role, self.names[id(leaf)], head, gradient)

    def _product(self, func: Function, args: Arguments, kwargs: Keywords) -> object:
        if _is_channelwise(func, args, kwargs):
            return func(*args, **kwargs)
        tensors = [x for arg in (*args, *kwargs.values()) for x in tensors_in(arg)]
        data = tensors[:1] if func is F.linear else [x for x in tensors if not self._is_weight(x)]
        if len(data) == len(tensors):
            return func(*args, **kwargs)
        constant = {id(x) for x in data}
        weights: set[str] = set()
        for x in tensors:
            if id(x) not in constant:
                names = {self.names[id(leaf)] for leaf in _leaves(x) if id(leaf) in self.names}
                (self.added if x.dim() == 1 else weights).update(names)
        self.factors |= weights
        self._read(data, weights, func, args, kwargs)

        def fix(x: Tensor) -> Tensor:
            return _not_all_zero(x.detach()) if id(x) in constant else x

        fixed = [_mapped(arg, fix) for arg in args]
        return func(*fixed, **{name: _mapped(arg, fix) for name, arg in kwargs.items()})

    def _read(
        self, data: list[Tensor], weights: set[str], func: Function, args: Arguments, kwargs: Keywords
    ) -> None:
        """If this product reads the output of heads, find out which of its weights read which head."""
        reads = {id(leaf) for x in data if x.requires_grad for leaf in _leaves(x)} & set(self.gates)
        if not reads:
            return
        constant = {id(x) for x in data}
        shown = [
            _mapped(arg, lambda x: x if id(x) in constant else _fill_zero_rows(x))
            for arg in (*args, *kwargs.values())
        ]
        out = func(*shown[: len(args)], **dict(zip(kwargs, shown[len(args) :], strict=True)))
        with torch._C.DisableTorchFunction():
            leaves = [leaf for leaf in _leaves(out) if id(leaf) in self.names]
            direction = _direction(out)
            for key in reads:
                gate, trace = self.gates[key]
                (shares,) = torch.autograd.grad((out * direction).sum(), gate, create_graph=True)
                if not shares.requires_grad:
                    continue
                trace.reading |= weights
                parts = [*shares.sum(1), shares[0, 0]]
                for number, share in enumerate(parts):
                    gradients = torch.autograd.grad(share, leaves, retain_graph=True, allow_unused=True)
                    for leaf, gradient in zip(leaves, gradients, strict=True):
                        if gradient is not None:
                            head = number if number < trace.site.heads else -1
                            trace.touch("output", self.names[id(leaf)], head, gradient)

    def _is_weight(self, tensor: Tensor) -> bool:
        """Whether this is a parameter, or views of parameters."""
        if id(tensor) in self.names:
            return True
        return tensor.grad_fn is not None and all(
            id(node.variable) in self.names if hasattr(node, "variable") else _kind(node) in _VIEWS
            for node in _nodes(tensor)
        )


def _history() -> Any:
    """A context in which tensors keep their history also inside a checkpoint, which would give it up and run
    things again to have it back.
    """
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def _is_channelwise(func: Function, args: Arguments, kwargs: Keywords) -> bool:
    """A product in which each channel, or each head, sees only itself: no projection, but something on the
    way.
    """
    if func is torch.einsum and isinstance(args[0], str) and args[0].count(",") == 1 and "->" in args[0]:
        left, right, out = args[0].replace(" ", "").replace("->", ",").split(",")
        return bool(set(left) & set(right) & set(out) - {"."})
    if func not in _CONVOLUTIONS:
        return False
    arguments = dict(
        zip(("input", "weight", "bias", "stride", "padding", "dilation", "groups"), args, strict=False)
    )
    arguments |= kwargs
    return bool(arguments.get("groups", 1) == arguments["weight"].shape[0] != 1)


def _direction(tensor: Tensor) -> Tensor:
    """Numbers without pattern, in which nothing cancels, that leave the random numbers of others alone."""
    steps = torch.arange(1, tensor.numel() + 1, device=for_float64(tensor.device), dtype=torch.float64)
    return torch.cos(steps * steps * 0.7).add(0.1).to(tensor.dtype).to(tensor.device).view(tensor.shape)


def _mapped(value: object, function: Callable[[Tensor], Tensor]) -> object:
    """An argument with a function applied to its tensors."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
        return type(value)([_mapped(item, function) for item in value])
    return value


def _fill_zero_rows(weight: Tensor) -> Tensor:
    """Weights with other numbers in rows and columns that are all zeros, which would hide what the data was
    multiplied by before: those that read a new head begin like that.
    """
    if weight.dim() < 2 or not weight.is_floating_point():
        return weight
    empty = weight.detach() == 0
    blank = torch.zeros_like(empty)
    for axis in range(weight.dim()):
        blank |= empty.all([other for other in range(weight.dim()) if other != axis], keepdim=True)
    return weight + _direction(weight).masked_fill(~blank, 0.0) if bool(blank.any()) else weight


def _not_all_zero(data: Tensor) -> Tensor:
    """The data of a product, or other numbers where it is all zeros, which would hide the weights: DETR's
    decoder begins like that.
    """
    return data if bool(data.any()) else _direction(data)


def _nodes(tensor: Tensor) -> Iterator[object]:
    """The nodes of a tensor's history, each once."""
    waiting, seen = [tensor.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [before for before, _ in node.next_functions]


def _kind(node: Any) -> str:
    """What a node of the history did: "Add", "View", ..."""
    return str(node.name()).partition("Backward")[0]


def _leaves(tensor: Tensor) -> list[Tensor]:
    """The tensors that a tensor's history starts from."""
    if tensor.is_leaf:
        return [tensor] if tensor.requires_grad else []
    return [node.variable for node in _nodes(tensor) if hasattr(node, "variable")]
