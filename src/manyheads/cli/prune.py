"""``manyheads prune``: a smaller model in a folder, and a card of what it costs and saves."""

from pathlib import Path

import manyheads as mh
from manyheads.cli.measuring import opened
from manyheads.cli.options import Json, NewFolder
from manyheads.common.out_folder import check_free
from manyheads.common.processes import rank
from manyheads.data.source import Source
from manyheads.heads.options import Unverified
from manyheads.surgery.prune_options import PruneOptions
from manyheads.view import terminal
from manyheads.view.progress_bar import progress_bar


def prune(
    source: Source,
    options: PruneOptions,
    unverified: Unverified = "refuse",
    out: NewFolder = Path("out/prune"),
    json: Json = False,
) -> str | None:
    """Cut a model to a share of its heads, or merge its key heads, refit what is left, and save it.

    Every tenth text is held out. The card compares the two models there, with standard errors: by the metric
    of the task where --data has labels, else by perplexity, by accuracy, by agreement with the uncut model or
    by the cosine to its embedding. It also has the sizes and the measured times; for a model that generates,
    the bytes of its cache and its tokens per second.

    The folder holds the model, plan.json, card.json, README.md (the model card) and, with --curve, curve.png.

    After Ctrl-C during --recover the model is saved as it is then, and the state stays beside the folder:
    remove the folder and repeat the command to continue.
    """
    check_free(out)
    if options.on_disk:
        with progress_bar() as progress:
            cut = mh.surgery.cut_on_disk.follow_plan(
                source.model, options.plan, out, unverified, progress, source.how
            )
        terminal.prune.print_cut_on_disk(cut, as_json=json)
        return None
    loaded, corpus = opened(source, labels=True)
    with progress_bar(hidden=rank() > 0) as progress:
        pruned = mh.surgery.pruned_folder.prune_to_folder(
            loaded, corpus, out, options, unverified=unverified, progress=progress
        )
    if pruned is None:  # another process of torchrun presents it
        return None
    terminal.prune.print_pruned(pruned, as_json=json)
    return terminal.prune.where_it_stopped(pruned, options.recover, options.curve)
