"""``manyheads importance``: which heads matter, by several methods side by side."""

from functools import partial
from pathlib import Path
from typing import Annotated

import manyheads as mh
from manyheads.cli import options
from manyheads.common.interrupts import interruptible
from manyheads.common.out_folder import prepared
from manyheads.common.processes import rank
from manyheads.view import terminal
from manyheads.view.progress_bar import progress_bar


def importance(
    source: options.Source,
    split: options.Split,
    method: Annotated[
        str | None,
        "One or several: fisher, elimination, gradient, leave-one-out, mean-ablation, confidence, "
        "output-norm, relevance, gates, random; fisher by default, with labels gradient and fisher.",
    ] = None,
    loss: Annotated[
        str | None,
        "For gradient, leave-one-out, mean-ablation and gates: causal, masked, classification, seq2seq, "
        "embedding, labels; with labels, that of their task by default.",
    ] = None,
    gates: Annotated[int | None, "How many heads the method gates keeps; half of them by default."] = None,
    unverified: options.Unverified = "refuse",
    seed: Annotated[int, "The seed of all random numbers."] = 0,
    memory: options.Memory = None,
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
    comparing = mh.heads.importance.method_comparison
    methods = None if method is None else [name for name in options.names(method) or () if name]
    comparing.check_methods(methods, loss)
    reopen = partial(source.open, labels=loss == "classification")
    loaded, corpus = reopen()
    measurement = mh.heads.measurements.Importance(
        methods, loss, gates, seed, unverified, out / "leave-one-out.state.json", memory
    )
    with prepared(out, split.file), interruptible():
        with progress_bar(hidden=rank() > 0) as progress:
            comparison = mh.heads.measurements.measured_as_asked(
                split, measurement, loaded, corpus, reopen, out, progress
            )
        if options.present_part(comparison, out, as_json=json):
            return None
        if comparison.tables:
            result = terminal.importance.ImportancePresentation(comparison, loaded.name, corpus, out)
            terminal.presentation.present(result, as_json=json)
    return terminal.importance.ending(comparison, out)
