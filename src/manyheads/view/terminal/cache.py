"""The curve of a smaller cache for the terminal."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from manyheads.common.json_numbers import plain
from manyheads.surgery.cache_curve import PlannedCache


def print_planned(planned: PlannedCache, out: Path, *, as_json: bool) -> None:
    """Print perplexity by budget, and where the plan is."""
    if as_json:
        print(json.dumps(plain(planned.document() | {"out": str(out)}), indent=1), flush=True)
        return
    console, plan = Console(), planned.plan
    total = sum(plan.sizes.values())
    sentence = (
        f"Priced on {planned.priced} pieces of {planned.text}, compared on {planned.compared} others, "
        f"{planned.length:,} tokens each. A head that forgets keeps {plan.first} first and {plan.window} "
        "last tokens."
    )
    console.print(Text(sentence), soft_wrap=True)
    table = Table(title=f"{planned.model}: {total} key/value heads", title_justify="left")
    for name in ("budget", "heads that forget", "cache", "perplexity", "beside the full cache"):
        table.add_column(name, justify="right")
    for point in planned.points:
        interval = f" ({point.low:.3f} to {point.high:.3f})" if point.low == point.low else ""
        table.add_row(
            f"{point.budget:.2f}",
            str(point.forgetting),
            f"{point.share:.0%}",
            f"{point.perplexity:.3f}",
            f"{point.factor:.4f}x{interval}",
            style="bold" if point.forgetting == plan.forgetting else None,
        )
    console.print(table)
    protected = sum(map(len, plan.protected.values()))
    if protected:
        console.print(Text(f"{protected} heads read far back and are protected."), soft_wrap=True)
    use = f'mh.HeadwiseCache(model, mh.CachePlan.load("{out}"))'
    console.print(Text(f"The plan is in {out}; {use} follows it."), soft_wrap=True)
