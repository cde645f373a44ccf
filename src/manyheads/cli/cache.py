"""``manyheads cache``: which key/value heads may forget, and what that costs at several budgets."""

from pathlib import Path
from typing import Annotated

import manyheads as mh
from manyheads.cli.options import Json
from manyheads.common.console import loading
from manyheads.data.source import Model
from manyheads.models.opening import Opening
from manyheads.surgery.cache_options import CacheOptions
from manyheads.view import terminal
from manyheads.view.progress_bar import progress_bar


def cache(
    opening: Opening,
    options: CacheOptions,
    model: Model = None,
    text: Annotated[str | None, "A text file, read as one long text; - for standard input."] = None,
    out: Annotated[Path, "The file for the plan."] = Path("out/plan.json"),
    json: Json = False,
) -> None:
    """Find the key/value heads that may forget all but the first and the last tokens.

    Prints the perplexity by budget, on pieces of the text that were not used to choose, and writes the plan
    for mh.HeadwiseCache(model, mh.CachePlan.load(FILE)).
    """
    with loading(model):
        loaded = mh.open_model(model, head=True, **opening.how)
    with progress_bar() as progress:
        planned = mh.surgery.cache_curve.plan_cache(loaded, text, **vars(options), out=out, progress=progress)
    terminal.cache.print_planned(planned, out, as_json=json)
