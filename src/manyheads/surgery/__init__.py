"""Changing heads: plan, cut, grow, merge, refit, recover, prune."""

from manyheads.common.lazy_names import submodules

__getattr__ = submodules(__name__)
