"""Looking: one sentence on its way through a model, in the terminal and as a picture."""
