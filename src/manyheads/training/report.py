"""What is reported of every step of training: to callbacks, to the log, to trackers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from accelerate import Accelerator

from manyheads.heads.table import HeadTable
from manyheads.training.head_alarms import Alarm
from manyheads.training.log import Line

TRACK_EVERY = 10  # trackers flush every time, which takes as long as a step of a small model


@dataclass
class Report:
    """What a callback receives after every step."""

    step: int  # how many updates were made
    steps: int  # how many there will be
    loss: float  # of this step's batch
    rate: float
    gradient_norm: float  # before clipping
    tokens: int  # predicted in this step
    seconds: float  # this step took
    metrics: dict[str, float] = field(default_factory=dict)  # after an evaluation
    best: bool = False  # these are the best so far
    heads: HeadTable | None = None  # if the heads were measured in this step
    diversity: dict[str, float] = field(default_factory=dict)  # the terms, without their weights
    alarms: list[Alarm] = field(default_factory=list)  # about the heads, that this step raised
    acts: list[str] = field(default_factory=list)  # what was done to the heads after it, and why


def log_line(report: Report) -> Line:
    """The line of a step in the log: only what is the same when the run is made again."""
    numbers: Line = {
        "step": report.step,
        "loss": report.loss,
        "rate": report.rate,
        "gradient_norm": report.gradient_norm,
        "tokens": report.tokens,
    }
    if report.metrics:
        numbers |= {"valid": report.metrics, "best": report.best}
    if report.diversity:
        numbers["diversity"] = report.diversity
    if report.alarms:
        numbers["alarms"] = [alarm.message for alarm in report.alarms]
    if report.acts:
        numbers["acts"] = report.acts
    return numbers


def track_step(report: Report, accelerator: Accelerator) -> None:
    """Send every tenth step to the trackers, and those with metrics or measured heads."""
    if report.step % TRACK_EVERY == 0 or report.metrics or report.heads is not None:
        accelerator.log(scalars(report), step=report.step)


def scalars(report: Report) -> dict[str, float]:
    """The scalars for trackers."""
    speed = report.tokens / max(report.seconds, 1e-9)
    values = {
        "train/loss": report.loss,
        "train/learning_rate": report.rate,
        "train/gradient_norm": report.gradient_norm,
        "train/tokens_per_second": speed,
    }
    values |= {f"valid/{name}": value for name, value in report.metrics.items()}
    values |= {f"diversity/{name}": value for name, value in report.diversity.items()}
    if report.heads is not None:
        table = report.heads
        for name in ("entropy", "largest_logit", "spectral_norm", "redundancy", "gradient_norm"):
            for row, value in zip(table.rows, table[name].tolist(), strict=True):
                if math.isfinite(value):
                    values[f"heads/{name}/{row.site}.{row.head}"] = value
        values["heads/dead"] = float(table["dead"].nansum())
        values["heads/alarms"] = float(len(report.alarms))
    return values
