"""Numbers as the page reads them: short lists as JSON, long ones as packed bytes, within a budget."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from manyheads.common.json_numbers import plain
from manyheads.view.document.contract import Dtype, Packed, StepValues

_FORMATS = {"uint8": "u1", "uint16": "<u2", "float32": "<f4"}
_LARGEST = {"uint8": 255, "uint16": 65535}


def packed(values: Tensor, dtype: Dtype) -> Packed:
    """A tensor as base64 of its little-endian bytes; integers stand for the range from 0 to 1.

    >>> packed(torch.tensor([[0.0, 0.5, 1.0]]), "uint16")
    {'dtype': 'uint16', 'shape': [1, 3], 'data': 'AAAAgP//'}
    """
    values = values.detach().cpu()
    if dtype != "float32":
        values = (values.double().clamp(0.0, 1.0) * _LARGEST[dtype]).round().to(torch.int32)
    data: bytes = values.numpy().astype(_FORMATS[dtype]).tobytes()
    return {"dtype": dtype, "shape": list(values.shape), "data": base64.b64encode(data).decode()}


def unpacked(value: Packed) -> Tensor:
    """The numbers of `packed`, between 0 and 1 where they are integers.

    >>> unpacked(packed(torch.tensor([0.0, 1.0]), "uint8"))
    tensor([0., 1.], dtype=torch.float64)
    """
    data = numpy.frombuffer(base64.b64decode(value["data"]), dtype=_FORMATS[value["dtype"]])
    numbers = torch.from_numpy(data.astype("f8")).reshape(value["shape"])
    return numbers / _LARGEST.get(value["dtype"], 1)


def short(values: Tensor, digits: int = 4) -> StepValues:
    """A tensor as nested lists of numbers with a few significant digits.

    >>> short(torch.tensor([[1.23456, 1e-7]]))
    [[1.235, 1e-07]]
    """
    exact = values.detach().double().cpu()
    size = exact.abs().clamp(min=1e-300).log10().floor()
    # dividing by powers of ten is exact where multiplying by tenths is not: the result has few digits in JSON
    up, down = (10.0 ** (digits - 1 - size).clamp(min=0), 10.0 ** (size - digits + 1).clamp(min=0))
    rounded = (exact / down * up).round() / up * down
    numbers: StepValues = rounded.tolist() if bool(rounded.isfinite().all()) else plain(rounded)
    return numbers


def byte_size(value: object) -> int:
    """About how many bytes a part of a document takes in a report: compressed, then as base64."""
    return len(zlib.compress(json.dumps(value).encode(), 1)) * 4 // 3


@dataclass
class Budget:
    """The bytes that are left for a document.

    >>> budget = Budget(100)
    >>> budget.takes([0] * 1000), budget.takes(list(range(1000))), budget.left > 0
    (True, False, True)
    """

    left: int

    def takes(self, value: object) -> bool:
        """Whether there is room for a part; if so, its bytes are taken."""
        needed = byte_size(value)
        if needed > self.left:
            return False
        self.left -= needed
        return True
