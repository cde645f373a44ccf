"""A model of two inputs, text and pictures (CLIP): two stacks, each with its own numbers and layers."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from tests.helpers.models import VOCABULARY, oracle, sharpen, tokens
from torch import Tensor, nn

from manyheads.heads.silence import silence
from manyheads.heads.watch import watch

TEXT, VISION = "text_model.encoder.layers.{}.self_attn", "vision_model.encoder.layers.{}.self_attn"


@pytest.fixture(scope="module")
def model() -> nn.Module:
    shared = {"num_hidden_layers": 2, "intermediate_size": 11}
    text = {
        "vocab_size": VOCABULARY, "hidden_size": 15, "num_attention_heads": 3, "max_position_embeddings": 7,
        "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    vision = {"hidden_size": 14, "num_attention_heads": 2, "image_size": 15, "patch_size": 5}
    config = hf.CLIPConfig(text_config=shared | text, vision_config=shared | vision, projection_dim=13)
    return sharpen(hf.CLIPModel(config), scale=0.3)


@pytest.fixture(scope="module")
def batch() -> dict[str, Tensor]:
    pictures = torch.randn(2, 3, 15, 15, generator=torch.Generator().manual_seed(5))
    return tokens() | {"pixel_values": pictures}  # three texts, two pictures


@torch.no_grad()
def test_both_stacks_are_seen_with_their_own_kind_and_numbers(
    model: nn.Module, batch: dict[str, Tensor]
) -> None:
    plain = model(**batch).logits_per_text
    with watch(model, "full") as seen:
        watched = model(**batch).logits_per_text
    assert torch.equal(plain, watched)
    assert seen.missed == {}
    assert {site.name: (site.kind, site.layer, site.heads) for site in seen.sites} == {
        VISION.format(0): ("self", 0, 2), VISION.format(1): ("self", 1, 2),
        TEXT.format(0): ("causal", 0, 3), TEXT.format(1): ("causal", 1, 3),
    }  # fmt: skip
    model.set_attn_implementation("eager")
    out = model(**batch, output_attentions=True)
    model.set_attn_implementation("sdpa")
    table = seen.table
    everything = torch.ones(2, 10, dtype=torch.bool)
    for path, weights, counted in (
        (TEXT, out.text_model_output.attentions, batch["attention_mask"].bool()),
        (VISION, out.vision_model_output.attentions, everything),
    ):
        for layer in range(2):
            rows = [i for i, site in enumerate(table["site"]) if site == path.format(layer)]
            assert table["tokens"][rows].tolist() == [float(counted.sum())] * len(rows)
            for name, wanted in oracle(weights[layer], counted).items():
                torch.testing.assert_close(table[name][rows], wanted, rtol=2e-5, atol=1e-3, msg=name)


@torch.no_grad()
def test_silence_in_one_stack_leaves_the_other_alone(model: nn.Module, batch: dict[str, Tensor]) -> None:
    before = model(**batch)
    with silence(model, {TEXT.format(1): [2]}):
        silenced = model(**batch)
    assert torch.equal(silenced.image_embeds, before.image_embeds)
    assert not torch.allclose(silenced.text_embeds, before.text_embeds)
    columns = model.get_submodule(TEXT.format(1)).out_proj.weight
    kept = columns.clone()
    columns[:, 10:15] = 0.0
    torch.testing.assert_close(model(**batch).text_embeds, silenced.text_embeds)
    columns.copy_(kept)


@torch.no_grad()
def test_a_layer_number_fits_both_stacks_and_is_refused(model: nn.Module, batch: dict[str, Tensor]) -> None:
    with (
        pytest.raises(ValueError, match=r"layer 1 fits several sites: 'vision.*' and 'text.*'; name the one"),
        silence(model, {1: [0]}),
    ):
        model(**batch)
