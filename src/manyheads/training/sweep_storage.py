"""The runs of a sweep in Optuna's storage: which wait, which run, what they reached.

Several workers, processes on one machine or on several, take runs from the same storage. Who runs one holds
the lock of its name in the folder of the sweep, which the operating system releases when a process ends,
however it ends. So a run that is marked as running and whose lock is free was left by a worker that is gone:
the next worker continues it.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, TypedDict

from manyheads.common.json_files import in_one_sentence, read_json
from manyheads.common.locks import locked
from manyheads.common.types import JsonObject
from manyheads.common.whole_files import write_whole
from manyheads.training.sweep_plan import Setting, name_of

try:
    import optuna
    from optuna.storages.journal import JournalFileBackend
    from optuna.trial import FrozenTrial, TrialState
except ImportError:
    raise ImportError("sweeps need optuna: pip install 'manyheads[sweep]'") from None

JOURNAL = "sweep.journal"
RECORD = "sweep.json"
_FORMAT, _VERSION = "manyheads sweep", 1
SAMPLERS = ("grid", "tpe", "random")
WAIT = 60.0  # seconds, for another worker that takes a run
LARGEST = 2**40  # of the numbers in the storage
REPEATS = 100  # proposals of a sampler in a row that need no run; then it has nothing new to say


class _Record(TypedDict):
    """sweep.json: which folder this is, and what the sweep in it is."""

    folder: str
    sweep: JsonObject


@dataclass(frozen=True)
class Outcome:
    """A run that has ended: what it reached and cost, or why it failed."""

    setting: str
    seed: int
    value: float | None
    report: JsonObject
    failure: str | None


@dataclass(frozen=True)
class Claim:
    """A run that this worker holds."""

    name: str
    setting: Setting
    seed: int
    number: int  # of Optuna's trial


class Runs:
    """The runs of one sweep.

    Parameters
    ----------
    out: the folder of the sweep.
    url: of a database that Optuna opens. Default: a journal in the folder.
    sweep: what the sweep is; a storage that holds another one is refused.
    settings: all of them.
    seeds: the seeds that every setting is run with.
    higher_is_better: which way the metric points.
    sampler: ``grid``, ``tpe`` or ``random``.
    trials: how many runs a sampler may propose.
    """

    def __init__(
        self,
        out: Path,
        url: str | None,
        sweep: Mapping[str, Any],
        settings: Sequence[Setting],
        seeds: Sequence[int],
        *,
        higher_is_better: bool,
        sampler: str,
        trials: int,
    ) -> None:
        self.out, self.settings, self.seeds = out, {each.name: each for each in settings}, list(seeds)
        self.sampler, self.trials = sampler, trials
        with self._alone():
            self.folder = _folder(out, sweep)
            where = str(out / JOURNAL) if url is None else url
            with in_one_sentence(f"storage: {where} cannot be opened, or is not a storage of Optuna"):
                self.storage = _journal(out / JOURNAL) if url is None else optuna.storages.get_storage(url)
                self.study = optuna.create_study(
                    storage=self.storage,
                    study_name=out.resolve().name,
                    direction="maximize" if higher_is_better else "minimize",
                    load_if_exists=True,
                )
            if (before := self.study.user_attrs.get("sweep")) is not None:
                check_same(before, sweep, where)
            else:
                self.study.set_user_attr("sweep", dict(sweep))
            if sampler == "grid":
                self._enqueue()

    @contextmanager
    def claim(self) -> Iterator[Claim | None]:
        """The next run, which no other worker takes meanwhile; None when none is left to take."""
        with ExitStack() as held:
            with self._alone():
                claim = self._left(held)
                if claim is None:
                    claim = self._next(held) if self.sampler == "grid" else self._proposed(held)
                if claim is not None:
                    self._note(claim.number, "folder", self.folder)
            yield claim

    def finish(self, claim: Claim, value: float, report: Mapping[str, object]) -> None:
        """Note what a run reached, its metric and everything else."""
        self._note(claim.number, "report", dict(report))
        self.study.tell(claim.number, value)

    def fail(self, claim: Claim, why: str) -> None:
        """Note that a run failed; it is not tried again."""
        self._note(claim.number, "failure", why)
        self.study.tell(claim.number, state=TrialState.FAIL)

    def outcomes(self) -> list[Outcome]:
        """Every run of this sweep that has ended, in the order of settings and seeds."""
        ended = self._by_run((TrialState.COMPLETE, TrialState.FAIL))
        outcomes = []
        for setting in self.settings:
            for seed in self.seeds:
                if (trial := ended.get(f"{setting}-seed={seed}")) is not None:
                    report, failure = trial.user_attrs.get("report", {}), trial.user_attrs.get("failure")
                    outcomes.append(Outcome(setting, seed, trial.value, report, failure))
        return outcomes

    def unfinished(self) -> tuple[int, int]:
        """How many runs no worker has begun or has left, and how many a worker is at now."""
        waiting = len(self._by_run((TrialState.WAITING,)))
        running = 0
        for name, trial in self._by_run((TrialState.RUNNING,)).items():
            with ExitStack() as held:
                free = self._is_ours(trial) and self._hold(held, name)
            waiting, running = waiting + free, running + (not free)
        return waiting, running

    def _enqueue(self) -> None:
        """Put the runs that the storage lacks in the queue: first all settings with the first seed."""
        there = self._by_run(None)
        for seed in self.seeds:
            for setting in self.settings.values():
                name = f"{setting.name}-seed={seed}"
                if name not in there:
                    params = {**setting.options, "seed": seed}
                    trial = optuna.trial.create_trial(
                        state=TrialState.WAITING,
                        params=params,
                        distributions={
                            key: optuna.distributions.IntDistribution(0, LARGEST) for key in params
                        },
                        user_attrs={"run": name, "setting": setting.name, "seed": seed},
                    )
                    self.study.add_trial(trial)

    def _left(self, held: ExitStack) -> Claim | None:
        """A run that a worker began in this folder and no longer works on."""
        for trial in self._trials((TrialState.RUNNING,)):
            name = trial.user_attrs.get("run")
            if name is None:  # killed before the sampler's choice was noted
                self.study.tell(trial.number, state=TrialState.FAIL)
            elif name in self._by_run(None) and self._is_ours(trial) and self._hold(held, name):
                if any(trial.number == other.number for other in self._trials((TrialState.RUNNING,))):
                    return self._claim(trial.number, trial.user_attrs)
                held.close()  # it ended in between
        return None

    def _next(self, held: ExitStack) -> Claim | None:
        """The first run in the queue."""
        for name, trial in self._by_run((TrialState.WAITING,)).items():
            # false if a worker at another folder took it meanwhile
            if self.storage.set_trial_state_values(trial._trial_id, TrialState.RUNNING):
                self._hold(held, name)
                return self._claim(trial.number, trial.user_attrs)
        return None

    def _proposed(self, held: ExitStack) -> Claim | None:
        """A setting that Optuna's sampler proposes, with its first free seed."""
        for _ in range(REPEATS):
            begun = self._by_run(None)
            if len(begun) >= self.trials:
                return None
            count = len(self._trials(None))  # the same history, the same proposal, whoever asks
            samplers = optuna.samplers
            self.study.sampler = (
                samplers.TPESampler(seed=count)
                if self.sampler == "tpe"
                else samplers.RandomSampler(seed=count)
            )
            trial = self.study.ask()
            listed = [each.options for each in self.settings.values()]
            values = {name: sorted({options[name] for options in listed}) for name in listed[0]}
            setting = name_of({name: trial.suggest_categorical(name, values[name]) for name in values})
            free = [seed for seed in self.seeds if f"{setting}-seed={seed}" not in begun]
            reached = [other.value for other in begun.values() if other.user_attrs["setting"] == setting]
            measured = [value for value in reached if value is not None]
            if setting in self.settings and free:
                attributes = {"setting": setting, "seed": free[0], "run": f"{setting}-seed={free[0]}"}
                for key, value in attributes.items():
                    trial.set_user_attr(key, value)
                self._hold(held, str(attributes["run"]))
                return self._claim(trial.number, attributes)
            if measured:  # all its seeds are run: the sampler gets the mean, and proposes another
                self.study.tell(trial, fmean(measured))
            else:
                self.study.tell(trial, state=TrialState.FAIL)
        return None

    def _trials(self, states: tuple[TrialState, ...] | None) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=states)

    def _by_run(self, states: tuple[TrialState, ...] | None) -> dict[str, FrozenTrial]:
        """Trials by the name of their run; of several with one name, the first."""
        by_name: dict[str, FrozenTrial] = {}
        for trial in self._trials(None):
            name = trial.user_attrs.get("run")
            attributes = trial.user_attrs
            if (
                name is not None
                and attributes["setting"] in self.settings
                and attributes["seed"] in self.seeds
            ):
                by_name.setdefault(name, trial)
        return {name: trial for name, trial in by_name.items() if states is None or trial.state in states}

    def _claim(self, number: int, attributes: Mapping[str, Any]) -> Claim:
        return Claim(attributes["run"], self.settings[attributes["setting"]], int(attributes["seed"]), number)

    def _note(self, number: int, key: str, value: object) -> None:
        trial = self.study.get_trials(deepcopy=False)[number]
        self.storage.set_trial_user_attr(trial._trial_id, key, value)

    def _hold(self, held: ExitStack, name: str) -> bool:
        with suppress(ValueError):
            held.enter_context(locked(self.out / f".{name}.lock", name))
            return True
        return False

    def _alone(self) -> Any:
        """One worker at a time looks for a run."""
        return locked(self.out / ".claims.lock", f"out: {self.out}", WAIT)

    def _is_ours(self, trial: FrozenTrial) -> bool:
        """Whether the locks of this folder say who is at a run; those of other folders are not seen here."""
        return bool(trial.user_attrs.get("folder", self.folder) == self.folder)


