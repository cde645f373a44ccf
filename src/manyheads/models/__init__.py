"""Models come and go: opened, described, saved, loaded, and what a cut leaves in them."""

from typing import TYPE_CHECKING

from manyheads.common.lazy_names import submodules

if TYPE_CHECKING:
    from manyheads.models import open as open
else:
    __getattr__ = submodules(__name__)
