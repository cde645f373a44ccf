"""Two models, or two texts, side by side: which heads moved."""

from typing import TYPE_CHECKING

from manyheads.common.lazy_names import submodules
from manyheads.heads.comparison.compare import Comparison as Comparison
from manyheads.heads.comparison.compare import compare as compare

if TYPE_CHECKING:
    from manyheads.heads.comparison import sides as sides

__getattr__ = submodules(__name__)