def check_same(before: Mapping[str, object], now: Mapping[str, object], where: str) -> None:
    """Raise a ValueError that says what differs between two sweeps.

    >>> check_same({"equal": "parameters", "layers": 2}, {"equal": "parameters", "layers": 3}, "out/sweep")
    Traceback (most recent call last):
    ValueError: layers: the sweep in out/sweep began with 2, got 3; give the same, or another out
    """
    now = json.loads(json.dumps(now))
    for name in [*now, *(name for name in before if name not in now)]:
        if before.get(name) != now.get(name):
            values = f"{before.get(name)!r}, got {now.get(name)!r}"
            if name == "data":
                values = "other data, as its hash says"
            raise ValueError(
                f"{name}: the sweep in {where} began with {values}; give the same, or another out"
            )


@contextmanager
def quietly() -> Iterator[None]:
    """Optuna logs warnings only."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


def _folder(out: Path, sweep: Mapping[str, object]) -> str:
    """The mark of a sweep's folder, which is written if the folder is new."""
    path = out / RECORD
    if path.exists():
        record = read_json(path, _Record, "out", format=_FORMAT, version=_VERSION)
        check_same(record["sweep"], sweep, str(out))
        return record["folder"]
    others = sorted(entry.name for entry in out.iterdir() if not entry.name.startswith("."))
    if others:
        raise ValueError(
            f"out: {out} holds something else ({', '.join(others[:3])}); expected a folder that is empty, "
            "new, or that of this sweep"
        )
    folder = uuid.uuid4().hex
    document = {"format": _FORMAT, "version": _VERSION, "folder": folder, "sweep": dict(sweep)}
    write_whole(path, json.dumps(document, indent=1))
    return folder


class _FileLock:
    """The lock of Optuna's journal: the system releases it when a process is killed, which a link stays."""

    def __init__(self, path: Path) -> None:
        self.path, self.held = path, ExitStack()

    def acquire(self) -> bool:
        self.held.enter_context(locked(self.path, f"storage: {self.path}", WAIT))
        return True

    def release(self) -> None:
        self.held.close()


def _journal(path: Path) -> optuna.storages.JournalStorage:
    """The storage in a file, without the unfinished line that a power cut may leave at its end."""
    lock = _FileLock(path.with_name(f".{path.name}.lock"))
    lock.acquire()
    try:
        if path.exists() and not (content := path.read_bytes()).endswith(b"\n"):
            os.truncate(path, content.rfind(b"\n") + 1)
    finally:
        lock.release()
    backend = JournalFileBackend(str(path), lock_obj=lock)  # type: ignore[arg-type]
    return optuna.storages.JournalStorage(backend)
