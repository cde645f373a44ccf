"""Which attributes a module reads while it runs, and what it does with the whole numbers among them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from manyheads.common.types import Arguments, Function, Keywords

Reads = Mapping[str, frozenset[str]]  # module path -> names of attributes; "config." before those of a config

# Functions whose whole numbers say how an axis is split, joined, repeated or how large it is. All others may
# take them for positions or distances.
_SIZES = {
    Tensor.view, Tensor.reshape, torch.reshape, Tensor.unflatten, torch.unflatten, Tensor.split, torch.split,
    Tensor.chunk, torch.chunk, Tensor.tensor_split, torch.tensor_split, Tensor.expand, Tensor.repeat,
    Tensor.repeat_interleave, torch.repeat_interleave, Tensor.new_zeros, Tensor.new_empty, torch.zeros,
    torch.empty, torch.split_with_sizes, Tensor.split_with_sizes, nn.functional.group_norm,
}  # fmt: skip


class AttributeReads:
    """A context that records, for each module inside a region, the names of the attributes that are read;
    those of configs begin with ``config.``.

    numbers: names by path; of the whole numbers there, what is done with each read is noted in ``uses``.

    Examples
    --------
    >>> class Layer(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.heads, self.window = 3, 3
    ...     def forward(self, x):
    ...         return x.unflatten(-1, (self.heads, -1))
    >>> layer = Layer()
    >>> with AttributeReads(layer, {"": {"heads"}}) as reading:
    ...     _ = layer(torch.ones(2, 6))
    >>> "heads" in reading.names[""], "window" in reading.names[""], reading.only_sizes("", "heads")
    (True, False, True)
    """

    def __init__(self, region: nn.Module, numbers: Mapping[str, Collection[str]] | None = None) -> None:
        self.region, self.numbers = region, numbers or {}
        self.names: dict[str, set[str]] = {}
        self.uses: dict[tuple[str, str], list[Uses]] = {}
        self._back: list[Callable[[], None]] = []
        self._paths: dict[int, str] = {}
        self._mode = _Sizes()

    def read(self, path: str, name: str, value: object) -> object:
        """Record a read; returns the value."""
        self.names[path].add(name)
        if type(value) is not int or name not in self.numbers.get(path, ()):
            return value
        use = Uses()
        self.uses.setdefault((path, name), []).append(use)
        return Traced(value, (use,))

    def only_sizes(self, path: str, name: str) -> bool:
        """Whether a number is only used to split axes: then a longer input shows nothing new."""
        uses = self.uses.get((path, name), [])
        return any(use.sizes for use in uses) and not any(use.other or not use.seen for use in uses)

    def __enter__(self) -> AttributeReads:
        try:
            self._install()
        except BaseException:
            self._undo()
            raise
        self._mode.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._mode.__exit__(*error)
        self._undo()

    def _install(self) -> None:
        classes: dict[type, type] = {}
        for path, module in self.region.named_modules():
            self.names[path], self._paths[id(module)] = set(), path
            config = vars(module).get("config")
            if hasattr(config, "to_dict"):
                vars(module)["config"] = _Config(config, path, self)
                self._back.append(partial(vars(module).__setitem__, "config", config))
            kind = type(module)
            if kind not in classes:
                classes[kind] = self._traced_class(kind)
            module.__class__ = classes[kind]
            self._back.append(partial(setattr, module, "__class__", kind))

    def _undo(self) -> None:
        for undo in reversed(self._back):
            undo()

    def _traced_class(self, kind: Any) -> type:
        def get(module: object, name: str) -> object:
            path = self._paths[id(module)]
            self.names[path].add(name)  # also where the next line raises, as for buffers, which come later
            return self.read(path, name, kind.__getattribute__(module, name))

        traced: type = type(kind)(
            kind.__name__, (kind,), {"__getattribute__": get, "__module__": kind.__module__}
        )
        return traced


class _Config:
    """A config that records which of its values are read."""

    def __init__(self, config: object, path: str, reading: AttributeReads) -> None:
        vars(self).update(_real=config, _path=path, _reading=reading)

    def __getattr__(self, name: str) -> object:
        fields = vars(self)
        stored = getattr(fields["_real"], "attribute_map", {}).get(name, name)  # the name that vars() has
        return fields["_reading"].read(fields["_path"], f"config.{stored}", getattr(fields["_real"], name))

    def __setattr__(self, name: str, value: object) -> None:
        setattr(vars(self)["_real"], name, value)


class Uses:
    """How a number was used: as the ``sizes`` of axes, in a comparison for equality, or in some ``other``
    way; loops over a range are not seen.
    """

    def __init__(self) -> None:
        self.sizes = self.compared = self.other = False

    @property
    def seen(self) -> bool:
        """Whether any use was seen."""
        return self.sizes or self.compared or self.other


class Traced(int):
    """A whole number that records how it is used, and how results computed from it are.

    >>> uses = Uses()
    >>> heads = Traced(3, (uses,))
    >>> with _Sizes():
    ...     _ = torch.ones(2, 12).view(2, heads, 12 // heads)
    >>> uses.sizes, uses.other
    (True, False)
    >>> with _Sizes():
    ...     _ = torch.arange(5) < heads
    >>> uses.other
    True
    """

    uses: tuple[Uses, ...]

    def __new__(cls, value: int, uses: Iterable[Uses]) -> Traced:
        number = super().__new__(cls, value)
        number.uses = tuple(dict.fromkeys(uses))
        return number

    def other(self) -> None:
        """Record a use that may be as a position."""
        for use in self.uses:
            use.other = True

    def __eq__(self, value: object) -> bool:
        for use in self.uses:
            use.compared = True
        return int(self.real) == value

    def __ne__(self, value: object) -> bool:
        return not self == value

    def __hash__(self) -> int:
        return hash(self.real)


def _traced_operator(name: str) -> Callable[..., object]:
    plain = getattr(int, name)

    def operator(self: Traced, *others: object) -> object:
        result = plain(self, *others)
        if type(result) is not int:
            return result
        return Traced(result, (*self.uses, *(use for x in others if isinstance(x, Traced) for use in x.uses)))

    return operator


def _recorded_operator(name: str) -> Callable[..., object]:
    plain = getattr(int, name)

    def operator(self: Traced, *others: object) -> object:
        self.other()
        return plain(self, *others)

    return operator


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "rfloordiv", "mod", "rmod", "neg"):
    setattr(Traced, f"__{_name}__", _traced_operator(f"__{_name}__"))
for _name in ("lt", "le", "gt", "ge", "truediv", "rtruediv", "pow", "rpow", "float", "int", "divmod"):
    setattr(Traced, f"__{_name}__", _recorded_operator(f"__{_name}__"))


class _Sizes(TorchFunctionMode):
    """A context in which torch functions record the traced numbers among their arguments."""

    def __torch_function__(
        self, func: Function, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        for number in _numbers((args, kwargs)):
            if func in _SIZES:
                for use in number.uses:
                    use.sizes = True
            else:
                number.other()
        return func(*args, **(kwargs or {}))


def _numbers(value: object) -> Iterator[Traced]:
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
