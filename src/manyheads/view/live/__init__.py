"""The live page: a model behind a small server on this machine; its heads answer as one types and clicks."""

from typing import TYPE_CHECKING

from manyheads.common.lazy_names import submodules

if TYPE_CHECKING:
    from manyheads.view.live import server as server
    from manyheads.view.live import session as session
else:
    __getattr__ = submodules(__name__)
