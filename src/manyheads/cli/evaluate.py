"""``manyheads evaluate``: the metrics of a model, on its validation data or on yours."""

from typing import Annotated

import typer

import manyheads as mh
from manyheads.cli.options import Json
from manyheads.tasks.options import EvaluateOptions
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
    options: EvaluateOptions,
    json: Json = False,
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
        result = mh.evaluate(model, options.data, **options.arguments, progress=progress)
    terminal.training.print_evaluation(result, model, options.data, as_json=json)
    return terminal.training.where_it_stopped(result)
