"""``manyheads diversity``: which heads are alike, printed and drawn."""

from functools import partial
from pathlib import Path
from typing import Annotated

import manyheads as mh
from manyheads.cli import options
from manyheads.common.interrupts import interrupted, interruptible
from manyheads.common.out_folder import prepared
from manyheads.common.processes import rank
from manyheads.view import terminal
from manyheads.view.progress_bar import progress_bar


def diversity(
    source: options.Source,
    split: options.Split,
    rows: Annotated[int, "Queries of each batch on which attention is compared."] = 128,
    measures: Annotated[
        str | None, "Some of attention,outputs,subspaces,contributions,gradients; all by default."
    ] = None,
    sample: options.Sample = 16384,
    out: options.Out = Path("out/diversity"),
    json: options.Json = False,
) -> str | None:
    """Which heads of a model are alike, which differ, which work together and which cancel each other.

    Compares every pair of heads: where they look, what they output, what their weights read, what they add to
    the residual stream, how the model's output depends on them. Prints how distinct the heads of each layer
    are and the pairs that stand out; draws map.png, which places similar heads together, and matrices.png;
    writes diversity.json and diversity.txt.
    """
    loaded, corpus = source.open(sample=sample)
    chosen = options.names(measures) or list(mh.heads.diversity.MEASURES)
    measurement = mh.heads.measurements.Diversity(chosen, rows)
    with prepared(out, split.file), interruptible():
        with progress_bar(hidden=rank() > 0) as progress, terminal.diversity.warnings_as_notes() as notes:
            reopen = partial(source.open, sample=sample)
            pairs = split.measured(measurement, loaded, corpus, reopen, out, progress)
        if options.present_part(pairs, out, as_json=json):
            return None
        result = terminal.diversity.DiversityPresentation(pairs, loaded.name, corpus, notes, out)
        terminal.presentation.present(result, as_json=json)
        return result.ending(interrupted())
