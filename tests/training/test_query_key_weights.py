"""The weights behind a head's logits, in models of any make: their product's norm, and scaling them down."""

import pytest
import torch
import transformers as hf
from tests.helpers.models import bert_config, gpt2_config, llama_config, t5_config
from torch import nn

from manyheads.nn.transformers import Decoder, Encoder, Seq2Seq
from manyheads.training.head_health import HeadHealth
from manyheads.training.head_monitor import HeadMonitor
from manyheads.training.query_key_weights import LogitClip, query_key_weights, spectral_norms

IDS = torch.randint(97, (3, 11), generator=torch.Generator().manual_seed(0))
TINY = {"hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 5, "vocab_size": 97}


class Packed(nn.Module):
    """Two layers of nn.MultiheadAttention with residuals."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(97, 15)
        self.layers = nn.ModuleList(nn.MultiheadAttention(15, 3, batch_first=True) for _ in range(2))

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x, x, x, need_weights=False)[0]
        return x


def gpt2(**options):
    config = gpt2_config(n_embd=20, n_layer=2, n_head=5, vocab_size=97, n_positions=32, **options)
    return hf.GPT2LMHeadModel(config)


def llama(**options):
    config = {**TINY, "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2}
    return hf.LlamaForCausalLM(llama_config(**config, intermediate_size=13, **options))


def bert(**options):
    return hf.BertModel(bert_config(**TINY, intermediate_size=13, **options))


def t5(**options):
    config = t5_config(d_model=20, d_kv=7, d_ff=13, num_layers=2, num_heads=3, vocab_size=97, **options)
    return hf.T5EncoderModel(config)


MODELS = {
    "decoder": lambda: Decoder(15, heads=3, layers=2, vocabulary=97),
    "rotary groups": lambda: Decoder(24, heads=6, kv_heads=2, layers=2, vocabulary=97, positions="rotary"),
    "packed": Packed,
    "gpt2": gpt2,
    "gpt2 eager": lambda: gpt2(attn_implementation="eager"),
    "llama": llama,
    "bert": bert,
    "t5": t5,
}


def built(name):
    torch.manual_seed(1)
    return MODELS[name]().eval()


def seen(model, ids=IDS):
    """The largest logit of each head by site, and the monitor that saw it."""
    monitor = HeadMonitor(model)
    with monitor, torch.no_grad():
        model(ids)
    return {site: largest.clone() for site, largest in monitor.largest.items()}, monitor


def weights_of(model):
    _, monitor = seen(model)
    return query_key_weights(monitor.forwards.values(), monitor.scales)


def rows(parameter, head, width, start=0):
    return parameter.detach().double()[start + head * width : start + (head + 1) * width]


def plain_matrices(name, model, layer, head):
    """W_q and W_k of a head (d_key, d_model), read from the layout that the model is known to have, and its
    scale."""
    if name in ("decoder", "rotary groups"):
        attention = model.blocks[layer].attention
        width = attention.query.weight.shape[0] // attention.heads
        group = attention.heads // (attention.key.weight.shape[0] // width)
        return (
            rows(attention.query.weight, head, width),
            rows(attention.key.weight, head // group, width),
            width,
        )
    if name == "packed":
        packed = model.layers[layer].in_proj_weight
        return rows(packed, head, 5), rows(packed, head, 5, 15), 5
    if name.startswith("gpt2"):
        packed = model.transformer.h[layer].attn.c_attn.weight.T
        return rows(packed, head, 4), rows(packed, head, 4, 20), 4
    if name == "llama":
        attention = model.model.layers[layer].self_attn
        return rows(attention.q_proj.weight, head, 4), rows(attention.k_proj.weight, head // 3, 4), 4
    if name == "bert":
        attention = model.encoder.layer[layer].attention.self
        return rows(attention.query.weight, head, 4), rows(attention.key.weight, head, 4), 4
    attention = model.encoder.block[layer].layer[0].SelfAttention
    return rows(attention.q.weight, head, 7), rows(attention.k.weight, head, 7), 1


@pytest.mark.parametrize("name", MODELS)
def test_the_spectral_norm_is_that_of_the_formula(name):
    model = built(name)
    sites = weights_of(model)
    assert len(sites) == 2
    for layer, site in enumerate(sites.values()):
        norms = spectral_norms(site)
        for head in range(len(site.heads)):
            query, key, scaled_by = plain_matrices(name, model, layer, head)
            expected = torch.linalg.matrix_norm(query.T @ key, 2).item() / scaled_by**0.5
            assert norms[head].item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_the_clip_brings_the_largest_logit_down_and_leaves_other_heads_alone(name):
    model = built(name)
    with torch.no_grad():  # so that some logits are large
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
    before, _ = seen(model)
    first = next(iter(before))
    for site in list(before)[1:]:  # the input of later layers depends on the heads before
        assert len(before[site]) == len(before[first])
    ordered = before[first].sort().values
    clip = float(ordered[-2:].mean())  # between the largest and the second largest
    health = HeadHealth(model, every=1, clip=clip, clip_every=1)
    health.before_step()
    loss = _loss(model(IDS))
    loss.backward()
    health.after_step(loss)
    acted = [act for act in health.clipped if act.site == first]
    assert [act.head for act in acted] == [int(before[first].argmax())]
    after, _ = seen(model)
    assert after[first].max() <= clip + 1e-4 * clip
    others = torch.arange(len(before[first])) != acted[0].head
    assert torch.allclose(after[first][others], before[first][others], rtol=1e-5, atol=1e-5)


def _loss(output):
    hidden = output if isinstance(output, torch.Tensor) else output[0]
    return hidden.float().square().mean()


def test_the_clip_of_a_shared_key_head_scales_only_queries():
    model = built("rotary groups")
    attention = model.blocks[0].attention
    query, key = (part.weight.detach().clone() for part in (attention.query, attention.key))
    clip = LogitClip(weights_of(model))
    clip.scale("blocks.0.attention", 4, 0.3)
    assert torch.equal(attention.key.weight, key)
    expected = query.clone()
    expected[16:20] *= 0.3
    assert torch.allclose(attention.query.weight, expected)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: Decoder(15, heads=3, layers=1, vocabulary=97, qk_norm=True), "normalised"),
        (lambda: t5(attn_implementation="eager"), "biased"),
        (lambda: hf.AlbertModel(hf.AlbertConfig(**TINY, embedding_size=7, intermediate_size=13)), "serve"),
    ],
    ids=["qk_norm", "t5 eager", "albert"],
)
def test_models_whose_logits_do_not_follow_their_weights_are_refused(model, why):
    torch.manual_seed(1)
    model = model().eval()
    if why == "biased":
        with torch.no_grad():
            model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.mul_(50)
    with pytest.raises(ValueError, match=rf"clip: .* head 0 cannot be clipped .*{why}.*; leave clip out"):
        LogitClip(weights_of(model))


def test_cross_attention_and_parts_called_from_outside():
    torch.manual_seed(1)
    model = Seq2Seq(12, heads=2, layers=1, vocabulary=97).eval()
    monitor = HeadMonitor(model)
    with monitor, torch.no_grad():
        model(IDS, IDS)
    sites = query_key_weights(monitor.forwards.values(), monitor.scales)
    assert len(sites) == 3
    outer = nn.ModuleDict({"inner": Encoder(12, heads=2, layers=1, vocabulary=97)}).eval()
    monitor = HeadMonitor(outer)
    with monitor, torch.no_grad():
        outer["inner"](IDS)  # the model itself is never called
    sites = query_key_weights(monitor.forwards.values(), monitor.scales)
    assert list(sites) == ["inner.blocks.0.attention"]
    attention = outer["inner"].blocks[0].attention
    expected = torch.linalg.matrix_norm(attention.query.weight[:6].T @ attention.key.weight[:6], 2) / 6**0.5
    assert spectral_norms(sites["inner.blocks.0.attention"])[0].item() == pytest.approx(
        expected.item(), rel=1e-4
    )


def test_finding_the_weights_changes_nothing():
    model = built("decoder").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(IDS).sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    state = torch.get_rng_state()
    LogitClip(weights_of(model))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert model.training
