"""Models of other libraries, and hand-written ones: each gives what `coverage_check.check` takes.

``eager`` switches to the branch of that library which materialises its weights.
"""

from collections.abc import Callable
from typing import Any

import torch
from tests.zoo import library_peers, library_timm
from torch import Tensor, nn
from torch.nn import functional as F

import manyheads as mh
from bench.missing_packages import stand_in

Case = tuple[nn.Module, Callable[[nn.Module], Any], Callable[[nn.Module], None]]


def with_attribute(name: str, value: object) -> Callable[[nn.Module], None]:
    """Set an attribute of every module that has it."""

    def switch(model: nn.Module) -> None:
        for module in model.modules():
            if hasattr(module, name):
                setattr(module, name, value)

    return switch


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

    return model, lambda m: m(noise(2, 20, 62), _ids(2, 11)), eager


def _of_zoo(make: Callable[[], Any]) -> Callable[[], Case]:
    """A model of the zoo in tests/, which has a truth of its own besides."""

    def case() -> Case:
        found = make()
        inputs = found.inputs

        def eager(model: nn.Module) -> None:
            with_attribute("flash", False)(model)
            with_attribute("fused_attn", False)(model)
            for module in model.modules():
                if hasattr(module, "set_processor"):
                    from diffusers.models.attention_processor import AttnProcessor

                    module.set_processor(AttnProcessor())

        return found.model, lambda m: m(**inputs) if isinstance(inputs, dict) else m(inputs), eager

    return case


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
        return m(noise(2, 4, 8, 8), noise(2, 7, 20), noise(2, 28), step, return_dict=False)

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
    return _awake(_ViT(33, 3, 2)), lambda m: m(noise(2, 3, 40, 40)), _nothing


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
    return _awake(_GPT(35, 5, 3)), lambda m: m(_ids(2, 17)), with_attribute("flash", False)


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


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(11))


def _ids(*shape: int) -> Tensor:
    return torch.randint(101, shape, generator=torch.Generator().manual_seed(5))


def _nothing(_: nn.Module) -> None:
    pass


OTHERS: dict[str, Callable[[], Case]] = {
    "torchvision style: ViT": _torchvision_style,
    "openai-whisper": _whisper,
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
ZOO = library_peers.CASES | library_timm.CASES
OTHERS |= {name: _of_zoo(make) for name, make in ZOO.items()}
