"""Opaque kernels: attention functions that torch's function mode does not see into.

Such a function is run as it is, and what it returned is handed to the modes on this thread as the result of
`attended`, which `handlers` turns into a call. Three kinds of functions get there, while an interceptor is at
work:

- what transformers' attention interface gives to a model, but for those whose parts are seen;
- Python functions that were registered: their code is exchanged, so that they are seen under every name;
- operators of torch that were registered, which the mode sees by itself.

Where attention was seen inside the function, as when a backend calls torch's own kernels, nothing is done.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from manyheads.capture import kernel_readers, torch_patches
from manyheads.capture.kernel_arguments import AttentionArguments
from manyheads.common import plugins
from manyheads.common.errors import describe_error
from manyheads.common.nested_tensors import map_tensors
from manyheads.common.types import Arguments, Function, Keywords

if TYPE_CHECKING:
    from manyheads.capture.interceptor import State

Reader = Callable[..., AttentionArguments]
_INTERFACE = "transformers.modeling_utils"
# Modules of transformers whose functions on the interface are made of what the mode sees.
_SEEN = ("sdpa_attention", "sdpa_paged", "flex_attention", "eager_paged")
_readers: dict[Function, Reader] = {}  # by function or operator
_code: dict[FunctionType, CodeType] = {}  # of functions whose code is exchanged now
_interfaces: dict[type, Any] = {}  # the attention interface while it is patched, and its own __getitem__
_registrations = 0
_modules = 0  # how many there were when the last look was taken
_lock = threading.RLock()


class _Local(threading.local):
    reading = False  # a function around this one is read


_local = _Local()


class KernelCall:
    """A call of an opaque kernel that has been made.

    arguments: what it computes, or the reason why that is unknown.
    seen: how many attention calls each interceptor had seen before it.
    """

    def __init__(self, name: str, arguments: AttentionArguments | str, states: Iterable[State]) -> None:
        self.name, self.arguments = name, arguments
        self.seen = {id(state): state.seen for state in states}


def register_attention(function: Function, reader: Reader) -> None:
    """Tell manyheads what is computed by a function that runs its own attention kernel.

    Afterwards watch, silence, cut and all other verbs see its calls as they see torch's own attention. What
    the reader says is checked: on a probe of the model, and on a few rows of every kind of call; what does
    not hold is listed in `missed`.

    Parameters
    ----------
    function: a Python function, under whatever names it was imported, or an operator of torch
        (``torch.ops.library.name`` or what ``torch.library.custom_op`` made).
    reader: a function that gets the same arguments, by the names of the function's parameters, and returns
        `AttentionArguments`. It may raise a ValueError for calls it cannot read; these are in `missed`.

    Functions of flash-attention and xFormers, torch's attention over packed sequences and everything on
    transformers' attention interface need no registration.

    Examples
    --------
    >>> def kernel(q, k, v, causal=False):                    # (batch, length, heads, width)
    ...     q, k, v = (x.transpose(1, 2).numpy() for x in (q, k, v))    # torch sees nothing from here on
    ...     scores = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5
    ...     weights = numpy.exp(scores) / numpy.exp(scores).sum(-1, keepdims=True)
    ...     return torch.from_numpy(weights @ v).transpose(1, 2)
    >>> def read(q, k, v, causal):
    ...     layout = "batch length heads width"
    ...     return AttentionArguments(query=q, key=k, value=v, layout=layout, causal=causal)
    >>> import numpy
    >>> register_attention(kernel, read)

    See Also
    --------
    AttentionArguments : what the reader returns.
    watch : sees every attention call of a model.

    References
    ----------
    Dao, Fu, Ermon, Rudra, Ré, "FlashAttention: fast and memory-efficient exact attention with IO-awareness"
    (2022).
    """
    if not callable(reader):
        raise TypeError(f"reader: expected a function, got {type(reader).__name__}")
    global _registrations
    with _lock:
        _registrations += 1
        for target in _targets(function):
            _readers[target] = reader
        if torch_patches.at_work():
            install()


def _targets(function: Function) -> list[Any]:
    """What a function is called by: itself, or the operators behind it."""
    if isinstance(function, torch._library.custom_ops.CustomOpDef):
        function = cast("Any", function)._opoverload
    if isinstance(function, torch._ops.OpOverload):
        return [function, function.overloadpacket]
    if isinstance(function, torch._ops.OpOverloadPacket):
        return [function, *_overloads(function)]
    if isinstance(function, FunctionType):
        return [function]
    raise TypeError(
        f"function: expected a Python function or an operator of torch, got {type(function).__name__}; "
        "register the Python function that calls it"
    )


def operators() -> set[Function]:
    """The operators of torch that were registered."""
    return {function for function in _readers if not isinstance(function, FunctionType)}


def by_schema(operator: Any, reader: Reader) -> Reader:
    """A reader that gets the arguments of an operator by their names in its schema."""
    overload = operator if isinstance(operator, torch._ops.OpOverload) else _overloads(operator)[0]
    names = [argument.name for argument in overload._schema.arguments]
    return lambda *args, **kwargs: reader(**dict(zip(names, args, strict=False)), **kwargs)


def _overloads(packet: Any) -> list[Any]:
    return [getattr(packet, name) for name in packet.overloads()]


def registrations() -> int:
    """A number that changes when a reader is registered: what was proved before may not hold any more."""
    return _registrations


def reader_of(operator: Function) -> Reader | None:
    """The reader of an operator of torch, unless a function around it is read."""
    return None if _local.reading else _readers.get(operator)


def attended(out: Tensor, reading: KernelCall) -> Tensor:
    """The output of an opaque kernel; the modes on this thread learn of it here."""
    if has_torch_function((out,)):
        return handle_torch_function(attended, (out,), out, reading)
    return out


def install() -> None:
    """Begin to see: what is there of the interface and of the functions with readers is exchanged."""
    global _modules
    with _lock:
        for register in plugins.load("manyheads.attention").values():
            plugins.call("manyheads.attention", register)
        for (module, name), reader_name in kernel_readers.READERS.items():
            function = getattr(sys.modules.get(module), name, None)
            if isinstance(function, FunctionType) and function not in _readers:
                _readers[function] = getattr(kernel_readers, reader_name)
        for function in list(_readers):
            if isinstance(function, FunctionType) and function not in _code:
                _exchange(function)
        kind = getattr(sys.modules.get(_INTERFACE), "AttentionInterface", None)
        if kind is not None and kind not in _interfaces:
            _interfaces[kind] = vars(kind).get("__getitem__")
            kind.__getitem__ = _watched(kind.__getitem__)
        _modules = len(sys.modules)


def refresh() -> None:
    """Look again, if anything was imported since."""
    if len(sys.modules) != _modules:
        install()


def uninstall() -> None:
    """Everything as it was, unless an interceptor is still at work."""
    with _lock:
        if torch_patches.at_work():
            return
        for function, code in _code.items():
            function.__code__ = code
        _code.clear()
        for kind, getitem in _interfaces.items():
            if getitem is None:
                delattr(kind, "__getitem__")  # inherited again
            else:
                setattr(kind, "__getitem__", getitem)  # noqa: B010
        _interfaces.clear()


def _watched(getitem: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """What gives the functions of the interface, those that cannot be seen into so that they are seen."""

    @wraps(getitem)
    def look_up(interface: Any, name: str) -> Any:
        function = getitem(interface, name)
        module = getattr(function, "__module__", "") or ""
        if module.startswith("transformers.integrations.") and module.endswith(_SEEN):
            return function

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            return _run(function, kernel_readers.read_interface, f"the backend {name}", args, kwargs)

        return run

    return look_up


def _exchange(function: FunctionType) -> None:
    """Exchange the code of a function for one that runs the same, and is seen."""
    code, count = function.__code__, len(function.__code__.co_freevars)
    original = FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    original.__kwdefaults__ = function.__kwdefaults__
    signature = inspect.signature(function, follow_wrapped=False)

    def by_name(*args: Any, **kwargs: Any) -> AttentionArguments:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        named: Keywords = {}
        rest: Arguments = ()
        for name, value in bound.arguments.items():
            kind = signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                named |= value
            elif kind is inspect.Parameter.VAR_POSITIONAL:
                rest = value
            else:
                named[name] = value
        return _readers[function](*rest, **named)

    def run(*args: Any, **kwargs: Any) -> Any:
        return _run(original, by_name, function.__name__, args, kwargs)

    # a code object with as many free variables as the function has cells, which calls the constant `run`
    cells = [f"cell{number}" for number in range(count)]
    lines = [
        "def outer():",
        *(f"    {cell} = None" for cell in cells),
        "    def trampoline(*args, **kwargs):",
        *(f"        {cell}" for cell in cells),
        "        run = 'the function'",
        "        return run(*args, **kwargs)",
        "    return trampoline",
    ]
    space: Keywords = {}
    exec("\n".join(lines), space)  # of our own text alone
    trampoline: CodeType = space["outer"]().__code__
    constants = tuple(run if each == "the function" else each for each in trampoline.co_consts)
    _code[function] = code
    function.__code__ = trampoline.replace(co_consts=constants, co_name=code.co_name)


@contextmanager
def _read_from_outside(is_read: bool) -> Iterator[None]:
    before, _local.reading = _local.reading, _local.reading or is_read
    try:
        yield
    finally:
        _local.reading = before


def _run(function: Function, reader: Reader, name: str, args: Arguments, kwargs: Keywords) -> Any:
    """Call a function, and let the modes on this thread know what it computed."""
    running = torch_patches.states()
    if _local.reading or not running:
        return function(*args, **kwargs)
    arguments = read_call(reader, name, args, kwargs)
    reading = KernelCall(name, arguments, running)
    with _read_from_outside(isinstance(arguments, AttentionArguments)):
        try:
            out = function(*args, **kwargs)
        except RuntimeError:
            if isinstance(arguments, str) or not all(_is_unseen_probe(state, reading) for state in running):
                raise
            with torch.no_grad():  # a kernel for inference alone: what it gives is differentiated anyway
                plain_args, plain_kwargs = map_tensors(Tensor.detach, (args, dict(kwargs)))
                out = function(*plain_args, **plain_kwargs)
    return with_output(out, lambda output: attended(output, reading))


def _is_unseen_probe(state: State, reading: KernelCall) -> bool:
    """Whether a run is that of a probe, in which nothing of the kernel was seen so far."""
    return state.owner.probing and state.seen == reading.seen[id(state)]


def read_call(reader: Reader, name: str, args: Arguments, kwargs: Keywords) -> AttentionArguments | str:
    """What a reader says of a call, or why it says nothing."""
    try:
        arguments: object = reader(*args, **kwargs)
    except Exception as error:
        return f"{name} cannot be read: {error if isinstance(error, ValueError) else describe_error(error)}"
    if not isinstance(arguments, AttentionArguments):
        return f"{name} cannot be read: its reader returned {type(arguments).__name__}"
    return arguments


def with_output(out: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """What a function returned, with its output, the first tensor of it, changed."""
    if isinstance(out, Tensor):
        return change(out)
    if isinstance(out, tuple | list) and out and isinstance(out[0], Tensor):
        first = change(out[0])
        if first is out[0]:
            return out
        kind: Any = type(out)
        return kind(*(first, *out[1:])) if hasattr(out, "_fields") else kind((first, *out[1:]))
    return out
