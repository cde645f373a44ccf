"""``manyheads cache``: which key/value heads may forget, and what that costs at several budgets."""

from pathlib import Path
from typing import Annotated

import typer

import manyheads as mh
from manyheads.cli import options
from manyheads.models.opening import Opening
from manyheads.view import terminal
from manyheads.view.progress_bar import progress_bar


def cache(
    opening: Opening,
    model: options.Model = None,
    text: Annotated[str | None, "A text file, read as one long text; - for standard input."] = None,
    budget: Annotated[float, "The share of key/value heads that keep everything, 0 to 1."] = 0.5,
    first: Annotated[int, "How many of the first tokens a head that forgets keeps."] = 4,
    window: Annotated[int, "How many of the last tokens a head that forgets keeps."] = 256,
    length: Annotated[int, "Read the text in pieces of this many tokens."] = 2048,
    texts: Annotated[int, "How many pieces to read: half to find the heads, half for the curve."] = 8,
    protected: Annotated[float, "Protect heads that cost more nats than this for a copied token."] = 0.02,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file for the plan.")] = Path("out/plan.json"),
    json: options.Json = False,
) -> None:
    """Find the key/value heads that may forget all but the first and the last tokens.

    Prints the perplexity by budget, on pieces of the text that were not used to choose, and writes the plan
    for mh.HeadwiseCache(model, mh.CachePlan.load(FILE)).
    """
    with options.loading(model):
        loaded = mh.open_model(model, head=True, **opening.how)
    with progress_bar() as progress:
        planned = mh.surgery.cache_curve.plan_cache(
            loaded, text, budget, first=first, window=window, length=length, texts=texts,
            protected=protected, out=out, progress=progress,
        )  # fmt: skip
    terminal.cache.print_planned(planned, out, as_json=json)
