"""``manyheads importance``: which heads matter, by several methods side by side."""

from pathlib import Path

import manyheads as mh
from manyheads.cli.measuring import measure
from manyheads.cli.options import Json, Out
from manyheads.common.commands import listed_names
from manyheads.data.source import Source
from manyheads.data.split import Split
from manyheads.heads.options import ImportanceOptions


def importance(
    source: Source,
    split: Split,
    options: ImportanceOptions,
    out: Out = Path("out/importance"),
    json: Json = False,
) -> str | None:
    """Which heads matter: each method's ranking with standard errors, and how far the methods agree.

    fisher predicts what silencing each head would change, for all heads from one backward pass and without
    labels. leave-one-out silences one head after the other: exact and slow; after Ctrl-C the same command
    continues where it stopped. The change is KL(full || silenced), in nats a token for language models and in
    nats a sequence for classifiers, and 1 - cosine of the mean hidden state for models without a head of
    their own.
    """
    names = listed_names(options.method)
    methods = None if names is None else [name for name in names if name]
    state = out / "leave-one-out.state.json"
    importance = mh.heads.measurements.Importance(
        methods, options.loss, options.gates, options.seed, options.unverified, state, options.memory
    )
    return measure(importance, source, split, out, json, labels=options.loss == "classification")
