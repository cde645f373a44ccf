"""The count of bytes: what is alive, what was, and nothing that was there before."""

import torch
from torch.utils.checkpoint import checkpoint

from manyheads.studies.tensor_memory import TensorMemory


def test_views_and_what_was_there_before_cost_nothing():
    before = torch.zeros(100)
    with TensorMemory() as memory:
        view = before.view(10, 10)[2:]
        before.add_(1)
        copy = view.clone()
    assert memory.peak == memory.live == copy.numel() * 4


def test_the_backward_pass_counts_and_checkpointing_lowers_the_peak():
    x = torch.randn(1000, requires_grad=True)

    def layer(y):
        return y.sin().cos().tanh()

    peaks = []
    for run in (layer, lambda y: checkpoint(layer, y, use_reentrant=False)):
        with TensorMemory() as memory:
            y = x
            for _ in range(10):
                y = run(y)
            del y
            forward = memory.peak
        with TensorMemory() as memory:
            y = x
            for _ in range(10):
                y = run(y)
            y.sum().backward()
        assert memory.peak >= forward
        x.grad = None
        peaks.append(memory.peak)
    assert peaks[1] < 0.7 * peaks[0]
