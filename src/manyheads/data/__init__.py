"""What models read: corpora, batches, examples, and readers of files."""
