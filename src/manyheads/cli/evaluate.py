"""``manyheads evaluate``: the metrics of a trained model, on its validation data or on yours."""

from __future__ import annotations

from typing import Annotated

from rich.console import Console

from manyheads.cli import options


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
    errors = Console(stderr=True)
    with errors.status(f"Loading {folder}"):
        from manyheads.tasks import trained
        from manyheads.view.progress_bar import progress_bar
        from manyheads.view.terminal.training import print_evaluation
    with progress_bar(errors, unit="examples") as progress:
        progress("measure", 0, None)
        result = trained.evaluate(
            folder, data, beams=beams, batch_tokens=batch_tokens, device=device, progress=progress
        )
    print_evaluation(result, folder, data, as_json=json)
    if not result.interrupted:
        return None
    return f"Stopped after {result.examples:,} of {result.total:,} examples; the metrics are theirs."
