"""Models of timm, small and with random weights; the truth is what goes into `attn_drop`.

timm's attention modules multiply what comes out of `attn_drop` with the values and hand the heads, one after
the other, to `proj`. A copy in float64, with fused kernels off, tells the weights; heads are silenced by
zeros in the columns of `proj`. Modules that mix tokens in other ways must be named.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tests.zoo.case import Case, Silent, Truth
from tests.zoo.library import first, sharpen, standing_in
from torch import Tensor, nn

THEME = "timm"


def attentions(model: nn.Module) -> dict[str, nn.Module]:
    """The modules whose weights can be told, by path."""
    return {path: m for path, m in model.named_modules() if hasattr(m, "attn_drop") and hasattr(m, "proj")}


def plain(model: nn.Module, pictures: Tensor, silent: Silent) -> tuple[Tensor, list[Truth]]:
    """Run with fused kernels off, and write down the weights in the order of the calls."""
    truths: list[Truth] = []
    handles = []
    order = _order(model, pictures) if silent else []
    for number, gone in silent.items():
        path, heads = order[number]
        weight = model.get_submodule(path).proj.weight.data  # type: ignore[union-attr]
        inside = _interleaved(model.get_submodule(path))
        by_head = (
            weight.unflatten(1, (-1, heads)).transpose(1, 2) if inside else weight.unflatten(1, (heads, -1))
        )
        by_head[:, list(gone)] = 0.0
    for path, module in attentions(model).items():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False  # type: ignore[assignment]
        handles.append(module.attn_drop.register_forward_pre_hook(partial(_note, truths, path, module)))  # type: ignore[union-attr]
    try:
        try:
            out = first(model(pictures))
        except RuntimeError:  # something in it is float32, whatever the weights are
            truths.clear()
            out = first(model.float()(pictures.float()))
    finally:
        for handle in handles:
            handle.remove()
    return out.double(), truths


def _interleaved(module: nn.Module) -> bool:
    """Whether the columns of `proj` have the heads inside: (width, heads)."""
    return type(module).__module__.endswith("nest")


def _note(truths: list[Truth], path: str, owner: Any, module: nn.Module, args: tuple[Tensor, ...]) -> None:
    weights = args[0].double()
    if _interleaved(owner):
        weights = weights.transpose(1, 2)  # (batch, heads, blocks, queries, keys)
    weights = weights.flatten(0, weights.dim() - 4)  # blocks of a picture beside the samples
    assert weights.shape[1] == owner.num_heads
    queries, keys = weights.shape[-2:]
    own = torch.arange(queries) if queries in (1, keys) else None  # one query is the class token, key 0
    kinds = ("self",) if queries == keys else ("self", "cross")
    truths.append(Truth(path, weights, kinds, own, vague=True))


def _order(model: nn.Module, pictures: Tensor) -> list[tuple[str, int]]:
    return [(truth.path, truth.heads) for truth in plain(model, pictures, {})[1]]


def make(name: str, options: dict[str, Any], size: int) -> Case:
    with standing_in("torchvision"):
        import timm

    with torch.random.fork_rng():
        torch.manual_seed(sum(map(ord, name)))
        if "." in name:  # a class of one of its files
            model = getattr(
                importlib.import_module(f"timm.models.{name.partition('.')[0]}"), name.partition(".")[2]
            )(num_classes=7, **options).eval()
        else:
            model = timm.create_model(name, num_classes=7, **options).eval()
        sharpen(model, 1.0)
        with torch.no_grad():
            for module in model.modules():  # mixtures of heads, as trained ones are: mostly the head itself
                for mix in (getattr(module, "proj_l", None), getattr(module, "proj_w", None)):
                    if isinstance(mix, nn.Linear):
                        mix.weight.copy_(torch.eye(len(mix.weight)) + 0.3 * torch.rand_like(mix.weight))
                        mix.bias.zero_()
        pictures = torch.randn(2, 3, size, size)
    return Case(f"timm: {name}", THEME, model, pictures, plain, tolerance=2e-3)


SMALL: dict[str, tuple[dict[str, Any], int]] = {
    "vit_tiny_patch16_224": ({"img_size": 48, "depth": 2, "embed_dim": 24, "num_heads": 4}, 48),
    "deit3_small_patch16_224": ({"img_size": 48, "depth": 2, "embed_dim": 24, "num_heads": 4}, 48),
    "cait_xxs24_224": ({"img_size": 48, "depth": 2, "embed_dim": 24, "num_heads": 4}, 48),
    "convit_tiny": ({"img_size": 48, "depth": 3, "local_up_to_layer": 2, "embed_dim": 24, "num_heads": 4},
        48),
    "beit_base_patch16_224": ({"img_size": 48, "depth": 2, "embed_dim": 24, "num_heads": 4}, 48),
    "swin_tiny_patch4_window7_224": ({"img_size": 56, "depths": (2, 2), "num_heads": (2, 4),
        "embed_dim": 12}, 56),
    "swinv2_tiny_window8_256": ({"img_size": 64, "depths": (2, 2), "num_heads": (2, 4), "embed_dim": 12},
        64),
    "eva02_tiny_patch14_224": ({"img_size": 42, "depth": 2, "embed_dim": 32, "num_heads": 4}, 42),
    "pit_ti_224": ({"img_size": 64, "base_dims": (6, 6), "depth": (1, 1), "heads": (2, 4)}, 64),
    "twins_pcpvt_small": ({"img_size": 64, "embed_dims": (12, 24, 24, 24), "num_heads": (2, 4, 4, 4),
        "depths": (1, 1, 1, 1)}, 64),
    "twins_svt_small": ({"img_size": 64, "embed_dims": (12, 24, 24, 24), "num_heads": (2, 4, 4, 4),
        "depths": (1, 1, 1, 1), "wss": (4, 4, 2, 2)}, 64),
    "pvt_v2_b0": ({"depths": (1, 1, 1, 1), "embed_dims": (12, 12, 24, 24), "num_heads": (2, 2, 4, 4)}, 64),
    "nest.Nest": ({"img_size": 64, "embed_dims": (12, 24, 24), "num_heads": (2, 4, 4), "depths": (1, 1,
        1)}, 64),
    "crossvit_tiny_240": ({"img_size": 48, "img_scale": (1.0, 1.0), "patch_size": (12, 16),
        "embed_dim": (24, 24), "depth": ((1, 1, 0),), "num_heads": (4, 4), "mlp_ratio": (2, 2, 1)}, 48),
    "visformer_tiny": ({"img_size": 64, "embed_dim": 48, "num_heads": 4, "depth": (0, 1, 1)}, 64),
    "volo.VOLO": ({"img_size": 64, "layers": (1, 1), "embed_dims": (24, 24), "num_heads": (4, 4),
        "downsamples": (True, False), "outlook_attention": (False, False), "mlp_ratio": (2.0, 2.0)}, 64),
    "gcvit.GlobalContextVit": ({"img_size": 64, "depths": (1, 1, 2, 1), "embed_dim": 16, "num_heads": (2,
        2, 4, 4), "window_size": (4, 4, 4, 2)}, 64),
}  # fmt: skip
CASES: dict[str, Callable[[], Case]] = {
    f"timm: {name}": partial(make, name, options, size) for name, (options, size) in SMALL.items()
}


def mixer(name: str, options: dict[str, Any], size: int, path: str) -> Case:
    case = make(name, options, size)
    case.mixer = path
    return case


MIXERS: dict[str, tuple[dict[str, Any], int, str]] = {
    "xcit_nano_12_p16_224": ({"img_size": 48, "depth": 2, "embed_dim": 24, "num_heads": 4,
        "cls_attn_layers": 0}, 48, "blocks.0.attn"),
    "mlp_mixer.MlpMixer": ({"img_size": 48, "num_blocks": 2, "embed_dim": 24}, 48, "blocks.0"),
    "metaformer.MetaFormer": ({"depths": (1, 1), "dims": (12, 24)}, 64, "stages.0"),
}  # fmt: skip
CASES |= {
    f"timm: {name}": partial(mixer, name, options, size, path)
    for name, (options, size, path) in MIXERS.items()
}
