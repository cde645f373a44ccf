"""Build, see, measure and cut the attention heads of any transformer.

>>> import manyheads as mh
>>> import torch
>>> x = torch.randn(2, 5, 64)
>>> mh.MultiHeadAttention(64, heads=8)(x, causal=True).shape
torch.Size([2, 5, 64])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from manyheads import surgery as surgery  # these three register what lower rooms ask of them
from manyheads import tasks as tasks
from manyheads import view as view
from manyheads.common.lazy_names import attributes, submodules
from manyheads.common.version import __version__ as __version__
from manyheads.models import transformers_import as _transformers_import

_transformers_import.register()  # so that from_pretrained loads cut models

if TYPE_CHECKING:
    from manyheads import heads as heads
    from manyheads import nn as nn
    from manyheads import surgery as surgery
    from manyheads.capture.kernel_arguments import AttentionArguments as AttentionArguments
    from manyheads.capture.kernels import register_attention as register_attention
    from manyheads.data.labelled import labelled as labelled
    from manyheads.heads.comparison.compare import compare as compare
    from manyheads.heads.diversity import diversity as diversity
    from manyheads.heads.importance import agreement as agreement
    from manyheads.heads.importance import importance as importance
    from manyheads.heads.maps import maps as maps
    from manyheads.heads.measurements import merge_shards as merge_shards
    from manyheads.heads.roles import roles as roles
    from manyheads.heads.silence import gates as gates
    from manyheads.heads.silence import silence as silence
    from manyheads.heads.table import HeadTable as HeadTable
    from manyheads.heads.watch import watch as watch
    from manyheads.models.export import export as export
    from manyheads.models.folder import load as load
    from manyheads.models.folder import save as save
    from manyheads.models.model_card import push as push
    from manyheads.models.open import open_model as open_model
    from manyheads.nn import mask as mask
    from manyheads.nn.attention import attention as attention
    from manyheads.nn.blocks import FeedForward as FeedForward
    from manyheads.nn.blocks import TransformerBlock as TransformerBlock
    from manyheads.nn.cache import KVCache as KVCache
    from manyheads.nn.generate import generate as generate
    from manyheads.nn.key_shards import merge_statistics as merge_statistics
    from manyheads.nn.key_shards import ring_statistics as ring_statistics
    from manyheads.nn.mask import Mask as Mask
    from manyheads.nn.multihead import MultiHeadAttention as MultiHeadAttention
    from manyheads.nn.orthogonal_rows import fold_orthogonal as fold_orthogonal
    from manyheads.nn.positions import LearnedPositions as LearnedPositions
    from manyheads.nn.positions import Rotary as Rotary
    from manyheads.nn.positions import SinusoidalPositions as SinusoidalPositions
    from manyheads.nn.positions import sinusoidal as sinusoidal
    from manyheads.nn.stack import DecoderCache as DecoderCache
    from manyheads.nn.statistics import statistics as statistics
    from manyheads.nn.statistics import statistics_of_scores as statistics_of_scores
    from manyheads.nn.transformers import Decoder as Decoder
    from manyheads.nn.transformers import Encoder as Encoder
    from manyheads.nn.transformers import Seq2Seq as Seq2Seq
    from manyheads.studies.run import study as study
    from manyheads.surgery.cache_choice import cache_plan as cache_plan
    from manyheads.surgery.cache_plan import CachePlan as CachePlan
    from manyheads.surgery.card import card as card
    from manyheads.surgery.cut import cut as cut
    from manyheads.surgery.cut_on_disk import cut_on_disk as cut_on_disk
    from manyheads.surgery.grow import grow as grow
    from manyheads.surgery.head_prices import head_prices as head_prices
    from manyheads.surgery.headwise_cache import HeadwiseCache as HeadwiseCache
    from manyheads.surgery.merge import merge as merge
    from manyheads.surgery.plan import Plan as Plan
    from manyheads.surgery.plan import plan as plan
    from manyheads.surgery.prune import prune as prune
    from manyheads.surgery.recover import recover as recover
    from manyheads.surgery.refit import refit as refit
    from manyheads.tasks.trained import evaluate as evaluate
    from manyheads.tasks.trained import predict as predict
    from manyheads.training.diversity_terms import diversity_terms as diversity_terms
    from manyheads.training.dynamic_heads import DynamicHeads as DynamicHeads
    from manyheads.training.head_health import HeadHealth as HeadHealth
    from manyheads.training.orthogonal_heads import orthogonal_heads as orthogonal_heads
    from manyheads.training.sweep import sweep as sweep
    from manyheads.training.train import train as train
    from manyheads.view.inspect import inspect as inspect
    from manyheads.view.report import report as report
    from manyheads.view.serve import serve as serve
    from manyheads.view.show import show as show
    from manyheads.view.widget import widget as widget

# Where each public name is defined. It is imported when it is first used.
_NAMES = {
    "manyheads.capture.kernel_arguments": ("AttentionArguments",),
    "manyheads.capture.kernels": ("register_attention",),
    "manyheads.data.labelled": ("labelled",),
    "manyheads.heads.comparison.compare": ("compare",),
    "manyheads.heads.diversity": ("diversity",),
    "manyheads.heads.importance": ("agreement", "importance"),
    "manyheads.heads.maps": ("maps",),
    "manyheads.heads.measurements": ("merge_shards",),
    "manyheads.heads.roles": ("roles",),
    "manyheads.heads.silence": ("gates", "silence"),
    "manyheads.heads.table": ("HeadTable",),
    "manyheads.heads.watch": ("watch",),
    "manyheads.view.inspect": ("inspect",),
    "manyheads.models.open": ("open_model",),
    "manyheads.nn": ("mask",),
    "manyheads.view.report": ("report",),
    "manyheads.view.serve": ("serve",),
    "manyheads.nn.attention": ("attention",),
    "manyheads.nn.blocks": ("FeedForward", "TransformerBlock"),
    "manyheads.nn.cache": ("KVCache",),
    "manyheads.nn.generate": ("generate",),
    "manyheads.nn.key_shards": ("merge_statistics", "ring_statistics"),
    "manyheads.nn.mask": ("Mask",),
    "manyheads.nn.multihead": ("MultiHeadAttention",),
    "manyheads.nn.orthogonal_rows": ("fold_orthogonal",),
    "manyheads.nn.positions": ("LearnedPositions", "Rotary", "SinusoidalPositions", "sinusoidal"),
    "manyheads.nn.stack": ("DecoderCache",),
    "manyheads.nn.statistics": ("statistics", "statistics_of_scores"),
    "manyheads.nn.transformers": ("Decoder", "Encoder", "Seq2Seq"),
    "manyheads.studies.run": ("study",),
    "manyheads.surgery.card": ("card",),
    "manyheads.surgery.cache_choice": ("cache_plan",),
    "manyheads.surgery.cache_plan": ("CachePlan",),
    "manyheads.surgery.cut": ("cut",),
    "manyheads.surgery.cut_on_disk": ("cut_on_disk",),
    "manyheads.surgery.grow": ("grow",),
    "manyheads.surgery.head_prices": ("head_prices",),
    "manyheads.surgery.merge": ("merge",),
    "manyheads.models.export": ("export",),
    "manyheads.models.folder": ("load", "save"),
    "manyheads.models.model_card": ("push",),
    "manyheads.surgery.headwise_cache": ("HeadwiseCache",),
    "manyheads.surgery.plan": ("Plan", "plan"),
    "manyheads.surgery.prune": ("prune",),
    "manyheads.surgery.recover": ("recover",),
    "manyheads.surgery.refit": ("refit",),
    "manyheads.tasks.trained": ("evaluate", "predict"),
    "manyheads.training.diversity_terms": ("diversity_terms",),
    "manyheads.training.head_health": ("HeadHealth",),
    "manyheads.training.dynamic_heads": ("DynamicHeads",),
    "manyheads.training.train": ("train",),
    "manyheads.training.orthogonal_heads": ("orthogonal_heads",),
    "manyheads.training.sweep": ("sweep",),
    "manyheads.view.show": ("show",),
    "manyheads.view.widget": ("widget",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
# Rooms whose modules are public, too: `mh.nn.fused`, `mh.surgery.verify`.
_ROOMS = ("heads", "nn", "surgery")

__all__ = ["__version__", "tasks", *_ROOMS, *sorted(_HOMES)]

if not TYPE_CHECKING:  # type checkers read the imports above
    _room, _name = submodules(__name__), attributes(__name__, _HOMES)

    def __getattr__(name: str) -> object:
        return _room(name) if name in _ROOMS else _name(name)


def __dir__() -> list[str]:
    return sorted(__all__)
