"""Runs of the training loop that are measured: kept in a folder, gone on with after any end, timed."""

import json
import math
import signal
from dataclasses import asdict
from pathlib import Path

from bench import harness
from bench.cost import Cost, since
from manyheads.common.whole_files import write_whole
from manyheads.training.loop import Result
from manyheads.training.report import Report
from manyheads.training.task import Task
from manyheads.training.train import train

KEPT_EVERY = 20  # steps


def run(
    task: Task, data: Path | None, out: Path, minutes: float = math.inf, **options: object
) -> tuple[Result, Cost]:
    """Begin a run or go on with it, until so many minutes of two cores; what it costs is kept beside it."""
    kept = out.with_name(f"{out.name}-cost.json")
    before = Cost(**json.loads(kept.read_text())) if kept.exists() else Cost()
    cost = since(before)
    ended: list[int] = []

    def tell(report: Report) -> None:
        if report.step % KEPT_EVERY == 0 or report.metrics:
            write_whole(kept, json.dumps(asdict(cost())))
        if report.metrics:
            numbers = ", ".join(f"{name} {value:.3f}" for name, value in report.metrics.items())
            harness.say(f"step {report.step}: loss {report.loss:.3f}; {numbers}; {cost()}")
        if cost().minutes >= minutes and not ended:
            ended.append(report.step)
            signal.raise_signal(signal.SIGINT)  # the loop keeps a checkpoint and leaves; twice would be rude

    source = None if data is None else str(data)
    result = train(task, source, out=out, resume=True, callbacks=[tell], **options)
    write_whole(kept, json.dumps(asdict(cost())))
    if result.ended == "interrupted" and cost().minutes < minutes:
        raise SystemExit(f"stopped at step {result.step}; the same command goes on")
    return result, cost()
