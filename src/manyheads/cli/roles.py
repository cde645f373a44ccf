"""``manyheads roles``: which head does what, each claim with its evidence."""

from pathlib import Path

import manyheads as mh
from manyheads.cli.measuring import measure
from manyheads.cli.options import Json, Out
from manyheads.common.commands import listed_names
from manyheads.data.source import Source
from manyheads.data.split import Split
from manyheads.heads.options import RoleOptions


def roles(
    source: Source,
    split: Split,
    options: RoleOptions,
    out: Out = Path("out/roles"),
    json: Json = False,
) -> str | None:
    """What each head is for: positional, sink, induction, syntactic and others, each against a baseline.

    The model reads your text (or an embedded one), random tokens that are repeated, a key hidden in a long
    text, and the sentences of a treebank if you give one. A head has a role when it does what the role says
    clearly more often than chance; what cannot be judged is listed with the reason. Writes roles.json,
    roles.csv and roles.txt.
    """
    reads_text = source.tokens is None or options.treebank is not None
    only = listed_names(options.only)
    roles = mh.heads.measurements.Roles(options.treebank, only, options.least, reads_text)
    return measure(roles, source, split, out, json, doing="Reading", sample=options.sample)
