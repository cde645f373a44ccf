"""watch against the materialised softmax, on real architectures built small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.helpers import models
from tests.helpers.models import eager, oracle, tokens
from torch import Tensor, nn

from manyheads.heads.watch import Watch, watch


def flat(output: Any) -> list[Tensor]:
    values = (
        output.values()
        if hasattr(output, "values")
        else output
        if isinstance(output, tuple | list)
        else [output]
    )
    return [x for value in values for x in (flat(value) if not isinstance(value, Tensor) else [value])
            if isinstance(x, Tensor)] if not isinstance(output, Tensor) else [output]  # fmt: skip


def seen_of(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Watch, Any]:
    """Watch one forward; its outputs must be the plain ones to the bit."""
    batch = batch | {"use_cache": False} if not hasattr(model, "embeddings") else batch
    with torch.no_grad():
        plain = model(**batch)
        with watch(model, "full") as seen:
            watched = model(**batch)
    for a, b in zip(flat(plain), flat(watched), strict=True):
        assert torch.equal(a, b)
    return seen, plain


def check(seen: Watch, attentions: dict[str, Tensor], counted: Tensor, tolerance: float = 2e-5) -> None:
    """Every metric of every head at these sites equals the oracle's."""
    table = seen.table
    sites = table["site"]
    assert list(dict.fromkeys(sites)) == list(attentions)
    for site, weights in attentions.items():
        rows = [i for i, name in enumerate(sites) if name == site]
        assert len(rows) == weights.shape[1]
        cross = table["kind"][rows[0]] == "cross"
        wanted = oracle(weights, counted)
        for name, value in wanted.items():
            if cross and name in ("self", "previous", "next", "distance", "local"):
                assert table[name][rows].isnan().all()
                continue
            torch.testing.assert_close(
                table[name][rows],
                value,
                atol=1e-3 if name == "distance_spread" else tolerance,  # a square root near zero
                rtol=tolerance,
                msg=lambda m, n=name, s=site: f"{s} {n}: {m}",
            )
        assert table["tokens"][rows].tolist() == [float(counted.sum())] * len(rows)


DECODERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "gpt2": (models.gpt2, "transformer.h.{}.attn"),
    "llama": (models.llama, "model.layers.{}.self_attn"),
    "gemma2": (models.gemma2, "layers.{}.self_attn"),
    "bloom": (models.bloom, "h.{}.self_attention"),
}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name: str, implementation: str) -> None:
    make, path = DECODERS[name]
    model, batch = make(), tokens()
    if name in ("gpt2", "llama"):
        model.set_attn_implementation(implementation)
    seen, _ = seen_of(model, batch)
    weights = eager(model, batch)
    check(seen, {path.format(i): w for i, w in enumerate(weights)}, batch["attention_mask"].bool())
    assert set(seen.table["kind"]) == {"causal"}
    assert seen.table["layer"] == [i for i in range(2) for _ in range(weights[0].shape[1])]
    assert not seen.missed


def test_left_padding_is_not_counted() -> None:
    model, batch = models.llama(), tokens()
    batch = {name: value.flip(1) for name, value in batch.items()}
    seen, _ = seen_of(model, batch)
    weights = eager(model, batch)
    check(
        seen,
        {f"model.layers.{i}.self_attn": w for i, w in enumerate(weights)},
        batch["attention_mask"].bool(),
    )


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_bert(implementation: str) -> None:
    model, batch = models.bert(attn_implementation=implementation), tokens()
    seen, _ = seen_of(model, batch)
    weights = eager(model, batch)
    check(
        seen,
        {f"encoder.layer.{i}.attention.self": w for i, w in enumerate(weights)},
        batch["attention_mask"].bool(),
    )
    assert set(seen.table["kind"]) == {"self"}


def test_shared_weights_have_numbered_sites() -> None:
    model, batch = models.albert(), tokens()
    seen, _ = seen_of(model, batch)
    weights = eager(model, batch)
    path = "encoder.albert_layer_groups.0.albert_layers.0.attention"
    check(
        seen,
        {path + end: w for end, w in zip(("", "#2", "#3"), weights, strict=True)},
        batch["attention_mask"].bool(),
    )
    assert seen.table["layer"] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_t5_has_three_stacks_and_position_biases() -> None:
    model, batch = models.t5(), tokens()
    batch["decoder_input_ids"] = tokens(seed=1)["input_ids"]
    seen, _ = seen_of(model, batch)
    real = batch["attention_mask"].bool()
    both = (
        eager(model, batch, "encoder_attentions"),
        eager(model, batch, "decoder_attentions"),
        eager(model, batch, "cross_attentions"),
    )
    sites = {}
    for i in range(2):
        sites[f"encoder.block.{i}.layer.0.SelfAttention"] = (both[0][i], real, "self")
        sites[f"decoder.block.{i}.layer.0.SelfAttention"] = (both[1][i], torch.ones_like(real), "causal")
        sites[f"decoder.block.{i}.layer.1.EncDecAttention"] = (both[2][i], torch.ones_like(real), "cross")
    assert {site.name: site.kind for site in seen.sites} == {
        name: kind for name, (_, _, kind) in sites.items()
    }
    assert {site.name: site.layer for site in seen.sites} == {name: int(name[14]) for name in sites}
    for site in seen.sites:
        weights, counted, _ = sites[site.name]
        part = type("Part", (), {"table": only(seen.table, site.name)})
        check(part, {site.name: weights}, counted)  # type: ignore[arg-type]


