"""How many heads: the same task trained with several numbers of heads and seeds, and compared."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from statistics import median

import torch

from manyheads.common.errors import first_line
from manyheads.common.interrupts import interrupted, interruptible
from manyheads.common.processes import processes
from manyheads.common.progress import Progress, no_progress
from manyheads.common.types import Keywords
from manyheads.training.loop import Callback, DivergenceError
from manyheads.training.options import Options, with_options
from manyheads.training.report import Report
from manyheads.training.sweep_costs import peak_memory
from manyheads.training.sweep_plan import check_lists, definition, plan_settings, with_setting
from manyheads.training.sweep_result import SweepResult
from manyheads.training.sweep_storage import SAMPLERS, Claim, Runs, quietly
from manyheads.training.task import Data, Task
from manyheads.training.train import train

Numbers = int | Sequence[int]


def sweep(
    task: Task,
    data: str | None = None,
    *,
    out: str | PathLike[str],
    valid: str | None = None,
    heads: Numbers = (1, 2, 4, 8, 16),
    kv_heads: Numbers | None = None,
    d_key: Numbers | None = None,
    d_value: Numbers | None = None,
    seeds: Numbers = 3,
    equal: str = "parameters",
    sampler: str = "grid",
    trials: int | None = None,
    storage: str | None = None,
    callbacks: Iterable[Callback] = (),
    progress: Progress = no_progress,
    **options: object,
) -> SweepResult:
    """How many heads? Train a task with several numbers of heads, each with several seeds, and compare them.

    Every run is an ordinary `train` in its own folder, such as ``out/heads=4-seed=1``. Ctrl-C keeps a
    checkpoint of the current run. The same call continues where the sweep stopped, also after a crash or
    ``kill -9``. Called by several processes at once with the same ``out``, on one machine or on several that
    share the folder, they divide the runs between them. Later calls may name more heads, widths or seeds.

    Needs ``pip install 'manyheads[sweep]'`` (Optuna).

    Parameters
    ----------
    task: such as ``mh.tasks.find("language")()``; its options hold for everything that is not varied.
    data, valid: as for `train`.
    out: the folder of the sweep. It gets the runs, ``table.json``, ``table.csv``, ``curve.png``,
        ``curve.svg`` and ``answer.txt``.
    heads, kv_heads, d_key, d_value: the values to try, in all combinations that exist.
    seeds: how many seeds (0, 1, 2, ...), or a list of them.
    equal: what is held equal while heads vary. ``"parameters"``: a head is d_model / heads wide, so that
        heads x d_key stays the same; the numbers of parameters are checked to be within 1%. ``"compute"``:
        widths as before unless you name others, and each setting gets the number of steps that takes as many
        floating-point operations as the unchanged task, within 1%. ``"nothing"``: only the number of heads
        changes, a head stays as wide as in the task, and the model grows.
    sampler: ``"grid"`` runs all combinations, first all of them with one seed. ``"tpe"`` and ``"random"``
        let Optuna propose ``trials`` runs out of them.
    storage: the URL of a database for Optuna, such as ``sqlite:///sweep.db``; the study is named after
        ``out``. Default: a journal file in ``out``.
    callbacks: called with a `Report` after every step of every run, as in `train`.
    progress: called with the number of runs that are done.
    options: those of `train`, except ``seed``.

    Returns
    -------
    SweepResult
        ``table`` (a row for each setting: mean and 95% interval over seeds, seconds, memory, cache bytes,
        parameters, operations), ``best`` (``{"heads": 8}``), ``answer`` (in words, with what cannot be told
        apart), ``plot(path)``. A run whose loss diverges or that runs out of memory is marked as failed, and
        the others continue.

    Examples
    --------
    >>> import tempfile
    >>> import manyheads as mh
    >>> task = mh.tasks.find("language")(context=16, d_model=8, layers=1)
    >>> few = dict(steps=3, batch_tokens=64, evaluate_examples=2, watch_every=0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = mh.sweep(task, out=f"{folder}/sweep", heads=(1, 2), seeds=2, **few)
    >>> [(row["heads"], row["seeds"], row["parameters"]) for row in result.table]
    [(1, 2, ...), (2, 2, ...)]
    >>> sorted(result.best)
    ['heads']

    See Also
    --------
    train : one run.
    importance, prune : which heads of a trained model matter, and cutting the others.

    References
    ----------
    Vaswani et al. 2017, Attention is all you need (table 3, rows A).
    Akiba et al. 2019, Optuna: a next-generation hyperparameter optimization framework.
    Tukey 1949, Comparing individual means in the analysis of variance.
    """
    lists = check_lists({"heads": heads, "kv_heads": kv_heads, "d_key": d_key, "d_value": d_value})
    chosen_seeds = _seeds(seeds)
    if "seed" in options:
        raise TypeError(f"seed: got {options['seed']}; a sweep takes seeds, a number of them or a list")
    if sampler not in SAMPLERS:
        raise ValueError(f"sampler: got {sampler!r}; expected one of {', '.join(SAMPLERS)}")
    if (sampler == "grid") != (trials is None) or (trials is not None and trials < 1):
        raise ValueError(
            f"trials: got {trials} with sampler={sampler!r}; expected a number of runs for tpe and random, "
            "and none for the grid, which runs everything"
        )
    if processes() > 1:
        raise ValueError(
            "sweep: several processes share a sweep, not one run; start the same command several times "
            "instead, without torchrun"
        )
    training = with_options(task.training, options)
    opened = _opened(task, data, valid, training)
    settings, notes = plan_settings(task, opened, lists, equal, training, progress)
    what = definition(task, opened, training, equal) | {"sampler": sampler}
    if sampler != "grid":
        what |= {"lists": lists, "seeds": chosen_seeds}
    folder = Path(out)
    with quietly(), interruptible():
        runs = Runs(
            folder, storage, what, settings, chosen_seeds,
            higher_is_better=task.higher_is_better, sampler=sampler, trials=trials or 0,
        )  # fmt: skip
        total = trials or len(settings) * len(chosen_seeds)
        ended = "finished"
        while not interrupted():
            progress("sweep", len(runs.outcomes()), total)
            with runs.claim() as claim:
                if claim is None:
                    break
                ended = _run(task, data, valid, folder, runs, claim, callbacks, options)
            if ended == "interrupted":
                break
        waiting, running = runs.unfinished()
        stopped = interrupted() or ended == "interrupted"
        result = SweepResult(
            out=folder,
            task=task.name,
            metric=task.metric,
            higher_is_better=task.higher_is_better,
            equal=equal,
            settings=settings,
            outcomes=runs.outcomes(),
            seeds=chosen_seeds,
            notes=[*opened.notes, *notes],
            ended="interrupted" if stopped else "elsewhere" if running else "finished",
            left=waiting + running,
        )
        result.save()
    return result


def _seeds(seeds: Numbers) -> list[int]:
    listed = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if (
        not listed
        or len(set(listed)) < len(listed)
        or any(type(seed) is not int or seed < 0 for seed in listed)
    ):
        raise ValueError(f"seeds: got {seeds}; expected a number of at least 1, or a list of different seeds")
    return listed


def _opened(task: Task, data: str | None, valid: str | None, options: Options) -> Data:
    """The data, of which there must be a batch to learn from and an example to validate on."""
    opened = task.open(data, valid)
    for name, examples in (("train on", opened.train), ("validate on", opened.valid)):
        if not len(examples):
            raise ValueError(f"data: there is no example to {name}; expected at least one: give more data")
    return opened


def _run(
    task: Task,
    data: str | None,
    valid: str | None,
    folder: Path,
    runs: Runs,
    claim: Claim,
    callbacks: Iterable[Callback],
    options: Keywords,
) -> str:
    """Train one run to its end and note what came of it; how it ended."""
    seconds: list[float] = []
    started = time.process_time()

    def note(report: Report) -> None:
        seconds.append(report.seconds)

    chosen = options | {"seed": claim.seed, "steps": claim.setting.steps}
    try:
        with peak_memory() as peak:
            result = train(
                with_setting(task, claim.setting.changes),
                data,
                out=folder / claim.name,
                valid=valid,
                resume=True,
                callbacks=[note, *callbacks],
                **chosen,
            )
    except (DivergenceError, MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
        runs.fail(claim, first_line(error))
        return "failed"
    if result.ended == "interrupted":
        return result.ended
    value = result.metrics[task.metric]
    if not math.isfinite(value):
        runs.fail(claim, f"the metric {task.metric} became {value}")
        return "failed"
    report = {
        "metrics": result.metrics,
        "steps": result.step,
        "best_step": result.best_step,
        "ended": result.ended,
        "seconds_min": min(seconds, default=None),
        "seconds_median": median(seconds) if seconds else None,
        "seconds_processor": time.process_time() - started,  # of all threads, evaluations included
        "steps_timed": len(seconds),  # fewer than steps in a run that was taken up again
        "memory": peak(),
    }
    runs.finish(claim, value, report)
    return result.ended
