"""Models of x-transformers, open_clip and diffusers, small and with random weights.

The truth comes of a copy in float64 with plain kernels: x-transformers' weights as they leave `attn_dropout`
(or the talking heads behind it), diffusers' as `get_attention_scores` returns them, open_clip's recomputed
from what goes into nn.MultiheadAttention. Heads are silenced by zeros in the columns of the output
projection.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tests.zoo.case import Case, Silent, Truth, View
from tests.zoo.library import first, sharpen, standing_in
from torch import Tensor, nn


def zero_columns(projection: nn.Module, heads: int, gone: frozenset[int]) -> None:
    projection.weight.data.unflatten(1, (heads, -1))[:, list(gone)] = 0.0  # type: ignore[operator]


# x-transformers


def x_transformers(name: str, causal: bool, options: dict[str, Any], vague: bool, padded: bool) -> Case:
    from x_transformers import Decoder, Encoder, TransformerWrapper

    with torch.random.fork_rng():
        torch.manual_seed(sum(map(ord, name)))
        sizes = {"dim": 24, "depth": 2, "heads": 4, "attn_dim_head": 6, "ff_mult": 2}
        layers = (Decoder if causal else Encoder)(**sizes | options)
        model = TransformerWrapper(num_tokens=99, max_seq_len=128, attn_layers=layers).eval()
        sharpen(model, 0.8)
        with torch.no_grad():
            for part in model.modules():
                mix = getattr(part, "post_softmax_talking_heads", None)
                if mix is not None:
                    mix.weight.copy_((torch.eye(4) + 0.3 * torch.rand(4, 4))[..., None, None] / 1.6)
        ids, longer = torch.randint(99, (3, 11)), torch.randint(99, (2, 61))
        real = torch.arange(11) < torch.tensor([[11], [9], [7]])
    inputs = {"x": ids, "mask": real} if padded else {"x": ids}

    def output(out: Any, given: Any) -> Tensor:
        return out * given["mask"][..., None] if "mask" in given else out

    kinds = ("causal",) if causal else ("self",)
    case = Case(
        name, "x-transformers", model, inputs, partial(_x_plain, kinds, vague), {"x": longer}, output=output
    )
    if "kv_heads" in str(options):
        case.cut = {0: frozenset({0, 2})}  # head h reads key head h % 2
    return case


def _x_plain(
    kinds: tuple[str, ...], vague: bool, model: nn.Module, given: Any, silent: Silent
) -> tuple[Tensor, list[Truth]]:
    places = [(path, m) for path, m in model.named_modules() if type(m).__name__ == "Attention"]
    seen: dict[str, Tensor] = {}
    for path, module in places:
        attend: Any = module.attend
        attend.flash = False
        last = attend.post_softmax_talking_heads or attend.attn_dropout
        last.register_forward_hook(lambda _, args, out, path=path: seen.__setitem__(path, out.double()))
    for number, gone in silent.items():
        module = places[number][1]
        to_out: Any = module.to_out
        zero_columns(to_out if isinstance(to_out, nn.Linear) else to_out[0], 4, gone)
    out = model(**given)
    real = given.get("mask")
    truths = []
    for path, _ in places:
        queries, keys = seen[path].shape[2:]
        own = torch.arange(queries) + keys - queries
        truth = Truth(path, seen[path], kinds, own, real, vague=vague)
        if keys > queries:  # learned keys in front have no position
            counted = truth.all_views()[0].counted
            tokens = keys - queries, keys
            truth.views.append(View(seen[path], torch.arange(queries), counted, tokens=tokens))
        truths.append(truth)
    return (out * real[..., None] if real is not None else out), truths


X: dict[str, tuple[bool, dict[str, Any], bool, bool]] = {  # causal, options, vague, padded
    "encoder, flash": (False, {"attn_flash": True}, False, True),
    "decoder, rotary, grouped": (True, {"rotary_pos_emb": True, "attn_kv_heads": 2, "attn_flash": True},
        False, False),
    "decoder, one key head": (True, {"attn_one_kv_head": True}, False, True),
    "decoder, talking heads": (True, {"attn_post_talking_heads": True}, False, False),
    "encoder, pre talking heads": (False, {"attn_pre_talking_heads": True}, False, False),
    "decoder, top-k": (True, {"attn_sparse_topk": 3}, False, False),
    "encoder, memory keys": (False, {"attn_num_mem_kv": 3}, True, True),
    "decoder, memory keys": (True, {"attn_num_mem_kv": 3}, True, False),
    "decoder, ALiBi": (True, {"alibi_pos_bias": True, "alibi_num_heads": 2}, False, False),
    "encoder, relative bias": (False, {"rel_pos_bias": True}, False, True),
    "decoder, cosine": (True, {"attn_qk_norm": True}, False, False),
    "decoder, gated values": (True, {"attn_gate_values": True}, False, False),
    "decoder, scaled heads": (True, {"attn_head_scale": True}, False, False),
    "encoder, sigmoid": (False, {"attn_sigmoid": True}, False, False),
    "decoder, soft cap": (True, {"attn_softclamp_logits": True}, False, False),
    "decoder, sandwich norm, glu on attention": (True, {"attn_on_attn": True, "sandwich_norm": True},
        False, False),
}  # fmt: skip


# open_clip: nn.MultiheadAttention in a file of its own


def open_clip(vision: bool) -> Case:
    with standing_in("torchvision"):
        from open_clip.transformer import TextTransformer, VisionTransformer

    with torch.random.fork_rng():
        torch.manual_seed(7 + vision)
        if vision:
            model = VisionTransformer(12, 4, 24, 2, 4, 2.0, output_dim=9).eval()
            inputs = torch.randn(3, 3, 12, 12)
        else:
            model = TextTransformer(11, 99, 24, 4, 2, output_dim=9).eval()
            inputs = torch.randint(1, 99, (3, 11))
        sharpen(model, 1.0)
    kind = "self" if vision else "causal"
    name = f"open_clip: {'vision' if vision else 'text'} transformer"
    return Case(
        name, "open_clip", model, inputs, partial(_clip_plain, kind), output=lambda out, _: first(out)
    )


def _clip_plain(kind: str, model: nn.Module, given: Tensor, silent: Silent) -> tuple[Tensor, list[Truth]]:
    places = [(path, m) for path, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)]
    truths: dict[str, Truth] = {}
    for number, gone in silent.items():
        zero_columns(places[number][1].out_proj, 4, gone)
    for path, module in places:
        hook = partial(_mha, truths, path, kind)
        module.register_forward_pre_hook(hook, with_kwargs=True)
    out = first(model(given))
    return out, [truths[path] for path, _ in places]


def _mha(truths: dict[str, Truth], path: str, kind: str, m: Any, args: Any, kwargs: Any) -> None:
    x = (args[0] if args else kwargs["query"]).double()
    x = x if m.batch_first else x.transpose(0, 1)
    q, k, _ = (x @ w.T + b for w, b in zip(m.in_proj_weight.chunk(3), m.in_proj_bias.chunk(3), strict=True))
    q, k = (torch.stack(t.chunk(m.num_heads, -1), 1) for t in (q, k))
    s = q @ k.mT * m.head_dim**-0.5
    if kind == "causal":
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    truths[path] = Truth(path, s.softmax(-1), (kind,), torch.arange(x.shape[1]), vague=kind == "self")


# diffusers


def diffusers(what: str) -> Case:
    try:
        from diffusers import AutoencoderKL, DiTTransformer2DModel, UNet2DConditionModel
    except RuntimeError as error:  # it says so when something that it loads is missing
        raise ImportError(f"diffusers: {error}") from error

    with torch.random.fork_rng():
        torch.manual_seed(len(what))
        model: Any
        inputs: dict[str, Any]
        if what.startswith("UNet"):
            model = UNet2DConditionModel(
                sample_size=8, block_out_channels=(16, 32), layers_per_block=1, cross_attention_dim=20,
                norm_num_groups=4, attention_head_dim=4, down_block_types=("CrossAttnDownBlock2D",
                    "DownBlock2D"),
                up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            ).eval()  # fmt: skip
            inputs = {"sample": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([3, 5])}
            inputs["encoder_hidden_states"] = torch.randn(2, 7, 20)
            if "sliced" in what:
                model.set_attention_slice(1)
        elif what == "DiT":
            model = DiTTransformer2DModel(
                num_attention_heads=4, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8,
                norm_num_groups=4, num_embeds_ada_norm=10,
            ).eval()  # fmt: skip
            inputs = {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([3, 5])}
            inputs["class_labels"] = torch.tensor([1, 2])
        else:
            model = AutoencoderKL(block_out_channels=(16,), norm_num_groups=4, sample_size=8).eval()
            inputs = {"sample": torch.randn(2, 3, 8, 8)}
        sharpen(model, 0.7)
    name, cut = f"diffusers: {what}", {0: frozenset({0 if what == "autoencoder" else 1})}
    return Case(
        name,
        "diffusers",
        model,
        inputs,
        _diffusers_plain,
        None,
        cut,
        output=lambda out, _: first(out),
        tolerance=2e-3,
    )


def _diffusers_plain(model: Any, given: Any, silent: Silent) -> tuple[Tensor, list[Truth]]:
    from diffusers.models.attention_processor import Attention, AttnProcessor

    calls: list[tuple[str, Any, Tensor]] = []
    for path, module in model.named_modules():
        if isinstance(module, Attention):
            module.set_processor(AttnProcessor())
            module.get_attention_scores = partial(_scores, calls, path, module, module.get_attention_scores)
    if silent:
        model(**given)
        order = list(calls)
        calls.clear()
        for number, gone in silent.items():
            module = order[number][1]
            zero_columns(module.to_out[0], module.heads, gone)
    out = first(model(**given))
    truths = []
    for path, module, weights in calls:
        weights = weights.double().unflatten(0, (-1, module.heads))
        cross = bool(module.is_cross_attention)
        own = None if cross else torch.arange(weights.shape[2])
        truths.append(Truth(path, weights, ("cross",) if cross else ("self",), own, vague=True))
    return out.double(), truths


def _scores(calls: Any, path: str, module: Any, compute: Any, *args: Any, **kwargs: Any) -> Tensor:
    weights: Tensor = compute(*args, **kwargs)
    calls.append((path, module, weights))
    return weights


# diffusers first: it does not load where another package stands in for torchvision
CASES: dict[str, Callable[[], Case]] = {
    f"diffusers: {what}": partial(diffusers, what) for what in ("UNet", "UNet, sliced", "DiT", "autoencoder")
}
CASES |= {
    f"x-transformers: {name}": partial(x_transformers, f"x-transformers: {name}", *options)
    for name, options in X.items()
}
CASES |= {
    "open_clip: vision transformer": partial(open_clip, True),
    "open_clip: text transformer": partial(open_clip, False),
}
