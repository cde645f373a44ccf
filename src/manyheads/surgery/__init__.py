"""Changing heads: plan, cut, grow, refit, recover, prune."""

from __future__ import annotations

from manyheads.common.lazy_names import submodules
from manyheads.common.registry import register

register("importance.elimination", "manyheads.surgery.elimination:elimination")

__getattr__ = submodules(__name__)
