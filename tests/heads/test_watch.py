"""What watch promises besides the numbers: nothing changes, nothing counts twice, nothing is hidden."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.helpers import models
from tests.helpers.models import Nano, oracle, tokens
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from manyheads.heads.silence import silence
from manyheads.heads.watch import watch
from manyheads.nn import mask
from manyheads.nn.multihead import MultiHeadAttention

FULL = [
    "entropy", "entropy_normalised", "effective_keys", "confidence", "distance", "distance_spread", "self",
    "previous", "next", "first", "local", "output_norm", "largest_logit",
]  # fmt: skip


def test_the_columns_are_those_of_the_design() -> None:
    model, batch = models.bert(), tokens()
    with watch(model, "full", tokens={"special": [5], "rare": [6]}) as seen:
        model(**batch)
    metrics = [*FULL[:10], "special", "rare", *FULL[10:]]
    keys = ["site", "layer", "head", "original_head", "kv_head", "kind", "tokens"]
    assert seen.table.columns == [*keys, *(c for name in metrics for c in (name, f"{name}_se"))]
    with watch(model) as seen:
        model(**batch)
    core = ["entropy", "entropy_normalised", "self", "previous", "next", "first", "output_norm"]
    assert seen.table.metrics == core


def test_training_with_dropout_is_the_same_to_the_bit() -> None:
    results = []
    for watched in (False, True):
        model = models.bert(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3).train()
        torch.manual_seed(5)
        if watched:
            with watch(model, "full"):
                out = model(**tokens())[0]
                out.pow(2).sum().backward()
        else:
            out = model(**tokens())[0]
            out.pow(2).sum().backward()
        results.append(
            [out, *(p.grad for p in model.parameters() if p.grad is not None), torch.get_rng_state()]
        )
    assert len(results[0]) == len(results[1]) > 10
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# oneDNN's bfloat16 kernels die on processors that announce AMX and do not allow it, as some sandboxes do.
@torch.backends.mkldnn.flags(enabled=False)
@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("how", ["autocast", "bfloat16"])
def test_low_precision_models_get_exact_numbers_of_their_own_scores(how: str) -> None:
    """The statistics are those of the model's own low-precision queries and keys, computed in float32."""
    torch.manual_seed(0)
    layer = MultiHeadAttention(16, 2)
    x = 4 * torch.randn(3, 7, 16)
    if how == "bfloat16":
        layer, x = layer.bfloat16(), x.bfloat16()
    kept: list[Tensor] = []
    for part in (layer.query, layer.key):
        part.register_forward_hook(lambda module, args, out: kept.append(out))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        with watch(layer, "full") as seen:
            out = layer(x)
        assert torch.is_autocast_enabled("cpu") == (how == "autocast")
    assert out.dtype == torch.bfloat16
    q, k = (part.view(3, 7, 2, 8).transpose(1, 2).double() for part in kept)
    weights = (q @ k.mT * 8**-0.5).softmax(-1)
    assert kept[0].dtype == torch.bfloat16
    for name, value in oracle(weights, torch.ones(3, 7, dtype=torch.bool)).items():
        exact = 1e-3 if name == "distance_spread" else 1e-5  # a square root near zero
        torch.testing.assert_close(seen.table[name], value, atol=exact, rtol=1e-5)


def test_checkpointing_does_not_count_twice() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nano = Nano().eval()

        def forward(self, ids: Tensor) -> Tensor:
            x = self.nano.embedding(ids)
            for layer, reentrant in zip(self.nano.h, (True, False), strict=True):
                x = x + checkpoint(layer, x, use_reentrant=reentrant)
            return x

    model, ids = Checkpointed(), tokens()["input_ids"]
    with watch(model) as seen:
        model(ids).sum().backward()
    assert seen.table["tokens"].tolist() == [21.0] * 6


def test_shares_on_tokens_and_segments() -> None:
    model, batch = models.t5(), tokens()
    batch["decoder_input_ids"] = tokens(seed=1)["input_ids"]
    groups = {
        "special": batch["input_ids"][0, :2].tolist(),
        "rare": batch["decoder_input_ids"][0, 2:3].tolist(),
    }
    segments = torch.randint(0, 2, (3, 7))
    with torch.no_grad(), watch(model, tokens=groups, segments=["question", "passage"]) as seen:
        seen.segment(segments)
        model(**batch)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(**batch, output_attentions=True)
    table = seen.table
    for row in table:
        side = row["site"][:7]
        kind = {"cross": "cross_attentions", "self": "encoder_attentions", "causal": "decoder_attentions"}[
            row["kind"]
        ]
        weights = out[kind][row["layer"]][:, row["head"]].double()  # (batch, queries, keys)
        ids = batch["input_ids"] if row["kind"] != "causal" else batch["decoder_input_ids"]
        counted = batch["attention_mask"].bool() if side == "encoder" else torch.ones(3, 7, dtype=torch.bool)
        for name, chosen in (
            *((name, torch.isin(ids, torch.tensor(group))) for name, group in groups.items()),
            ("question", segments == 0),
            ("passage", segments == 1),
        ):
            share = (weights * chosen[:, None]).sum(-1)[counted].mean()
            assert row[name] == pytest.approx(share.item(), abs=1e-5)
    assert max(table["special"]) > 0.2


