"""What the heads of a model do: see them, judge them, switch them off."""

from manyheads.common.lazy_names import submodules

__getattr__ = submodules(__name__)
