"""The folder of a run: its config, the best weights, checkpoints, log and metrics."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_type_hints

from manyheads.common.json_files import check_fields, check_type
from manyheads.common.types import JsonObject
from manyheads.common.version import __version__
from manyheads.common.whole_files import tidy, write_whole
from manyheads.models import config as described
from manyheads.training.options import Options
from manyheads.training.task import Task


@dataclass(frozen=True)
class Run:
    """The paths of a run. `manyheads.load` reads ``config.json`` and ``model.safetensors``."""

    out: Path

    @property
    def config(self) -> Path:
        return self.out / described.CONFIG

    @property
    def weights(self) -> Path:
        return self.out / "model.safetensors"

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoints"

    @property
    def log(self) -> Path:
        return self.out / "log.jsonl"

    @property
    def metrics(self) -> Path:
        return self.out / "metrics.json"

    def tidy(self) -> None:
        """Remove the unfinished files of killed processes."""
        tidy(self.out)
        tidy(self.checkpoints)

    def free(self) -> None:
        """Raise a ValueError for a folder that holds a run."""
        if self.config.exists() or self.checkpoints.exists():
            raise ValueError(
                f"out: {self.out} already holds a run; --resume continues it, or give another folder"
            )

    def begin(self, task: Task, options: Options, data: str | None, valid: str | None) -> None:
        """Write the config."""
        self.out.mkdir(parents=True, exist_ok=True)
        task.save(self.out)
        document = {"format": described.FORMAT, "version": __version__, **_config(task, options)}
        document["training"] |= {"data": data, "valid": valid}
        write_whole(self.config, json.dumps(document, indent=1))

    def check(self, task: Task, options: Options) -> None:
        """Raise a ValueError unless task and options are those of the run."""
        begun, now = read_config(self.out), json.loads(json.dumps(_config(task, options)))
        pairs = [(begun["task"], now["task"]), (begun["training"], now["training"])]
        for before, after in [*pairs, (begun, {"class": now["class"], "options": now["options"]})]:
            for name, value in after.items():
                if name not in before or before[name] != value:
                    raise ValueError(
                        f"{name}: the run in {self.out} began with {before.get(name)!r}, got {value!r}; "
                        "--resume continues the run as it began: leave the option out, or begin a new run"
                    )


def _config(task: Task, options: Options) -> JsonObject:
    fields: JsonObject = asdict(task)  # type: ignore[call-overload]
    return {**task.describe(), "task": {"name": task.name, **fields}, "training": asdict(options)}


def read_config(folder: Path) -> JsonObject:
    """The config.json of a run; a ValueError says what is wrong with it."""
    config = described.read(folder)
    if config is None or "task" not in config or "training" not in config:
        raise ValueError(f"{folder}: not a model that manyheads trained; expected a folder that train wrote")
    where = f"{folder / described.CONFIG}: "
    check_type(config["task"].get("name"), str, f"{where}task.name")
    check_fields(config["training"], get_type_hints(Options), f"{where}training")
    return dict(config)
