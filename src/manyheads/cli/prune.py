"""``manyheads prune``: a smaller model in a folder, and a card of what it costs and saves."""

from pathlib import Path
from typing import Annotated

import typer

import manyheads as mh
from manyheads.cli import options
from manyheads.cli.measuring import opened
from manyheads.common.out_folder import check_free
from manyheads.common.processes import rank
from manyheads.data.source import Source
from manyheads.heads.options import Unverified
from manyheads.surgery.prune_options import PruneOptions
from manyheads.view import terminal
from manyheads.view.progress_bar import progress_bar


def prune(
    source: Source,
    how: PruneOptions,
    unverified: Unverified = "refuse",
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The folder for the smaller model; it must not exist yet.")
    ] = Path("out/prune"),
    json: options.Json = False,
) -> str | None:
    """Cut a model to a share of its heads, or merge its key heads, refit what is left, and save it.

    Every tenth text is held out: the card compares the two models there, with standard errors, by the measure
    of the task where --data has labels; else by perplexity, by accuracy where labels are available, by
    agreement with the uncut model where they are not, or by the cosine to the uncut model's embedding; it has
    the sizes and the measured times, and for a model that generates the bytes of its cache and its tokens per
    second. The folder holds the model, plan.json, card.json, README.md (the model
    card) and, with --curve, curve.png. After Ctrl-C during --recover the model is saved as it is then, and
    the state stays beside the folder: remove the folder and repeat the command to continue.
    """
    check_free(out)
    if how.on_disk:
        with progress_bar() as progress:
            cut = mh.surgery.cut_on_disk.follow_plan(
                source.model, how.plan, out, unverified, progress, source.how
            )
        terminal.prune.print_cut_on_disk(cut, as_json=json)
        return None
    loaded, corpus = opened(source, labels=True)
    with progress_bar(hidden=rank() > 0) as progress:
        pruned = mh.surgery.pruned_folder.prune_to_folder(
            loaded, corpus, out, how, unverified=unverified, progress=progress
        )
    if pruned is None:  # another process of torchrun presents it
        return None
    terminal.prune.print_pruned(pruned, as_json=json)
    return terminal.prune.where_it_stopped(pruned, how.recover, how.curve)
