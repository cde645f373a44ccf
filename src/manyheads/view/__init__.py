"""Looking: one sentence on its way through a model, in the terminal and as a picture."""

from manyheads.common.registry import register

# How a table, or what is being watched, shows itself in a notebook.
register("view.notebook", "manyheads.view.widget:bundle")
# The figure that prune puts into the folder of a pruned model.
register("view.pruning_curve", "manyheads.view.figures.pruning_curve:draw")
