"""Models of other libraries, and hand-written ones: each gives what `coverage_check.check` takes.

``eager`` switches to the branch of that library which materialises its weights.
"""

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import manyheads as mh

Case = tuple[nn.Module, Callable[[nn.Module], Any], Callable[[nn.Module], None]]


def _with_attribute(name: str, value: object) -> Callable[[nn.Module], None]:
    """Set an attribute of every module that has it."""

    def switch(model: nn.Module) -> None:
        for module in model.modules():
            if hasattr(module, name):
                setattr(module, name, value)

    return switch


def _timm(name: str, **options: Any) -> Callable[[], Case]:
    def case() -> Case:
        stand_in("torchvision")
        import timm

        torch.manual_seed(3)
        model = _awake(timm.create_model(name, num_classes=7, **options))
        size = options.get("img_size", 224)
        return model, lambda m: m(_noise(2, 3, size, size)), _with_attribute("fused_attn", False)

    return case


def _whisper() -> Case:
    for missing in ("tiktoken", "numba", "more_itertools"):
        stand_in(missing)
    from whisper.model import ModelDimensions, MultiHeadAttention, Whisper

    torch.manual_seed(3)
    model = _awake(
        Whisper(
            ModelDimensions(
                n_mels=20, n_audio_ctx=31, n_audio_state=24, n_audio_head=3, n_audio_layer=2, n_vocab=101,
                n_text_ctx=19, n_text_state=24, n_text_head=3, n_text_layer=2,
            )
        )
    )  # fmt: skip

    def eager(_: nn.Module) -> None:
        MultiHeadAttention.use_sdpa = False

    return model, lambda m: m(_noise(2, 20, 62), _ids(2, 11)), eager


def _x_transformers(causal: bool, **options: Any) -> Callable[[], Case]:
    def case() -> Case:
        from x_transformers import Decoder, Encoder, TransformerWrapper

        torch.manual_seed(3)
        layers = (Decoder if causal else Encoder)(dim=36, depth=2, heads=4, attn_flash=True, **options)
        model = _awake(TransformerWrapper(num_tokens=101, max_seq_len=29, attn_layers=layers))
        mask = torch.arange(13) < torch.tensor([[13], [9]])
        return model, lambda m: m(_ids(2, 13), mask=mask), _with_attribute("flash", False)

    return case


def _diffusers_unet() -> Case:
    from diffusers import UNet2DConditionModel
    from diffusers.models.attention_processor import AttnProcessor

    torch.manual_seed(3)
    model = UNet2DConditionModel(
        sample_size=8, block_out_channels=(16, 32), layers_per_block=1, cross_attention_dim=20,
        norm_num_groups=4, attention_head_dim=4, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    step = torch.tensor([3, 5])
    return (
        _awake(model),
        lambda m: m(_noise(2, 4, 8, 8), step, _noise(2, 7, 20), return_dict=False),
        lambda m: m.set_attn_processor(AttnProcessor()),
    )


def _diffusers_dit() -> Case:
    from diffusers import DiTTransformer2DModel
    from diffusers.models.attention_processor import AttnProcessor

    torch.manual_seed(3)
    model = DiTTransformer2DModel(
        num_attention_heads=3, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8,
        norm_num_groups=4, num_embeds_ada_norm=10,
    )  # fmt: skip
    step, label = torch.tensor([3, 5]), torch.tensor([1, 2])
    return (
        _awake(model),
        lambda m: m(_noise(2, 4, 8, 8), timestep=step, class_labels=label, return_dict=False),
        lambda m: [x.set_processor(AttnProcessor()) for x in m.modules() if hasattr(x, "set_processor")],
    )


def _diffusers_sd3() -> Case:
    from diffusers import SD3Transformer2DModel

    torch.manual_seed(3)
    model = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=3,
        joint_attention_dim=20, caption_projection_dim=24, pooled_projection_dim=28, out_channels=4,
        pos_embed_max_size=8,
    )  # fmt: skip
    step = torch.tensor([3, 5])

    def forward(m: nn.Module) -> Any:
        return m(_noise(2, 4, 8, 8), _noise(2, 7, 20), _noise(2, 28), step, return_dict=False)

    return (
        _awake(model),
        forward,
        _nothing,
    )  # no eager processor: the textbook formula stands in for the kernel


