"""``manyheads importance``: which heads matter, by several methods side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rich.console import Console

from manyheads.cli import options
from manyheads.common.interrupts import interruptible

STATE = "leave-one-out.state.json"


def importance(
    source: options.Source,
    method: Annotated[
        str,
        "One or several: fisher, elimination, gradient, leave-one-out, confidence, output-norm, "
        "relevance, gates, random.",
    ] = "fisher",
    loss: Annotated[
        str | None,
        "For gradient, leave-one-out and gates: causal, masked, classification, seq2seq, embedding.",
    ] = None,
    gates: Annotated[int | None, "How many heads the method gates keeps; half of them by default."] = None,
    unverified: options.Unverified = "refuse",
    seed: Annotated[int, "The seed of all random numbers."] = 0,
    out: options.Out = Path("out/importance"),
    json: options.Json = False,
) -> str | None:
    """Which heads matter: each method's ranking with standard errors, and how far the methods agree.

    fisher predicts what silencing each head would change, for all heads from one backward pass and without
    labels. leave-one-out silences one head after the other: exact and slow; after Ctrl-C the same command
    continues where it stopped. The change is KL(full || silenced), in nats a token for language models and in
    nats a sequence for classifiers, and 1 - cosine of the mean hidden state for models without a head of
    their own.
    """
    errors = Console(stderr=True)
    with errors.status("Loading torch"):
        from manyheads.common.out_folder import prepared
        from manyheads.heads.importance.losses import named
        from manyheads.heads.importance.method_comparison import check_methods, compare_methods
        from manyheads.view.progress_bar import progress_bar
        from manyheads.view.terminal.importance import ImportancePresentation, where_it_stopped
        from manyheads.view.terminal.presentation import present

        methods = check_methods([name for name in options.names(method) or () if name])
        named(loss)
    loaded, corpus = source.open(labels=loss == "classification")
    with prepared(out), interruptible():
        with progress_bar(errors) as progress:
            comparison = compare_methods(
                loaded,
                corpus,
                methods,
                loss,
                gates=gates,
                seed=seed,
                state=out / STATE,
                unverified=unverified,
                progress=progress,
            )
        if comparison.tables:
            present(ImportancePresentation(comparison, loaded.name, corpus, out), as_json=json)
    if comparison.error is not None:
        saved = f"; what was computed before is in {out}" if comparison.tables else ""
        raise ValueError(f"{comparison.error}{saved}") from comparison.error
    return where_it_stopped(comparison) if comparison.stopped else None
