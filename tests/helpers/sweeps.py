"""The result of a sweep that did not run."""

from pathlib import Path

from manyheads.training.sweep_plan import Setting
from manyheads.training.sweep_result import SweepResult
from manyheads.training.sweep_storage import Outcome

REPORT = {"steps": 10, "seconds_min": 0.1, "seconds_median": 0.2, "memory": None}


def sweep_result(values, higher=True, left=0, d_keys=(), out="out"):
    """A sweep that reached these values, {heads: [of each seed]}, None for a run that failed.

    With ``d_keys`` there is a setting for each of them and of the numbers of heads, each better by one.
    """
    settings, outcomes = [], []
    for better, d_key in enumerate(d_keys or [None]):
        for heads, seeds in values.items():
            options = {"heads": heads} | ({} if d_key is None else {"d_key": d_key})
            settings.append(Setting(options, dict(options), 10, 100, 1e6, 64))
            for seed, value in enumerate(seeds):
                report, failure = (REPORT, None) if value is not None else ({}, "the loss became nan")
                reached = None if value is None else value + better
                outcomes.append(Outcome(settings[-1].name, seed, reached, report, failure))
    metric = "bleu" if higher else "loss"
    return SweepResult(
        Path(out),
        "translation",
        metric,
        higher,
        "compute",
        settings,
        outcomes,
        [0, 1, 2],
        [],
        "finished",
        left,
    )