class _Block(nn.Module):
    """A transformer block around nn.MultiheadAttention, as torchvision's ViT has it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_1(x)
        x = x + self.self_attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm_2(x))


class _ViT(nn.Module):
    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.layers = nn.Sequential(*(_Block(width, heads) for _ in range(layers)))

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.patches(pictures).flatten(2).transpose(1, 2)
        return self.layers(torch.cat([self.token.expand(len(x), -1, -1), x], 1))[:, 0]


def _torchvision_style() -> Case:
    torch.manual_seed(3)
    return _awake(_ViT(33, 3, 2)), lambda m: m(_noise(2, 3, 40, 40)), _nothing


class _CausalSelfAttention(nn.Module):
    """One packed projection, the heads cut out of it, a fused and a readable branch: as in nanoGPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.flash = heads, True

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.c_attn(x).split(width, 2)
        )
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
            hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
            y = F.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).reshape(batch, length, width))


class _GPT(nn.Module):
    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(101, width), nn.Embedding(31, width)
        self.h = nn.ModuleList(_CausalSelfAttention(width, heads) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for attention in self.h:
            x = x + attention(F.layer_norm(x, x.shape[-1:]))
        return x


def _nanogpt_style() -> Case:
    torch.manual_seed(3)
    return _awake(_GPT(35, 5, 3)), lambda m: m(_ids(2, 17)), _with_attribute("flash", False)


def _ours(make: Callable[[], nn.Module], forward: Callable[[nn.Module], Any]) -> Callable[[], Case]:
    """Our modules return their weights when asked; the spy is told by a softmax of their logarithm."""

    def eager(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, mh.MultiHeadAttention):
                module.forward = _asked(module.forward)  # type: ignore[method-assign]

    def case() -> Case:
        torch.manual_seed(3)
        return _awake(make()), forward, eager

    return case


def _asked(forward: Callable[..., Any]) -> Callable[..., Any]:
    def with_weights(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            out, weights = forward(*args, **kwargs | {"return_weights": True})
        torch.softmax(weights.log(), -1)
        return out

    return with_weights


def _awake(model: nn.Module) -> nn.Module:
    from bench.coverage_build import wake

    return wake(model.eval())


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(11))


def _ids(*shape: int) -> Tensor:
    return torch.randint(101, shape, generator=torch.Generator().manual_seed(5))


def _nothing(_: nn.Module) -> None:
    pass


class _Attributes(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Attributes(name, (_Anything,), {})


class _Anything(metaclass=_Attributes):
    """What a package that is not here would have given: may be called, subclassed and used as a decorator."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if args else self


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Attributes(name, (_Anything,), {})


class _Finder:
    """Finds empty modules for a package that is not installed and that the model itself does not use."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != self.package:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def stand_in(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        sys.meta_path.append(_Finder(package))  # type: ignore[arg-type]


OTHERS: dict[str, Callable[[], Case]] = {
    "timm: vit_tiny_patch16_224": _timm("vit_tiny_patch16_224", img_size=96, depth=2),
    "timm: eva02_tiny_patch14_224": _timm("eva02_tiny_patch14_224", img_size=98, depth=2),
    "timm: beit_base_patch16_224": _timm(
        "beit_base_patch16_224", img_size=96, depth=2, embed_dim=48, num_heads=3
    ),
    "timm: swin_tiny_patch4_window7_224": _timm(
        "swin_tiny_patch4_window7_224", depths=(2, 2), num_heads=(3, 6), embed_dim=24
    ),
    "torchvision style: ViT": _torchvision_style,
    "openai-whisper": _whisper,
    "x-transformers: encoder": _x_transformers(False),
    "x-transformers: decoder, rotary, grouped": _x_transformers(True, rotary_pos_emb=True, attn_kv_heads=2),
    "diffusers: UNet2DConditionModel": _diffusers_unet,
    "diffusers: DiTTransformer2DModel": _diffusers_dit,
    "diffusers: SD3Transformer2DModel": _diffusers_sd3,
    "nanoGPT style": _nanogpt_style,
    "manyheads: Encoder": _ours(
        lambda: mh.Encoder(35, heads=5, layers=2, vocabulary=101),
        lambda m: m(_ids(2, 13), lengths=torch.tensor([13, 9])),
    ),
    "manyheads: Decoder": _ours(
        lambda: mh.Decoder(40, heads=4, layers=2, vocabulary=101, positions="rotary", kv_heads=2),
        lambda m: m(_ids(2, 13)),
    ),
    "manyheads: Seq2Seq": _ours(
        lambda: mh.Seq2Seq(36, heads=3, layers=2, vocabulary=101),
        lambda m: m(_ids(2, 13), _ids(2, 7), source_lengths=torch.tensor([13, 9])),
    ),
}
