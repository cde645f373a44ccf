"""Learning: the loop on Accelerate, checkpoints, schedules, and head statistics while it runs."""

from typing import TYPE_CHECKING

from manyheads.common.lazy_names import submodules

if TYPE_CHECKING:
    from manyheads.training import sweep as sweep
else:
    __getattr__ = submodules(__name__)
