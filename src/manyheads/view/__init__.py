"""Drawing: the report, the live page, the notebook widget, figures, the terminal. It measures nothing."""

from typing import TYPE_CHECKING

from manyheads.common.lazy_names import submodules
from manyheads.common.registry import register

if TYPE_CHECKING:
    from manyheads.view import demo_text as demo_text
    from manyheads.view import study as study
    from manyheads.view import terminal as terminal
else:
    __getattr__ = submodules(__name__)

# How a HeadTable and what `watch` returns show themselves in a notebook.
register("view.notebook", "manyheads.view.widget:bundle")
# How a Map draws itself there.
register("view.map_picture", "manyheads.view.figures.head_pictures:map_picture")
# The figure that prune puts into the folder of a pruned model.
register("view.pruning_curve", "manyheads.view.figures.pruning_curve:draw")
# The figure of a sweep.
register("view.sweep_curve", "manyheads.view.figures.sweep:draw")
# The figure of heads that changed while training.
register("view.head_history", "manyheads.view.figures.head_history:draw")