def only(table: Any, site: str) -> Any:
    from manyheads.heads.table import HeadTable

    rows = [i for i, name in enumerate(table["site"]) if name == site]
    return HeadTable(
        [table.rows[i] for i in rows], table.tokens[rows], {m: v[:, rows] for m, v in table.sums.items()}
    )


def test_learned_sinks_take_their_share() -> None:
    model, batch = models.gpt_oss(), tokens()
    seen, _ = seen_of(model, batch)
    weights = eager(model, batch)
    real = batch["attention_mask"].bool()
    for i, w in enumerate(weights):
        p = w.double()  # the keys' part of the softmax
        assert (p.sum(-1) < 0.999).any()
        sink = 1 - p.sum(-1)
        entropy = -torch.special.xlogy(p, p).sum(-1) - torch.special.xlogy(sink, sink)
        rows = [n for n, site in enumerate(seen.table["site"]) if site == f"layers.{i}.self_attn"]

        def mean(x: Tensor) -> Tensor:
            return torch.where(real[:, None], x, 0.0).sum((0, 2)) / real.sum()

        for name, value in {
            "entropy": entropy,
            "self": p.diagonal(dim1=-2, dim2=-1),
            "first": p[..., 0],
            "confidence": torch.maximum(p.amax(-1), sink),
            "effective_keys": 1 / ((p**2).sum(-1) + sink**2),
        }.items():
            torch.testing.assert_close(seen.table[name][rows], mean(value), atol=1e-5, rtol=1e-5)
    assert seen.table["kv_head"][:6] == [0, 0, 1, 1, 2, 2]


def test_whisper() -> None:
    model, batch = models.whisper(), models.whisper_inputs()
    seen, _ = seen_of(model, batch)
    kinds = {site.name: site.kind for site in seen.sites}
    assert kinds == {
        f"{side}.layers.{i}.{name}": kind
        for side, name, kind in (
            ("encoder", "self_attn", "self"), ("decoder", "self_attn", "causal"),
            ("decoder", "encoder_attn", "cross"),
        )
        for i in range(2)
    }  # fmt: skip
    everyone = torch.ones(3, 5, dtype=torch.bool)
    for key, path in (
        ("encoder_attentions", "encoder.layers.{}.self_attn"),
        ("decoder_attentions", "decoder.layers.{}.self_attn"),
        ("cross_attentions", "decoder.layers.{}.encoder_attn"),
    ):
        for i, weights in enumerate(eager(model, batch, key)):
            part = type("Part", (), {"table": only(seen.table, path.format(i))})
            check(part, {path.format(i): weights}, everyone)  # type: ignore[arg-type]


def test_vit() -> None:
    model, batch = models.vit(), {"pixel_values": torch.randn(3, 3, 6, 6)}
    with torch.no_grad(), watch(model, "full") as seen:
        model(**batch)
    weights = eager(model, batch)
    names = [site.name for site in seen.sites]
    check(seen, dict(zip(names, weights, strict=True)), torch.ones(3, 5, dtype=torch.bool))
    assert set(seen.table["kind"]) == {"self"}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_counts_each_token_once(cache: str, implementation: str) -> None:
    """Decoding with a cache gives what one forward over the whole text gives."""
    model = models.llama(attn_implementation=implementation)
    ids = tokens(batch=2)["input_ids"]
    with watch(model, "full") as seen:
        text = model.generate(
            ids, max_new_tokens=5, do_sample=False, cache_implementation=cache, eos_token_id=None
        )
    assert text.shape == (2, 12)
    weights = eager(model, {"input_ids": text[:, :-1]})
    check(
        seen,
        {f"model.layers.{i}.self_attn": w for i, w in enumerate(weights)},
        torch.ones(2, 11, dtype=torch.bool),
    )
    assert set(seen.table["kind"]) == {"causal"}


def test_shares_on_tokens_are_counted_while_the_keys_are_the_tokens_at_hand() -> None:
    """While decoding, most keys are in the cache, and nobody knows which tokens they were."""
    model, ids = models.llama(), tokens(batch=2)["input_ids"]
    chosen = ids[0, :3].tolist()
    with watch(model, tokens={"chosen": chosen}) as seen:
        model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None)
    with torch.no_grad(), watch(model, tokens={"chosen": chosen}) as of_prompt:
        model(ids)
    assert seen.table["tokens"].tolist() == [22.0] * 12
    assert torch.equal(seen.table.sums["chosen"], of_prompt.table.sums["chosen"])
    weights = eager(model, {"input_ids": ids})[1]
    share = (weights.double() * torch.isin(ids, torch.tensor(chosen))[:, None, None]).sum(-1).mean((0, 2))
    torch.testing.assert_close(seen.table["chosen"][6:], share, rtol=1e-5, atol=1e-6)


def test_generate_with_beams_of_an_encoder_and_decoder() -> None:
    model, batch = models.t5(), tokens()
    with watch(model) as seen:
        model.generate(**batch, max_new_tokens=5, num_beams=2, eos_token_id=None)
    kinds = {"encoder": ["self"], "decoder": ["causal", "cross"]}
    assert [site.kind for site in seen.sites] == kinds["encoder"] * 2 + kinds["decoder"] * 2
    tokens_seen = dict(zip(seen.table["site"], seen.table["tokens"].tolist(), strict=True))
    assert tokens_seen["encoder.block.1.layer.0.SelfAttention"] == batch["attention_mask"].sum()
    assert tokens_seen["decoder.block.1.layer.0.SelfAttention"] == 5 * 6  # steps, sequences * beams
    assert tokens_seen["decoder.block.1.layer.1.EncDecAttention"] == 5 * 6
