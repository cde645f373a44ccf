"""The curve of a smaller cache for the terminal."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from manyheads.common.json_numbers import plain
from manyheads.common.language import words
from manyheads.surgery.cache_curve import PlannedCache


def print_planned(planned: PlannedCache, out: Path, *, as_json: bool) -> None:
    """Print perplexity by budget, and where the plan is."""
    if as_json:
        print(json.dumps(plain(planned.document() | {"out": str(out)}), indent=1), flush=True)
        return
    console, plan = Console(), planned.plan
    total = sum(plan.sizes.values())
    sentence = words(
        "Priced on {priced} pieces of {text}, compared on {compared} others, {length:,} tokens each. A head "
        "that forgets keeps {first} first and {window} last tokens.",
        priced=planned.priced, text=planned.text, compared=planned.compared, length=planned.length,
        first=plan.first, window=plan.window,
    )  # fmt: skip
    console.print(Text(sentence), soft_wrap=True)
    title = words("{model}: {count} key/value heads", model=planned.model, count=total)
    table = Table(title=title, title_justify="left")
    columns = [words("budget"), words("heads that forget"), words("cache"), words("perplexity")]
    for name in (*columns, words("beside the full cache")):
        table.add_column(name, justify="right")
    for point in planned.points:
        interval = words(" ({low:.3f} to {high:.3f})", low=point.low, high=point.high)
        interval = interval if point.low == point.low else ""
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
        note = words("{count} heads read far back and are protected.", count=protected)
        console.print(Text(note), soft_wrap=True)
    use = f'mh.HeadwiseCache(model, mh.CachePlan.load("{out}"))'
    console.print(Text(words("The plan is in {out}; {use} follows it.", out=out, use=use)), soft_wrap=True)
