"""Captured calls of modules: what several of them got is held once, and as it was then."""

import torch
from torch import nn

from manyheads.surgery.verify import capture


class Adds(nn.Module):
    def forward(self, x, mask, kept):
        kept.append(x)
        return x + mask


class Layers(nn.Module):
    """Four layers that all get the mask and what came before; the second changes the mask in place."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Adds() for _ in range(4))

    def forward(self, x):
        mask, kept = torch.zeros(3), []
        for number, layer in enumerate(self.layers):
            x = layer(x, mask, kept)
            if number == 1:
                mask += 1
        return x


def test_arguments_that_come_again_are_copied_once_unless_they_changed():
    paths = [f"layers.{number}" for number in range(4)]
    captured, output = capture(Layers(), torch.ones(2, 3), {}, paths)
    masks = [captured[path][0].args[1] for path in paths]
    assert masks[0] is masks[1]
    assert masks[2] is masks[3]
    assert masks[0] is not masks[2]
    assert [mask.tolist() for mask in (masks[0], masks[2])] == [[0.0] * 3, [1.0] * 3]
    lists = [captured[path][0].args[2] for path in paths]
    assert [len(kept) for kept in lists] == [0, 1, 2, 3]
    assert lists[3][0] is lists[1][0]  # as a cache: every layer has the keys of those before it
    assert torch.equal(output, torch.full((2, 3), 3.0))


def test_what_a_call_changes_later_is_not_seen():
    (call,) = capture(Layers(), torch.ones(2, 3), {}, ["layers.0"])[0]["layers.0"]
    args, _ = call.arguments()
    args[1].add_(5)
    assert not call.args[1].any()
