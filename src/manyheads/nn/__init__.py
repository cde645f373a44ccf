"""How heads attend: the attention function, masks, positions, statistics, the module and the transformers."""

from manyheads.common.lazy_names import submodules

__getattr__ = submodules(__name__)
