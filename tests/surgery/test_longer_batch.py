"""Batches made longer, for a cut to be held to."""

import torch
from torch import Tensor, nn

from manyheads.surgery.longer_batch import lengths, longer


class InTwo(nn.Module):
    """The first half of the queries, then the others, each reading all keys."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        parts = [(part @ k.mT / 2).softmax(-1) @ v for part in q.chunk(2, 2)]
        return self.o(torch.cat(parts, 2).transpose(1, 2).flatten(2))


class OneByOne(InTwo):
    """A call for each query."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        parts = [(part @ k.mT / 2).softmax(-1) @ v for part in q.split(1, 2)]
        return self.o(torch.cat(parts, 2).transpose(1, 2).flatten(2))


def length_of(model: nn.Module, wanted: int, enough: int) -> int:
    x = torch.randn(2, 3, 12)
    made = longer(model, (x,), lengths(model, (x,)), wanted, enough)
    assert made is not None
    return int(made[0][0].shape[1])


def test_pieces_of_the_queries_do_not_make_it_longer_than_wanted() -> None:
    assert 200 < length_of(InTwo(), 200, 50) < 260


def test_where_each_query_takes_a_call_enough_is_enough() -> None:
    assert 50 < length_of(OneByOne(), 200, 50) < 70


class RowByRow(InTwo):
    """A call for each row of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super(RowByRow, self).forward(row) for row in x.split(1)])


def test_a_batch_with_as_many_rows_as_tokens_gets_no_more_rows() -> None:
    x = torch.randn(3, 3, 12)
    model = RowByRow()
    made = longer(model, (x,), lengths(model, (x,)), 200, 50)
    assert made is not None
    assert made[0][0].shape[0] == 3
    assert made[0][0].shape[1] > 200


class BehindPatches(InTwo):
    """Twenty tokens of an image stand before those of the text."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([x[:, :1].expand(-1, 20, -1), x], 1)
        q, k, v = self.qkv(tokens).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        return self.o(((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_tokens_that_stay_do_not_make_it_longer_than_wanted() -> None:
    assert 1980 < length_of(BehindPatches(), 2000, 2000) < 2100
