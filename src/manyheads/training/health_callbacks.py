"""HeadHealth inside other people's trainers: transformers and Lightning."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from lightning.pytorch import Callback
    from transformers import TrainerCallback

    from manyheads.training.head_health import HeadHealth

LIGHTNING = ("lightning.pytorch", "pytorch_lightning")  # two names of one package, with classes of their own


def trainer_callback(health: HeadHealth) -> TrainerCallback:
    """A callback of transformers' Trainer: the numbers of a look go to its logs.

    The Trainer shows callbacks no loss but the mean that it logs, so that is what alarms about the loss see.
    """
    from transformers import TrainerCallback

    class HeadHealthCallback(TrainerCallback):
        """Looks at heads around a Trainer's steps."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            health.before_step(state.global_step + 1)

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            health.after_step()
            if _has_look_at(health, state.global_step):
                control.should_log = True

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
            if logs is None or "loss" not in logs:
                return
            health.note_loss(float(logs["loss"]))
            if _has_look_at(health, state.global_step):
                logs |= health.summary()
                state.log_history[-1] |= health.summary()

        def on_train_end(self, args: object, state: object, control: object, **others: object) -> None:
            health.close()

    return HeadHealthCallback()


def lightning_callback(health: HeadHealth) -> Callback:
    """A callback of Lightning's Trainer, under both names of the package: the numbers of a look go to its
    loggers.
    """
    bases = tuple(importlib.import_module(name).Callback for name in _lightning())

    class HeadHealthCallback(*bases):  # type: ignore[misc]
        """Looks at heads around a Trainer's steps, each of which may be several batches."""

        begun = -1  # the step that `before_step` was last called for

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            step = trainer.global_step + 1
            if step != self.begun:
                self.begun = step
                health.before_step(step)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            if trainer.global_step < self.begun:  # gradients are still being accumulated
                return
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            health.after_step(loss if isinstance(loss, Tensor) else None)
            if _has_look_at(health, self.begun):
                module.log_dict(health.summary(), rank_zero_only=True)

        def on_train_end(self, trainer: object, module: object) -> None:
            health.close()

        def on_exception(self, trainer: object, module: object, exception: BaseException) -> None:
            health.close()

    return HeadHealthCallback()


def _has_look_at(health: HeadHealth, step: int) -> bool:
    looks = health.history.looks
    return bool(looks) and looks[-1].step == step


def _lightning() -> list[str]:
    """The names of Lightning that are in use, else the first that is installed."""
    if used := [name for name in LIGHTNING if name in sys.modules]:
        return used
    for name in LIGHTNING:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
        return [name]
    raise ImportError("lightning_callback needs Lightning: pip install lightning")
