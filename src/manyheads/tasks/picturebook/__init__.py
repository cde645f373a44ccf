"""Picture book: the task, its models, captions, synthetic pictures."""
