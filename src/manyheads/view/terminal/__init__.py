"""What the verbs print: tables, summaries and cards for people, JSON for machines."""

from typing import TYPE_CHECKING

from manyheads.common.lazy_names import submodules

if TYPE_CHECKING:
    from manyheads.view.terminal import cache as cache
    from manyheads.view.terminal import compare as compare
    from manyheads.view.terminal import diversity as diversity
    from manyheads.view.terminal import export as export
    from manyheads.view.terminal import greeting as greeting
    from manyheads.view.terminal import importance as importance
    from manyheads.view.terminal import inspect as inspect
    from manyheads.view.terminal import presentation as presentation
    from manyheads.view.terminal import prune as prune
    from manyheads.view.terminal import roles as roles
    from manyheads.view.terminal import serving as serving
    from manyheads.view.terminal import shards as shards
    from manyheads.view.terminal import sweep as sweep
    from manyheads.view.terminal import training as training
else:
    __getattr__ = submodules(__name__)
