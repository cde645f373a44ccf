"""Translation: the task, and synthetic sentences."""
