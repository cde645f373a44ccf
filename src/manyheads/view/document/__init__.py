"""The document: what was measured about a model, as the page in web/ draws it."""

from manyheads.view.document.assemble import About, document
from manyheads.view.document.example import example
from manyheads.view.document.sample import Sample, of_batches, of_corpus

__all__ = ["About", "Sample", "document", "example", "of_batches", "of_corpus"]
