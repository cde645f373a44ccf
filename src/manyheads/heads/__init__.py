"""What the heads of a model do: see them, judge them, switch them off."""

from typing import TYPE_CHECKING

from manyheads.common.lazy_names import submodules

if TYPE_CHECKING:
    from manyheads.heads import comparison as comparison
    from manyheads.heads import diversity as diversity
    from manyheads.heads import effects as effects
    from manyheads.heads import importance as importance
    from manyheads.heads import inspect as inspect
    from manyheads.heads import measurements as measurements

__getattr__ = submodules(__name__)