def test_profiles_and_received_attention() -> None:
    model, batch = models.gpt2(), tokens()
    with watch(model, "full", profiles=True) as seen:
        model(**batch)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(**batch, output_attentions=True).attentions[1].double()
    real = batch["attention_mask"].bool()
    site = "transformer.h.1.attn"
    entropy = -torch.special.xlogy(weights, weights).sum(-1)
    for name, value in (("entropy", entropy), ("first", weights[..., 0])):
        wanted = (value * real[:, None]).sum(0) / real.sum(0)
        torch.testing.assert_close(seen.table.profile(site, name), wanted, atol=1e-5, rtol=1e-5)
    received = (weights * real[:, None, :, None]).sum(2)  # from queries that are no padding
    wanted = received.sum(0) / real.sum(0)
    torch.testing.assert_close(seen.table.profile(site, "received"), wanted, atol=1e-5, rtol=1e-5)
    with pytest.raises(KeyError, match="no profile of 'colour'"):
        seen.table.profile(site, "colour")


def test_masks_of_our_own_module() -> None:
    """Lengths, windows and slopes without any tensor that says who may attend."""
    torch.manual_seed(0)
    layer = MultiHeadAttention(10, 2, d_key=5, d_value=3).double()
    x, lengths = 2 * torch.randn(3, 7, 10).double(), torch.tensor([7, 4, 1])
    conditions = mask.padding(lengths) & mask.alibi(2) & mask.window(3)
    with torch.no_grad(), watch(layer, "full") as seen:
        _, weights = layer(x, mask=conditions, causal=True, return_weights=True)
    counted = torch.arange(7) < lengths[:, None]
    counted &= weights.sum((1, 3)) > 0
    for name, value in oracle(weights, counted).items():
        torch.testing.assert_close(seen.table[name], value)
    assert set(seen.table["kind"]) == {"causal"}


class LinearAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.elu(x) @ (F.elu(x).mT @ x)


def test_missed_names_what_ran_unseen() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen, self.hidden, self.unused = (
                nn.MultiheadAttention(6, 2),
                LinearAttention(),
                LinearAttention(),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.hidden(self.seen(x, x, x)[0])

    model = Both()
    with watch(model) as seen:
        model(torch.randn(2, 5, 6))
    assert list(seen.missed) == ["hidden"]
    assert "LinearAttention" in seen.missed["hidden"]


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_scripted_part_is_missed_when_it_hides_attention() -> None:
    class Sdpa(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    x = torch.randn(2, 3, 5, 6)
    model = nn.Sequential(torch.jit.trace(Sdpa(), x), torch.jit.trace(nn.Linear(6, 6), x), Sdpa())
    with watch(model) as seen:
        model(x)
    assert "traced or scripted" in seen.missed["0"]
    assert "1" not in seen.missed
    assert [site.name for site in seen.sites] == ["2"]


def test_watching_nothing_is_an_error_that_says_why() -> None:
    with watch(nn.Sequential(LinearAttention())) as seen:
        pass
    with pytest.raises(ValueError, match="was not run while watched"):
        _ = seen.table
    with seen:
        seen.model(torch.ones(2, 3, 4))
    with pytest.raises(ValueError, match=r"no attention was seen in the model; tokens are mixed unseen in 0"):
        _ = seen.table


def test_watch_inside_silence_and_around_it() -> None:
    """Statistics of the silenced model; the silence does not reach into the watcher's own work."""
    model, batch = models.gpt2(attn_implementation="eager"), tokens()
    tables = []
    with torch.no_grad():
        with silence(model, {0: [1]}), watch(model, "full") as seen:
            model(**batch)
        tables.append(seen.table)
        with watch(model, "full") as seen, silence(model, {0: [1]}):
            model(**batch)
        tables.append(seen.table)
    assert tables[0]["site"] == tables[1]["site"]
    torch.testing.assert_close(tables[0]["entropy"], tables[1]["entropy"])
    assert tables[0]["output_norm"][1] == 0.0 != tables[0]["output_norm"][0]


def test_a_watched_model_can_be_copied_and_forwards_called_from_parts() -> None:
    model = Nano().eval()
    with watch(model) as seen:
        copy.deepcopy(model)(torch.zeros(2, 5, dtype=torch.long))
        model.h[1](torch.randn(2, 5, 15))
    assert [site.name for site in seen.sites] == ["h.1"]


def test_arguments() -> None:
    model = Nano()
    for wrong, message in (
        ({"statistics": "all"}, "expected 'core', 'logits' or 'full', got 'all'"),
        ({"tokens": {"entropy": [1]}}, "'entropy' is already the name of a column"),
    ):
        with pytest.raises(ValueError, match=message):
            watch(model, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="name the segments first"):
        watch(model).segment(torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="expected integer ids"):
        watch(model, segments=["a"]).segment(torch.zeros(2, 3))


def test_original_heads_of_a_cut_model() -> None:
    model: Any = Nano().eval()
    model.original_heads = {"h.1": [1, 4, 6]}
    with watch(model) as seen:
        model(torch.zeros(2, 5, dtype=torch.long))
    assert seen.table["original_head"] == [0, 1, 2, 1, 4, 6]


def test_empty_tensors_pass_by():
    class Empties(nn.Module):
        def forward(self, x):
            return x[:, :0].reshape(x.shape[0], x.shape[1], 0).sum() + x

    model = nn.Sequential(Empties())
    with watch(model) as seen:
        model(torch.randn(2, 3, 4))
    assert not seen.sites


def test_queries_that_see_one_key_have_no_normalised_entropy() -> None:
    """Rounding leaves them an entropy a little off zero, which must not be divided by a count of zero."""

    class OnlyItself(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            alone = torch.eye(x.shape[2], dtype=torch.bool)
            return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=alone)

    torch.manual_seed(0)
    with torch.no_grad(), watch(nn.Sequential(OnlyItself()), "full") as seen:
        seen.model(torch.randn(2, 3, 7, 5))
    assert seen.table["entropy_normalised"].isnan().all()
    assert seen.table["tokens"].tolist() == [14.0] * 3
    torch.testing.assert_close(seen.table["self"], torch.ones(3, dtype=torch.float64))
