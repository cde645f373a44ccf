"""Cross-entropy with smoothed labels against torch's own, pieces and all."""

import pytest
import torch
import torch.nn.functional as F

from manyheads.tasks import label_smoothing


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_loss_and_gradient_are_torchs(smoothing, monkeypatch):
    monkeypatch.setattr(label_smoothing, "PIECE", 5 * 31)  # five rows at a time, and three in the end
    torch.manual_seed(0)
    logits = (9 * torch.randn(23, 31, dtype=torch.float64)).requires_grad_()
    labels = torch.randint(31, (23,))
    labels[::4] = label_smoothing.IGNORED
    wanted = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
    found = label_smoothing.cross_entropy(logits, labels, smoothing)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    slopes = [torch.autograd.grad(0.7 * loss, logits)[0] for loss in (found, wanted)]
    torch.testing.assert_close(*slopes, rtol=1e-12, atol=1e-14)
    with torch.no_grad():
        torch.testing.assert_close(label_smoothing.cross_entropy(logits, labels, smoothing), wanted.detach())


def test_large_logits_stay_finite():
    logits = torch.tensor([[1e4, 0.0], [-1e4, 0.0]], requires_grad=True)
    loss = label_smoothing.cross_entropy(logits, torch.tensor([0, 1]), 0.0)
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(logits.grad, torch.zeros(2, 2))


def test_a_second_gradient_of_the_same_loss_is_refused():
    logits = torch.randn(3, 5, requires_grad=True)
    loss = label_smoothing.cross_entropy(logits, torch.tensor([0, 1, 2]), 0.1)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="compute the loss again"):
        loss.backward()
