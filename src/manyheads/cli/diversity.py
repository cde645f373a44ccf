"""``manyheads diversity``: which heads are alike, printed and drawn."""

from pathlib import Path

import manyheads as mh
from manyheads.cli.measuring import measure
from manyheads.cli.options import Json, Out
from manyheads.common.commands import listed_names
from manyheads.data.source import Source
from manyheads.data.split import Split
from manyheads.heads.options import DiversityOptions


def diversity(
    source: Source,
    split: Split,
    options: DiversityOptions,
    out: Out = Path("out/diversity"),
    json: Json = False,
) -> str | None:
    """Which heads of a model are alike, which differ, which work together and which cancel each other.

    Compares every pair of heads: where they look, what they output, what their weights read, what they add to
    the residual stream, how the model's output depends on them. Prints how distinct the heads of each layer
    are and the pairs that stand out; draws map.png, which places similar heads together, and matrices.png;
    writes diversity.json and diversity.txt.
    """
    measures = listed_names(options.measures) or list(mh.heads.diversity.MEASURES)
    diversity = mh.heads.measurements.Diversity(measures, options.rows)
    return measure(diversity, source, split, out, json, sample=options.sample)
