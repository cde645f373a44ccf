"""``manyheads evaluate``: the metrics of a model, on its validation data or on yours."""

from typing import Annotated

import typer

import manyheads as mh
from manyheads.cli import options
from manyheads.data.columns import Columns
from manyheads.models.opening import Opening
from manyheads.view import terminal
from manyheads.view.progress_bar import progress_bar


def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            help="A folder that train wrote, or that prune wrote for a trained model; or, with --data, any "
            "model with a task head: a folder, a hub name, or package.module:factory."
        ),
    ],
    rows: Columns,
    opening: Opening,
    max_length: options.MaxLength = None,
    limit: options.Limit = None,
    beams: Annotated[int | None, "Beam width for translation and speech: wider is slower and better."] = None,
    batch_tokens: options.BatchTokens = 4096,
    json: options.Json = False,
) -> str | None:
    """How good a model is, by the metrics of its task.

    A model of transformers with a task head is measured on the rows of --data: accuracy, F1, exact match,
    perplexity, BLEU, word error rate ..., each with its 95% interval over the rows. A model that train wrote
    is measured on all examples: of --data, the test part is read if there is one; of the data that the model
    learned from, the part that was held out. Files outside of its folder are read only if you name them by
    --data.
    """
    with progress_bar(unit="examples") as progress:
        progress("measure", 0, None)
        result = mh.evaluate(
            model, rows.data, text=options.names(rows.text_column),
            label=rows.label_column, split=rows.split, limit=limit, max_length=max_length, beams=beams,
            batch_tokens=batch_tokens, **opening.how, progress=progress,
        )  # fmt: skip
    terminal.training.print_evaluation(result, model, rows.data, as_json=json)
    return terminal.training.where_it_stopped(result)
