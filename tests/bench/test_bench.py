"""The arithmetic behind the benchmark tables, on made-up numbers: nothing here is timed."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/ is not installed, it lives beside src/

from bench import decoders, generation, harness, longest, memory, peers, plain


def test_a_factor_up_and_the_same_factor_down_cancel() -> None:
    assert harness.geometric_mean([0.5, 2.0, 1.0]) == pytest.approx(1.0)
    assert harness.geometric_mean([2.0, 8.0]) == pytest.approx(4.0)


def test_the_ratio_is_to_the_fastest_peer_and_above_one_when_we_are_faster() -> None:
    times = {"ours": 2.0, "slow": 9.0, "fast": 3.0}
    assert harness.against(times, "ours", ["slow", "fast"]) == ("fast", 1.5)


def test_a_race_calls_everyone_and_lets_the_slow_ones_go(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = [0.0], {"hare": 0, "snail": 0}
    monkeypatch.setattr(harness.time, "perf_counter", lambda: now[0])

    def runner(name: str, seconds: float):
        def run() -> None:
            now[0] += seconds
            calls[name] += 1

        return run

    best = harness.race({"hare": runner("hare", 0.01), "snail": runner("snail", 0.03)}, quick=True)
    assert best == pytest.approx({"hare": 0.01, "snail": 0.03})
    assert calls == {"hare": 6, "snail": 2}  # the first is to warm up; the snail leaves after two


def test_tables_are_markdown_and_say_what_was_reached() -> None:
    assert harness.table(["a", "b"], [["x", 1], ["long", 23]]).splitlines() == [
        "| a    |  b |",
        "|------|---:|",
        "| x    |  1 |",
        "| long | 23 |",
    ]
    verdicts = harness.targets(("faster", 2.1, ">=", 2), ("lighter", 0.2, "<=", 0.1)).splitlines()[2:]
    assert [line.split("|")[-2].strip() for line in verdicts] == ["reached", "NOT REACHED"]


@pytest.mark.parametrize(("constant", "per_token", "per_pair"), [(3e8, 2e4, 250.0), (3e8, 7e4, 0.0)])
def test_the_fit_finds_the_law_and_its_longest_length(
    constant: float, per_token: float, per_pair: float
) -> None:
    lengths = [509, 1021, 2039, 4093]
    sizes = [constant + per_token * n + per_pair * n * n for n in lengths]
    found = longest.fit(lengths, sizes)
    assert found == pytest.approx((constant, per_token, per_pair), rel=1e-6)
    assert found.longest(sizes[2] + 1) == lengths[2]
    assert found.longest(constant / 2) == 0


def test_a_square_term_lost_in_noise_is_left_out() -> None:
    lengths = [4096, 8192, 16384]
    found = longest.fit(
        lengths, [1e6 + 1000.0 * n + noise for n, noise in zip(lengths, (1e4, -2e4, 1e4), strict=True)]
    )
    assert found.per_pair == 0
    assert found.per_token == pytest.approx(1000, rel=0.02)


def test_the_fit_has_no_negative_terms() -> None:
    found = longest.fit([512, 1024, 1536], [435e6, 596e6, 874e6])
    assert min(found) >= 0
    assert found.per_pair > 0


def test_a_peer_is_left_out_where_its_maps_would_not_fit() -> None:
    shape = {"d_model": 768, "heads": 12, "batch": 1}
    assert plain._fits("textbook", "forward+backward", length=4096, **shape)
    assert not plain._fits("textbook", "forward+backward", length=8192, **shape)
    assert plain._fits("x-transformers, flash", "forward+backward", length=8192, **shape)


def test_extra_memory_is_what_came_on_top() -> None:
    assert memory.Peak(before=100, highest=350, seconds=1.0).extra == 250


def test_the_textbook_peer_computes_what_torch_computes() -> None:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64)
    nn.init.normal_(theirs.in_proj_bias)
    ours = peers.Textbook(12, 3).double()
    parts = zip(theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3), strict=True)
    with torch.no_grad():
        for linear, (weight, bias) in zip((ours.query, ours.key, ours.value), parts, strict=True):
            linear.weight.copy_(weight)
            linear.bias.copy_(bias)
    ours.output.load_state_dict(theirs.out_proj.state_dict())
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x, x, x)[0])


def test_the_nanogpt_like_peer_computes_what_our_decoder_does() -> None:
    shape = decoders.Shape(width=12, heads=3, layers=2, context=11, vocabulary=23)
    ours, nano = (decoders.build(name, shape).double().eval() for name in (decoders.OURS, decoders.NANO))
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in nano.parameters())
    with torch.no_grad():
        ours.embedding.weight.copy_(nano.tokens.weight)
        ours.positions.weight.copy_(nano.positions.weight)
        for block, peer in zip(ours.blocks, nano.blocks, strict=True):
            attention, inputs = block.attention, peer.attention.inputs.weight.chunk(3)
            for linear, part in zip((attention.query, attention.key, attention.value), inputs, strict=True):
                linear.weight.copy_(part)
            attention.output.weight.copy_(peer.attention.output.weight)
            block.feed_forward.up.weight.copy_(peer.feed_forward[0].weight)
            block.feed_forward.down.weight.copy_(peer.feed_forward[2].weight)
        ids = torch.randint(23, (3, 7))
        torch.testing.assert_close(ours(ids), nano(ids), rtol=1e-10, atol=1e-10)


def test_a_step_reads_the_weights_and_the_keys_and_values_once() -> None:
    shape = decoders.Shape(width=12, heads=3, layers=2, context=50, vocabulary=23)
    model = decoders.build(decoders.BIASED, shape)
    weights = sum(p.numel() for name, p in model.named_parameters() if name != "positions.weight")
    assert generation.read_bytes(shape, prompt=7, new=6) == 4 * (weights + 2 * 2 * 12 * 10)


@pytest.mark.parametrize("name", [decoders.OURS, decoders.BIASED, decoders.NANO])
def test_an_update_lowers_the_loss(name: str) -> None:
    update = decoders.step(name, decoders.Shape(width=12, heads=3, layers=1, context=11, dropout=0.1), 3)
    losses = [update() for _ in range(30)]
    assert sum(losses[-5:]) < sum(losses[:5])
