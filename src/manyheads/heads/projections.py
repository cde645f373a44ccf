"""projections: which weights make the queries, keys and values of each head, and which read its output.

Found by running the model, never from a list of names. Every product with weights takes its other factor as a
constant, so that a tensor's history goes back to the last weights it passed and no further. At an attention
call the head's queries, keys, values and output are then differentiated by those weights: what is not zero
belongs to the head. Behind the call, the output is followed to the product that reads it, and the head's
share of that product is differentiated in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from manyheads.heads.calls import Call
from manyheads.heads.intercept import Interceptor
from manyheads.heads.maps import run
from manyheads.heads.sites import Site

ROLES = ("query", "key", "value", "output")

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


class Part(NamedTuple):
    """Entries of a parameter or buffer: ``indices`` along ``axis``.

    >>> Part("h.0.attn.c_attn.weight", axis=1, indices=(0, 1)).parameter
    'h.0.attn.c_attn.weight'
    """

    parameter: str
    axis: int
    indices: tuple[int, ...]


@dataclass
class Head:
    """The weights of one head. Each of the first four is usually one Part; the key's and value's are shared
    with the other heads of a group.

    query, key, value: of the products that make them; ``axis`` is the one of their output.
    output: of the products that read the head's output; ``axis`` is the one of their input.
    biases: of the products above, by role.
    extras: everything else that belongs to some heads alone: norms, bias tables, slopes, sinks, scales.
    """

    query: tuple[Part, ...] = ()
    key: tuple[Part, ...] = ()
    value: tuple[Part, ...] = ()
    output: tuple[Part, ...] = ()
    biases: dict[str, tuple[Part, ...]] = field(default_factory=dict)
    extras: tuple[Part, ...] = ()


@dataclass
class Projections:
    """The weights of the heads of one site.

    site: the site.
    heads: one `Head` for each head.
    users: for each parameter or buffer that has to do with some heads and not with others, the axis that
        tells them apart, and for each index along it the heads that depend on it.
    readers: the parameters that read the output.
    tied: the parameters that make the queries, where every head depends on all of them, as behind a norm over
        all heads.
    d_key, d_value: the width of a head.
    """

    site: Site
    heads: list[Head]
    users: dict[str, tuple[int, list[frozenset[int]]]]
    readers: tuple[str, ...]
    tied: tuple[str, ...]
    d_key: int | None
    d_value: int


def projections(model: nn.Module, batch: Any) -> dict[str, Projections]:
    """Which weights belong to which head, at every site that the batch reaches.

    Parameters
    ----------
    model: any torch.nn.Module; run once, in eval mode, and left as it was.
    batch: a dict (given as keyword arguments), a tuple or list (as positional ones), or anything else (as
        the only one). A few short sequences do.

    Returns
    -------
    ``{site name: Projections}``.

    Examples
    --------
    >>> layer = nn.MultiheadAttention(6, num_heads=2, batch_first=True)
    >>> x = torch.randn(3, 5, 6)
    >>> found = projections(layer, (x, x, x))[""]
    >>> found.heads[1].key
    (Part(parameter='in_proj_weight', axis=0, indices=(9, 10, 11)),)
    >>> found.heads[1].output
    (Part(parameter='out_proj.weight', axis=1, indices=(3, 4, 5)),)
    >>> weights(layer, found.heads[1].key).shape
    torch.Size([3, 6])
    """
    with _ready(model) as names, _Local(names) as local:
        interceptor = Interceptor(model, local.see)
        with interceptor, torch.enable_grad():
            run(model, batch)
    return {name: _projections(trace) for name, trace in local.traces.items()}


def weights(model: nn.Module, parts: Sequence[Part]) -> Tensor:
    """The entries of parts, one row for each index: (width, what the head reads or writes).

    >>> weights(nn.Linear(3, 2), [Part("weight", axis=1, indices=(0, 2))]).shape
    torch.Size([2, 2])
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    rows = []
    for part in parts:
        tensor = tensors[part.parameter].detach()
        index = torch.tensor(part.indices, device=tensor.device)
        rows.append(tensor.index_select(part.axis, index).movedim(part.axis, 0).flatten(1))
    return torch.cat(rows)


@contextmanager
def _ready(model: nn.Module) -> Iterator[dict[int, str]]:
    """The model in eval mode with gradients for everything it holds: gives the names of those by id."""
    training = [module for module in model.modules() if module.training]
    held = {
        id(tensor): (name, tensor)
        for name, tensor in (*_own_buffers(model), *model.named_parameters())
        if tensor.is_floating_point()
    }
    frozen = [tensor for _, tensor in held.values() if not tensor.requires_grad]
    model.eval()
    for tensor in frozen:
        tensor.requires_grad_(True)
    try:
        yield {key: name for key, (name, _) in held.items()}
    finally:
        for tensor in frozen:
            tensor.requires_grad_(False)
        for module in training:
            module.training = True


