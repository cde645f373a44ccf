"""``manyheads roles``: which head does what, each claim with its evidence."""

from functools import partial
from pathlib import Path
from typing import Annotated

import manyheads as mh
from manyheads.cli import options
from manyheads.common.interrupts import interrupted, interruptible
from manyheads.common.language import words
from manyheads.common.out_folder import prepared
from manyheads.common.processes import rank
from manyheads.view import terminal
from manyheads.view.progress_bar import progress_bar


def roles(
    source: options.Source,
    split: options.Split,
    treebank: Annotated[Path | None, "Sentences with dependencies (CoNLL-U), for syntactic roles."] = None,
    only: Annotated[str | None, "Some roles only, as in: induction,retrieval"] = None,
    least: Annotated[int, "The fewest cases on which a role may be claimed."] = 100,
    sample: options.Sample = 16384,
    out: options.Out = Path("out/roles"),
    json: options.Json = False,
) -> str | None:
    """What each head is for: positional, sink, induction, syntactic and others, each against a baseline.

    The model reads your text (or an embedded one), random tokens that are repeated, a key hidden in a long
    text, and the sentences of a treebank if you give one. A head has a role when it does what the role says
    clearly more often than chance; what cannot be judged is listed with the reason. Writes roles.json,
    roles.csv and roles.txt.
    """
    loaded, corpus = source.open(sample=sample)
    reads_text = corpus.unit == "tokens" and (source.tokens is None or treebank is not None)
    measurement = mh.heads.measurements.Roles(treebank, options.names(only), least, reads_text)
    with prepared(out, split.file), interruptible():
        with progress_bar("Reading", hidden=rank() > 0) as progress:
            reopen = partial(source.open, sample=sample)
            table = split.measured(measurement, loaded, corpus, reopen, out, progress)
        if options.present_part(table, out, as_json=json):
            return None
        result = terminal.roles.RolesPresentation(table, loaded.name, corpus, out)
        terminal.presentation.present(result, as_json=json)
        return words("Stopped: the roles are judged on what was read until then.") if interrupted() else None
