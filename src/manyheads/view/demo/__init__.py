"""One sentence on its way through a model, step by step: what `manyheads demo` shows."""
