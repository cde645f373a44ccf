"""A sweep on the terminal: its settings with means, intervals and costs, and the answer in words."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from manyheads.common.language import words
from manyheads.training.sweep_result import FILES, SweepResult, with_margin
from manyheads.view.terminal.presentation import print_notes


@dataclass(frozen=True)
class SweepPresentation:
    """The result of a sweep, which has its files already."""

    result: SweepResult

    def document(self) -> dict[str, object]:
        """The settings, the runs and the answer."""
        return self.result.document()

    def show(self, console: Console) -> None:
        """A row for each setting, then the answer."""
        result = self.result
        equal = words("nothing held equal")
        if result.equal != "nothing":
            equal = words("equal {what}", what=words(result.equal))
        title = words(
            "{task}: {metric} by number of heads, {equal}, 95% intervals over seeds",
            task=result.task, metric=result.metric, equal=equal,
        )  # fmt: skip
        console.print(Text(title, "bold"), soft_wrap=True)
        options = list(result.settings[0].options)
        quality, costs = (Table(box=None, pad_edge=False, padding=(0, 2, 0, 0)) for _ in range(2))
        for title in (*options, words("seeds"), result.metric, words("worse by")):
            quality.add_column(title, justify="right")
        names = "time/step", "memory", "cache/token", "parameters", "steps", "FLOPs"
        for title in (*options, *map(words, names)):
            costs.add_column(title, justify="right")
        for row in result.table:
            chosen = [str(row[option]) for option in options]
            failed = " " + words("({count} failed)", count=row["failed"]) if row["failed"] else ""
            by, margin = row["worse_by"], row["worse_by_margin"]
            behind = "-" if math.isnan(by) else words("best") if by == 0 else with_margin(by, margin)
            doubt = "" if row["apart"] or not by > 0 else " ?"
            mean = "-" if math.isnan(row["mean"]) else with_margin(row["mean"], row["high"] - row["mean"])
            quality.add_row(*chosen, f"{row['seeds']}{failed}", mean, behind + doubt)
            memory, seconds = row["peak_memory_bytes"], row["seconds_per_step_median"]
            costs.add_row(
                *chosen,
                "-" if math.isnan(seconds) else f"{1000 * seconds:.3g} ms",
                "-" if memory is None else f"{memory / 2**20:,.0f} MiB",
                f"{row['cache_bytes_per_token']:,} B",
                f"{row['parameters']:,}",
                f"{row['steps']:,}",
                f"{row['flops']:.3g}",
            )
        console.print(quality)
        if any(not row["apart"] and row["worse_by"] > 0 for row in result.table):
            console.print(Text(words("? cannot be told apart from the best"), "dim"))
        console.print()
        console.print(costs)
        answer = "; ".join(map(words, result.answer.split("; ")))  # its parts are sentences of the table
        console.print(Text(f"\n{answer}"), soft_wrap=True)
        print_notes(result.notes, console)

    def write(self) -> list[str]:
        """Where the files are; the sweep has written them."""
        out = self.result.out
        files = [str(out / name) for name in FILES if (out / name).exists()]
        return [words("Written: {files}", files=", ".join(files))]


def how_it_ended(result: SweepResult) -> str | None:
    """The sentence for a sweep that Ctrl-C ended; raises an error for one of which no run finished."""
    if result.ended == "finished" and result.comparison is None:
        raise ValueError(result.answer)
    if result.ended != "interrupted":
        return None
    total = result.left + len(result.outcomes)
    return words(
        "Stopped after {done} of {total} runs; the same command continues from there.",
        done=len(result.outcomes), total=total,
    )  # fmt: skip
