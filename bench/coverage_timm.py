"""One model of every family that timm has and the zoo in tests/ has not: the smallest of it, with fewer
layers where it takes that.

Where a family has several kinds of attention, one of each is named in `KINDS`.
"""

from collections.abc import Callable
from typing import Any

import torch
from tests.zoo import library_timm
from torch import nn

from bench.coverage_build import wake
from bench.coverage_others import Case, noise, with_attribute
from bench.missing_packages import stand_in

KINDS = {
    "byoanet": ("botnet26t_256", "halonet26t", "lambda_resnet26t", "sehalonet33ts"),
    "levit": ("levit_128s", "levit_conv_128s"),
    "maxxvit": ("coatnet_nano_rw_224", "maxvit_rmlp_pico_rw_256", "maxxvit_rmlp_nano_rw_256"),
    "metaformer": ("poolformer_s12", "caformer_s18"),
    "mobilevit": ("mobilevit_xxs", "mobilevitv2_050"),
    "vision_transformer": ("vit_base_patch16_siglip_224", "vit_small_patch16_18x2_224"),
}


def families() -> dict[str, Callable[[], Case]]:
    """A case for each family, by name; none where timm is not installed."""
    try:
        stand_in("torchvision")
        import timm
    except ImportError:
        return {}
    cases: dict[str, Callable[[], Case]] = {}
    judged = {name.partition(".")[0] if "." in name else _family(name) for name in library_timm.SMALL}
    for family in timm.list_modules():
        if family in judged - KINDS.keys():
            continue
        for name in KINDS.get(family, (None,)):
            cases[f"timm: {family}" + (f", {name}" if name else "")] = _case(family, name)
    return cases


def _case(family: str, name: str | None) -> Callable[[], Case]:
    def case() -> Case:

        torch.manual_seed(3)
        model = wake(_shallow(name or _smallest(family)).eval(), 0.5)
        shape = model.default_cfg["input_size"]
        return model, lambda m: m(noise(2, *shape)), with_attribute("fused_attn", False)

    return case


def _family(name: str) -> str:
    """The family of a model: the file it comes from."""
    from timm.models import model_entrypoint

    return str(model_entrypoint(name).__module__.rpartition(".")[2])


def _shallow(name: str) -> nn.Module:
    """A model with few layers, where it can be asked for them."""
    import timm

    for fewer in ({"depth": 2}, {"depths": (1, 1, 2, 1)}, {"depths": (2, 2)}, {"depth": (1, 1, 2)}):
        try:
            model: nn.Module = timm.create_model(name, num_classes=7, **fewer).eval()
            with torch.no_grad():
                model(noise(1, *model.default_cfg["input_size"]))  # type: ignore[index, misc]
        except Exception:  # it takes no such number, or not so few
            continue
        return model
    return timm.create_model(name, num_classes=7)  # type: ignore[no-any-return]


def _smallest(family: str) -> str:
    """The model of a family with the fewest weights."""
    import timm

    def weights(name: str) -> int:
        try:
            with torch.device("meta"):
                model: nn.Module = timm.create_model(name)
        except Exception:  # some compute numbers while they are built
            return 2**62
        return sum(parameter.numel() for parameter in model.parameters())

    names: list[Any] = timm.list_models(module=family)
    return str(min(names, key=weights))
