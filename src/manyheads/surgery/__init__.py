"""Changing heads: plan, cut, refit, recover, prune."""

from __future__ import annotations

from manyheads.common.registry import register

register("importance.elimination", "manyheads.surgery.elimination:elimination")
