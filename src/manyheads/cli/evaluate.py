"""``manyheads evaluate``: the metrics of a trained model, on its validation data or on yours."""

from typing import Annotated

import manyheads as mh
from manyheads.cli import options
from manyheads.view import terminal
from manyheads.view.progress_bar import progress_bar


def evaluate(
    folder: options.TrainedFolder,
    data: options.Data = None,
    beams: Annotated[int | None, "Beam width for translation and speech: wider is slower and better."] = None,
    batch_tokens: options.BatchTokens = 4096,
    device: options.Device = None,
    json: options.Json = False,
) -> str | None:
    """How good a trained model is, by the metrics of its task, on all examples.

    Of --data, the test part is read if there is one; of the data that the model learned from, the part that
    was held out. Files outside of the folder are read only if you name them by --data.
    """
    with progress_bar(unit="examples") as progress:
        progress("measure", 0, None)
        result = mh.evaluate(
            folder, data, beams=beams, batch_tokens=batch_tokens, device=device, progress=progress
        )
    terminal.training.print_evaluation(result, folder, data, as_json=json)
    return terminal.training.where_it_stopped(result)
