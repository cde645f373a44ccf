"""Changing heads: plan, cut, grow, merge, refit, recover, prune."""

from typing import TYPE_CHECKING

from manyheads.common.lazy_names import submodules
from manyheads.common.registry import register

if TYPE_CHECKING:
    from manyheads.surgery import cut_on_disk as cut_on_disk
    from manyheads.surgery import pruned_folder as pruned_folder

__getattr__ = submodules(__name__)

register("importance.elimination", "manyheads.surgery.elimination:elimination")
register("importance.elimination.part", "manyheads.surgery.elimination:part_of_elimination")
register("importance.elimination.joined", "manyheads.surgery.elimination:joined_eliminations")
register("effects.silencing_curve", "manyheads.surgery.silencing_curve:silencing_curve")
