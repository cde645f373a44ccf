"""What a model says about an input, and what changes when a head is silenced."""

from typing import TYPE_CHECKING

from manyheads.common.lazy_names import submodules

if TYPE_CHECKING:
    from manyheads.heads.effects import bert_steps as bert_steps
else:
    __getattr__ = submodules(__name__)
