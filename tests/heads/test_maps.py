"""maps returns the exact rows of the heads asked for, pooled when they are long."""

from __future__ import annotations

import pytest
import torch
from tests.helpers import models
from tests.helpers.models import tokens

from manyheads.heads.maps import maps


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_maps_equal_the_models_own_weights(implementation: str) -> None:
    model, batch = models.llama(attn_implementation=implementation), tokens()
    found = maps(model, batch, {1: [4, 0], "model.layers.0.self_attn": [2]})
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(**batch, output_attentions=True).attentions
    assert list(found) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    real = batch["attention_mask"].bool()
    for site, heads, wanted in (("0", (2,), weights[0][:, [2]]), ("1", (4, 0), weights[1][:, [4, 0]])):
        one = found[f"model.layers.{site}.self_attn"]
        assert one.heads == heads
        torch.testing.assert_close(one.weights.transpose(1, 2)[real], wanted.transpose(1, 2)[real])
    rows = maps(model, batch, {1: [4]}, queries=[6, -2, 0])["model.layers.1.self_attn"]
    assert rows.queries == (6, 5, 0)
    torch.testing.assert_close(rows.weights[0], weights[1][0, [4]][:, [6, 5, 0]])


def test_sinks_keep_their_share() -> None:
    model, batch = models.gpt_oss(), tokens()
    found = maps(model, batch, {0: [1]})["layers.0.self_attn"]
    with torch.no_grad():
        weights = model(**batch, output_attentions=True).attentions[0]
    torch.testing.assert_close(found.weights, weights[:, [1]])


def test_long_maps_are_pooled_and_rows_still_sum_to_one() -> None:
    model, batch = models.bert(), tokens()
    site = "encoder.layer.0.attention.self"
    whole = maps(model, batch, {0: [1]})[site].weights
    pooled = maps(model, batch, {0: [1]}, size=3)[site]
    assert (pooled.row_size, pooled.column_size) == (3, 3)
    assert pooled.weights.shape == (3, 1, 3, 3)
    torch.testing.assert_close(pooled.weights[..., 1, 0], whole[..., 3:6, 0:3].sum(-1).mean(-1))
    torch.testing.assert_close(pooled.weights[..., 2, 2], whole[..., 6:, 6:].sum(-1).mean(-1))
    torch.testing.assert_close(pooled.weights.sum(-1), torch.ones(3, 1, 3))


def test_errors() -> None:
    model, batch = models.bert(), tokens()
    with pytest.raises(ValueError, match="7 is not among the 7 queries"):
        maps(model, batch, {0: [1]}, queries=[7])
    with pytest.raises(ValueError, match="layer 5 was never called"):
        maps(model, batch, {5: [1]})
    with pytest.raises(ValueError, match="size: expected at least 1"):
        maps(model, batch, {0: [1]}, size=0)