def _own_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers of a model, but for those of torch's own modules: running statistics have no gradient."""
    for name, buffer in model.named_buffers():
        holder = model.get_submodule(name.rpartition(".")[0])
        if not type(holder).__module__.startswith("torch.nn."):
            yield name, buffer


class _Trace:
    """What is known of one site: for each role and parameter, which indices along each axis touch a head."""

    def __init__(self, site: Site, d_key: int | None, d_value: int) -> None:
        self.site, self.d_key, self.d_value = site, d_key, d_value
        # (role, parameter) -> for each axis (heads + 1, size): touched by the head, or by one channel of it
        self.touched: dict[tuple[str, str], list[Tensor]] = {}
        self.factors: set[str] = set()  # parameters that were a factor of a product
        self.added: set[str] = set()  # parameters that were added to one

    def touch(self, role: str, name: str, head: int, gradient: Tensor) -> None:
        """Note that a gradient of this head by this parameter was found; ``head`` is -1 for the channel."""
        found = gradient != 0  # True for NaN, too
        axes = self.touched.get((role, name))
        if axes is None:
            axes = [torch.zeros(self.site.heads + 1, size, dtype=torch.bool) for size in gradient.shape]
            self.touched[role, name] = axes
        for axis, rows in enumerate(axes):
            others = [other for other in range(found.dim()) if other != axis]
            rows[head] |= (found.any(others) if others else found).cpu()


