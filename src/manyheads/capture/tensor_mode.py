"""A torch function mode for tensors alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from manyheads.common.types import Arguments, Function, Keywords


class TensorMode(TorchFunctionMode):
    """Leaves calls with what stands for a tensor to its class, which calls again with that tensor."""

    def __torch_function__(
        self, func: Function, types: Iterable[Any], args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        for kind in types:
            if not issubclass(kind, Tensor):
                with self:
                    return kind.__torch_function__(func, types, args, kwargs or {})
        return self.called(func, args, kwargs or {})

    def called(self, func: Function, args: Arguments, kwargs: Keywords) -> object:
        """The result of a function of tensors."""
        raise NotImplementedError
