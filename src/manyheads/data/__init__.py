"""What models read: corpora, batches, examples, and readers of files."""

from typing import TYPE_CHECKING

from manyheads.common.lazy_names import submodules

if TYPE_CHECKING:
    from manyheads.data import corpus as corpus
else:
    __getattr__ = submodules(__name__)