class _Local(TorchFunctionMode):
    """Takes the data that goes into products with weights as constants, and looks at what reads heads."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names = names
        self.traces: dict[str, _Trace] = {}
        self.gates: dict[int, tuple[Tensor, _Trace]] = {}
        self.factors: set[str] = set()
        self.added: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _PRODUCTS or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        return self._product(func, args, kwargs)

    def see(self, call: Call) -> Tensor:
        """Differentiate one attention call, and put gates behind it."""
        with torch._C.DisableTorchFunction():
            site = call.site
            trace = self.traces.get(site.name)
            if trace is None:
                d_key = None if call.query is None else call.query.shape[-1]
                trace = self.traces[site.name] = _Trace(site, d_key, call.output.shape[-1])
            for role, tensor in (("query", call.query), ("key", call.key), ("value", call.value)):
                if tensor is not None:
                    self._differentiate(trace, role, tensor)
            biases = [mask for mask in call.mask.tensors if mask.requires_grad and mask.dim() > 2]
            for tensor in (call.scores, *(mask[(None,) * (4 - mask.dim())] for mask in biases)):
                if tensor is not None and tensor.shape[1] == site.heads:
                    self._differentiate(trace, "extra", tensor.masked_fill(tensor.isinf(), 0.0))
            self._differentiate(trace, "extra", call.output)
            gate = torch.ones(
                site.heads, call.output.shape[-1], dtype=call.output.dtype, device=call.output.device
            )
            gate.requires_grad_(True)
            self.gates[id(gate)] = gate, trace
            return call.output.detach() * gate.unsqueeze(1)

    def _differentiate(self, trace: _Trace, role: str, tensor: Tensor) -> None:
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
            found = torch.autograd.grad(part.sum(), leaves, retain_graph=True, allow_unused=True)
            mine = [head for head in range(heads) if reads[head] == number] if number < count else [-1]
            for leaf, gradient in zip(leaves, found, strict=True):
                for head in mine if isinstance(gradient, Tensor) else ():
                    trace.touch(role, self.names[id(leaf)], head, gradient)

    def _product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _is_channelwise(func, args, kwargs):
            return func(*args, **kwargs)
        tensors = [x for arg in (*args, *kwargs.values()) for x in _tensors(arg)]
        data = tensors[:1] if func is F.linear else [x for x in tensors if not self._is_weight(x)]
        if len(data) == len(tensors):
            return func(*args, **kwargs)
        constant = {id(x) for x in data}
        for x in tensors:
            if id(x) not in constant:
                names = {self.names[id(leaf)] for leaf in _leaves(x) if id(leaf) in self.names}
                (self.added if x.dim() == 1 else self.factors).update(names)
        self._read(data, func, args, kwargs)
        fixed = [_detached(arg, constant) for arg in args]
        return func(*fixed, **{name: _detached(arg, constant) for name, arg in kwargs.items()})

    def _read(self, data: list[Tensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """If this product reads the output of heads, find out which of its weights read which head."""
        reads = {id(leaf) for x in data if x.requires_grad for leaf in _leaves(x)} & set(self.gates)
        if not reads:
            return
        out = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            leaves = [leaf for leaf in _leaves(out) if id(leaf) in self.names]
            direction = _direction(out)
            for key in reads:
                gate, trace = self.gates[key]
                (shares,) = torch.autograd.grad((out * direction).sum(), gate, create_graph=True)
                if not shares.requires_grad:
                    continue
                parts = [*shares.sum(1), shares[0, 0]]
                for number, share in enumerate(parts):
                    found = torch.autograd.grad(share, leaves, retain_graph=True, allow_unused=True)
                    for leaf, gradient in zip(leaves, found, strict=True):
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

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.gates.clear()
        for trace in self.traces.values():
            trace.factors, trace.added = self.factors, self.added


def _is_channelwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """A product in which each channel, or each head, sees only itself: no projection, but something on the
    way.
    """
    if func is torch.einsum and isinstance(args[0], str) and args[0].count(",") == 1 and "->" in args[0]:
        left, right, out = args[0].replace(" ", "").replace("->", ",").split(",")
        return bool(set(left) & set(right) & set(out) - {"."})
    if func not in _CONVOLUTIONS:
        return False
    given = dict(
        zip(("input", "weight", "bias", "stride", "padding", "dilation", "groups"), args, strict=False)
    )
    given |= kwargs
    return bool(given.get("groups", 1) == given["weight"].shape[0] != 1)


def _direction(tensor: Tensor) -> Tensor:
    """Numbers without pattern, in which nothing cancels, that leave the random numbers of others alone."""
    steps = torch.arange(1, tensor.numel() + 1, device=tensor.device, dtype=torch.float64)
    return torch.cos(steps * steps * 0.7).add(0.1).to(tensor.dtype).view(tensor.shape)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _detached(value: Any, constant: set[int]) -> Any:
    if isinstance(value, Tensor):
        return value.detach() if id(value) in constant else value
    if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
        return type(value)([_detached(item, constant) for item in value])
    return value


def _nodes(tensor: Tensor) -> Iterator[Any]:
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


def _projections(trace: _Trace) -> Projections:
    """Turn what was touched into parts."""
    count = trace.site.heads
    heads = [Head() for _ in range(count)]
    for (role, name), axes in trace.touched.items():
        product = name in trace.factors or name in trace.added
        axis = _axis_of_heads([rows[:count] for rows in axes])
        if axis is None and product and role in ROLES:
            axis = _axis_of_heads([rows[[0, -1]] for rows in axes])
        if axis is None:
            continue
        for head, rows in zip(heads, axes[axis], strict=False):
            part = Part(name, axis, tuple(rows.nonzero().flatten().tolist()))
            if part.indices:
                _put(head, role, part, name in trace.factors, name in trace.added)
    for head in heads:  # what has a role of its own, in a call seen before or after, is no extra
        known = {part.parameter for role in ROLES for part in getattr(head, role)}
        known |= {part.parameter for parts in head.biases.values() for part in parts}
        head.extras = tuple(part for part in dict.fromkeys(head.extras) if part.parameter not in known)
    readers = {name for role, name in trace.touched if role == "output" and name in trace.factors}
    makers = {name for role, name in trace.touched if role in ("query", "key", "value")}
    alone = any(head.query for head in heads)
    queries = {name for role, name in trace.touched if role == "query" and name in trace.factors}
    return Projections(
        trace.site,
        heads,
        _users(trace),
        tuple(sorted(readers - makers)),
        () if alone else tuple(sorted(queries)),
        trace.d_key,
        trace.d_value,
    )


def _put(head: Head, role: str, part: Part, factor: bool, added: bool) -> None:
    if role in ROLES and factor:
        setattr(head, role, (*getattr(head, role), part))
    elif role in ROLES and added:
        head.biases[role] = (*head.biases.get(role, ()), part)
    else:
        head.extras = (*head.extras, part)


def _users(trace: _Trace) -> dict[str, tuple[int, list[frozenset[int]]]]:
    count = trace.site.heads
    joined: dict[str, list[Tensor]] = {}
    for (_, name), axes in trace.touched.items():
        rows = [row[:count] for row in axes]
        before = joined.get(name)
        joined[name] = rows if before is None else [a | b for a, b in zip(before, rows, strict=True)]
    users = {}
    for name, axes in joined.items():
        axis = _axis_of_heads(axes)
        if axis is not None:
            columns = axes[axis].T.tolist()
            users[name] = axis, [frozenset(h for h in range(count) if column[h]) for column in columns]
    return users


def _axis_of_heads(axes: Iterable[Tensor]) -> int | None:
    """The axis along which heads (heads, size) touch different indices; of several the one where they share
    least.
    """
    shared = {
        axis: int(rows.sum()) / max(int(rows.any(0).sum()), 1)
        for axis, rows in enumerate(axes)
        if not bool((rows == rows[:1]).all())
    }
    return min(shared, key=lambda axis: shared[axis]) if shared else None
