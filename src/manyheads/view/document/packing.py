"""Numbers as the page reads them: few as they are, many as packed bytes, within a budget of bytes."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from manyheads.common.json_numbers import plain

Dtype = Literal["uint8", "uint16", "float32"]
_FORMATS = {"uint8": "u1", "uint16": "<u2", "float32": "<f4"}
_LARGEST = {"uint8": 255, "uint16": 65535}


def packed(values: Tensor, dtype: Dtype) -> dict[str, Any]:
    """A tensor as base64 of its little-endian bytes; whole numbers stand for the range from 0 to 1.

    >>> packed(torch.tensor([[0.0, 0.5, 1.0]]), "uint16")
    {'dtype': 'uint16', 'shape': [1, 3], 'data': 'AAAAgP//'}
    """
    values = values.detach().cpu()
    if dtype != "float32":
        values = (values.double().clamp(0.0, 1.0) * _LARGEST[dtype]).round().to(torch.int32)
    data: bytes = values.numpy().astype(_FORMATS[dtype]).tobytes()
    return {"dtype": dtype, "shape": list(values.shape), "data": base64.b64encode(data).decode()}


def unpacked(value: dict[str, Any]) -> Tensor:
    """The numbers of `packed`, between 0 and 1 where they were whole.

    >>> unpacked(packed(torch.tensor([0.0, 1.0]), "uint8"))
    tensor([0., 1.], dtype=torch.float64)
    """
    import numpy

    found = numpy.frombuffer(base64.b64decode(value["data"]), dtype=_FORMATS[value["dtype"]])
    numbers = torch.from_numpy(found.astype("f8")).reshape(value["shape"])
    return numbers / _LARGEST.get(value["dtype"], 1)


def short(values: Tensor, digits: int = 4) -> Any:
    """A tensor as nested lists of numbers with a few digits.

    >>> short(torch.tensor([[1.23456, 1e-7]]))
    [[1.235, 1e-07]]
    """
    exact = values.detach().double().cpu()
    size = exact.abs().clamp(min=1e-300).log10().floor()
    # tenths are exact to divide by, and not to multiply with: what comes out is written with few digits
    up, down = (10.0 ** (digits - 1 - size).clamp(min=0), 10.0 ** (size - digits + 1).clamp(min=0))
    found = (exact / down * up).round() / up * down
    return found.tolist() if bool(found.isfinite().all()) else plain(found)


def weight(value: Any) -> int:
    """About how many bytes a part of a document takes in a report: compressed, and as text again."""
    return len(zlib.compress(json.dumps(value).encode(), 1)) * 4 // 3


@dataclass
class Budget:
    """Bytes that are left.

    >>> budget = Budget(100)
    >>> budget.takes([0] * 1000), budget.takes(list(range(1000))), budget.left > 0
    (True, False, True)
    """

    left: int

    def takes(self, value: Any) -> bool:
        """Whether there is room for a part; if so, it is taken."""
        needed = weight(value)
        if needed > self.left:
            return False
        self.left -= needed
        return True
