"""``manyheads prune``: a smaller model in a folder, and a card of what it costs and saves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from manyheads.cli import options


def prune(
    source: options.Source,
    keep: Annotated[float | None, "The share of heads that stays, between 0 and 1."] = None,
    plan: Annotated[Path | None, "A plan.json to follow instead; it must be of this very model."] = None,
    refit: Annotated[bool, "Fit the remaining output projections to the uncut model."] = True,
    recover: Annotated[int, "The number of steps of distillation from the uncut model."] = 0,
    rounds: Annotated[int, "Remove the heads in this many rounds, and rank them again in between."] = 1,
    method: Annotated[str, "How heads are ranked: a method of manyheads importance."] = "elimination",
    uniform: Annotated[bool, "Remove the same number of heads from every layer."] = False,
    floor: Annotated[int, "The fewest heads that every layer keeps."] = 1,
    protect: Annotated[
        str,
        "Heads that stay: 3.5,4.0 (layer.head), or out/roles/roles.json for its retrieval heads, "
        "roles.json:induction for those of another role; or several of these, separated by commas.",
    ] = "",
    metric: Annotated[
        str | None, "Measure quality by your own function of the model, package.module:function."
    ] = None,
    curve: Annotated[bool, "Also draw quality against heads kept, with the random control."] = False,
    unverified: options.Unverified = "refuse",
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The folder for the smaller model; it must not exist yet.")
    ] = Path("out/prune"),
    json: options.Json = False,
) -> str | None:
    """Cut a model to a share of its heads, refit what is left, and save it.

    Every tenth text is held out: the card compares the two models there, with standard errors, by perplexity,
    by accuracy where labels are available, by agreement with the uncut model where they are not, or by the
    cosine to the uncut model's embedding; it has the sizes and the measured times. The folder holds the model
    for mh.load, plan.json, card.json and, with --curve, curve.png. After Ctrl-C during --recover the model is
    saved as it is then, and the state stays beside the folder: remove the folder and repeat the command to
    continue.
    """
    errors = Console(stderr=True)
    with errors.status("Loading torch"):
        from manyheads.surgery.pruned_folder import PruneOptions, check_free, prune_to_folder
        from manyheads.view.progress_bar import progress_bar
        from manyheads.view.terminal.prune import print_pruned, where_it_stopped

        settings = PruneOptions(
            keep=keep,
            plan=plan,
            refit=refit,
            recover=recover,
            rounds=rounds,
            method=method,
            uniform=uniform,
            floor=floor,
            protect=protect,
            metric=metric,
            curve=curve,
            unverified=unverified,
        )
        check_free(out)
    loaded, corpus = source.open(labels=True)
    with progress_bar(errors) as progress:
        pruned = prune_to_folder(loaded, corpus, out, settings, progress)
    print_pruned(pruned, as_json=json)
    return where_it_stopped(pruned, recover, curve)
