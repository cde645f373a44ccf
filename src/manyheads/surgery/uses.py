"""What a module reads while it runs, and what becomes of the whole numbers that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Reads = Mapping[str, frozenset[str]]  # module path -> names of attributes; "config." before those of a config

# Functions whose whole numbers say how an axis is split, joined, repeated or how large it is. All others may
# take them for positions or distances.
_SIZES = {
    Tensor.view, Tensor.reshape, torch.reshape, Tensor.unflatten, torch.unflatten, Tensor.split, torch.split,
    Tensor.chunk, torch.chunk, Tensor.tensor_split, torch.tensor_split, Tensor.expand, Tensor.repeat,
    Tensor.repeat_interleave, torch.repeat_interleave, Tensor.new_zeros, Tensor.new_empty, torch.zeros,
    torch.empty, torch.split_with_sizes, Tensor.split_with_sizes, nn.functional.group_norm,
}  # fmt: skip


@contextmanager
def reading(region: nn.Module) -> Iterator[dict[str, set[str]]]:
    """A context that gives, for each module inside, the names of the attributes that are read meanwhile.

    >>> class Layer(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.heads, self.window = 3, 3
    ...     def forward(self, x):
    ...         return x.unflatten(-1, (self.heads, -1))
    >>> layer = Layer()
    >>> with reading(layer) as names:
    ...     _ = layer(torch.ones(2, 6))
    >>> "heads" in names[""], "window" in names[""]
    (True, False)
    """
    names: dict[str, set[str]] = {}
    back: list[Callable[[], None]] = []
    classes: dict[type, type] = {}
    seen: dict[int, set[str]] = {}
    try:
        for path, module in region.named_modules():
            names[path] = seen[id(module)] = set()
            config = vars(module).get("config")
            if hasattr(config, "to_dict"):
                vars(module)["config"] = _Config(config, names[path])
                back.append(lambda module=module, config=config: vars(module).update(config=config))
            kind = type(module)
            module.__class__ = classes.setdefault(kind, _spied(kind, seen))
            back.append(lambda module=module, kind=kind: setattr(module, "__class__", kind))
        yield names
    finally:
        for undo in reversed(back):
            undo()


def _spied(kind: type, seen: dict[int, set[str]]) -> type:
    def get(self: Any, name: str) -> Any:
        seen[id(self)].add(name)
        return kind.__getattribute__(self, name)

    return type(kind)(kind.__name__, (kind,), {"__getattribute__": get, "__module__": kind.__module__})


class _Config:
    """A config that notes which of its values are read."""

    def __init__(self, config: Any, names: set[str]) -> None:
        self.__dict__["_real"], self.__dict__["_names"] = config, names

    def __getattr__(self, name: str) -> Any:
        self.__dict__["_names"].add(f"config.{name}")
        return getattr(self.__dict__["_real"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_real"], name, value)


class Uses:
    """What was done with one number: ``sizes`` of axes, and anything ``else``."""

    def __init__(self) -> None:
        self.sizes = self.other = False

    @property
    def only_sizes(self) -> bool:
        """Whether it only ever said how an axis is split: then no longer input can show anything new."""
        return self.sizes and not self.other


class Traced(int):
    """A whole number that notes what is done with it, and with what is computed from it.

    >>> uses = Uses()
    >>> heads = Traced(3, (uses,))
    >>> with tracing():
    ...     _ = torch.ones(2, 12).view(2, heads, 12 // heads)
    >>> uses.only_sizes
    True
    >>> with tracing():
    ...     _ = torch.arange(5) < heads
    >>> uses.only_sizes
    False
    """

    uses: tuple[Uses, ...]

    def __new__(cls, value: int, uses: Iterable[Uses]) -> Traced:
        number = super().__new__(cls, value)
        number.uses = tuple(dict.fromkeys(uses))
        return number

    def other(self) -> None:
        """Note a use that may be one of a position."""
        for use in self.uses:
            use.other = True


def _computed(name: str) -> Any:
    plain = getattr(int, name)

    def operator(self: Traced, *others: Any) -> Any:
        result = plain(self, *others)
        if type(result) is not int:
            return result
        return Traced(result, (*self.uses, *(use for x in others if isinstance(x, Traced) for use in x.uses)))

    return operator


def _noted(name: str) -> Any:
    plain = getattr(int, name)

    def operator(self: Traced, *others: Any) -> Any:
        self.other()
        return plain(self, *others)

    return operator


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "rfloordiv", "mod", "rmod", "neg"):
    setattr(Traced, f"__{_name}__", _computed(f"__{_name}__"))
for _name in ("lt", "le", "gt", "ge", "truediv", "rtruediv", "pow", "rpow", "float", "int", "divmod"):
    setattr(Traced, f"__{_name}__", _noted(f"__{_name}__"))


class tracing(TorchFunctionMode):
    """A context in which torch's functions note the numbers that they are given."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for number in _numbers((args, kwargs)):
            if func in _SIZES:
                for use in number.uses:
                    use.sizes = True
            else:
                number.other()
        return func(*args, **(kwargs or {}))


def _numbers(value: Any) -> Iterator[Traced]:
    if isinstance(value, Traced):
        yield value
    elif isinstance(value, slice):
        yield from _numbers((value.start, value.stop, value.step))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _numbers(item)
