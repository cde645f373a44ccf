"""What is seen of heads while they learn, against plain computations."""

import pytest
import torch

from manyheads.nn.transformers import Decoder, Seq2Seq
from manyheads.training.head_monitor import HeadMonitor

torch.manual_seed(0)
IDS = torch.randint(17, (3, 11))


def decoder():
    torch.manual_seed(1)
    return Decoder(15, heads=3, layers=2, vocabulary=17).double()


def learn(model):
    return torch.nn.functional.cross_entropy(model(IDS).flatten(0, 1), IDS.roll(-1, 1).flatten())


def outputs(model):
    """The output of every head, (batch, heads, queries, d_value) by layer, with gradients."""
    kept = []
    hooks = [
        block.attention.output.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
        for block in model.blocks
    ]
    loss = learn(model)
    for hook in hooks:
        hook.remove()
    gradients = torch.autograd.grad(loss, kept)
    return [
        (o.unflatten(-1, (3, 5)).transpose(1, 2), g.unflatten(-1, (3, 5)).transpose(1, 2))
        for o, g in zip(kept, gradients, strict=True)
    ]


def cka(x, y):
    """Linear CKA of (tokens, d_value) each, without the bias of few tokens, from the matrices of products."""
    n = len(x)
    k, l = ((z @ z.T).fill_diagonal_(0.0) for z in (x, y))

    def dependence(a, b):
        both = a.sum() * b.sum() / ((n - 1) * (n - 2))
        return ((a @ b).trace() + both - 2 / (n - 2) * (a @ b).sum()).item()

    return dependence(k, l) / (dependence(k, k) * dependence(l, l)) ** 0.5


def test_gradients_and_redundancy_are_those_of_the_formulas():
    model = decoder()
    with HeadMonitor(model) as monitor:
        learn(model).backward()
    table = monitor.table
    row = 0
    for output, gradient in outputs(model):
        for head in range(3):
            assert table["gradient_norm"][row] == pytest.approx(gradient[:, head].norm().item(), rel=1e-5)
            x = [output[:, h].reshape(-1, 5).detach() for h in range(3)]
            others = [cka(x[head], x[h]) for h in range(3) if h != head]
            assert table["redundancy"][row] == pytest.approx(max(*others, 0.0), abs=1e-6)
            row += 1
    assert not table["dead"].any()


def test_looking_changes_nothing():
    plain, seen = decoder(), decoder()
    learn(plain).backward()
    with HeadMonitor(seen):
        learn(seen).backward()
    for a, b in zip(plain.parameters(), seen.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_a_head_without_influence_is_dead():
    model = decoder()
    with torch.no_grad():
        model.blocks[1].attention.output.weight[:, 5:10] = 0  # what head 1 says, nobody hears
    with HeadMonitor(model) as monitor:
        learn(model).backward()
    assert monitor.table["dead"].tolist() == [0, 0, 0, 0, 1, 0]


def test_twins_are_redundant():
    model = decoder()
    attention = model.blocks[0].attention
    with torch.no_grad():
        for part in (attention.query, attention.key, attention.value):
            part.weight[10:] = part.weight[:5]
            part.bias[10:] = part.bias[:5]
    with HeadMonitor(model) as monitor:
        learn(model).backward()
    redundancy = monitor.table["redundancy"]
    assert redundancy[[0, 2]].tolist() == pytest.approx([1.0, 1.0])
    assert redundancy[1] < 0.99


def test_padding_cross_attention_and_checkpointing():
    model = Seq2Seq(12, heads=2, layers=1, vocabulary=17, checkpoint=True)
    lengths = torch.tensor([11, 5, 2])
    with HeadMonitor(model) as monitor:
        model(IDS, IDS, source_lengths=lengths, target_lengths=lengths).sum().backward()
    table = monitor.table
    assert len(table) == 6
    assert bool((table["gradient_norm"] > 0).all())
    assert sorted(set(table["kind"])) == ["causal", "cross", "self"]


def test_one_head_alone_is_redundant_with_nobody():
    model = Decoder(6, heads=1, layers=1, vocabulary=17)
    with HeadMonitor(model) as monitor:
        learn(model).backward()
    assert monitor.table["redundancy"].isnan().all()
