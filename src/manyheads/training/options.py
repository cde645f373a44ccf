"""How to train: what the loop has to know, whatever the task is."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

DECAYS = ("cosine", "linear", "inverse", "none")
PRECISIONS = ("no", "bf16", "fp16")


def option(default: Any, help: str) -> Any:
    """A field of a dataclass that is an option of the command line, too."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `train`.

    Examples
    --------
    >>> Options(steps=100, decay="linear").steps
    100
    """

    steps: int = option(1000, "How many updates to make.")
    batch_tokens: int = option(4096, "Tokens of one update, padding included, by all processes together.")
    accumulate: int = option(1, "Parts in which each process computes an update: less memory, same update.")
    learning_rate: float = option(1e-3, "The largest learning rate (AdamW).")
    warmup: int = option(100, "Steps in which the learning rate rises to it.")
    decay: str = option("cosine", "How it falls then: cosine or linear to zero, inverse (root), none.")
    beta2: float = option(0.98, "AdamW's memory of squared gradients.")
    weight_decay: float = option(0.01, "AdamW's weight decay, for matrices only.")
    clip: float = option(1.0, "The largest norm of the gradient; 0 for no limit.")
    ema: float = option(0.0, "Evaluate and keep an average of the weights, with this decay; 0 for none.")
    seed: int = option(0, "Of weights, batches and dropout.")
    evaluate_every: int = option(100, "Steps between evaluations.")
    evaluate_examples: int = option(512, "Examples in these; the last one takes all. 0 for all always.")
    save_every: int = option(100, "Steps between checkpoints.")
    patience: int = option(0, "Stop after so many evaluations without a better one; 0 for never.")
    watch_every: int = option(100, "Steps between looks at the heads; 0 for none.")
    precision: str = option("no", "Mixed precision: no, bf16 or fp16.")

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not value >= least:
                raise ValueError(f"{name}: expected {least} or more, got {value}")
        for name in ("learning_rate", "weight_decay", "clip"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}: expected a number from 0 on, got {value}")
        for name in ("ema", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}: expected a number from 0 and below 1, got {getattr(self, name)}")
        for name, known in (("decay", DECAYS), ("precision", PRECISIONS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: expected one of {', '.join(known)}, got {getattr(self, name)!r}")


_LEAST = {
    "steps": 1,
    "batch_tokens": 1,
    "accumulate": 1,
    "warmup": 0,
    "evaluate_every": 1,
    "evaluate_examples": 0,
    "save_every": 1,
    "patience": 0,
    "watch_every": 0,
}


def with_options(defaults: dict[str, Any], given: dict[str, Any]) -> Options:
    """The options a task prefers, replaced by those that were given.

    >>> with_options({"steps": 50, "clip": 0.5}, {"steps": 70}).steps
    70
    """
    known = [f.name for f in fields(Options)]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise TypeError(f"{unknown[0]}: no option of training; expected one of {', '.join(known)}")
    return Options(**(defaults | given))


def rate(step: int, options: Options) -> float:
    """The learning rate of a step, counted from 0: a rise, then a fall.

    >>> options = Options(steps=10, warmup=2, learning_rate=1.0, decay="linear")
    >>> [rate(step, options) for step in (0, 1, 2, 6, 9)]
    [0.5, 1.0, 1.0, 0.5, 0.125]
    >>> rate(8, Options(steps=10, warmup=2, learning_rate=1.0, decay="inverse"))
    0.5
    """
    if step < options.warmup:
        return options.learning_rate * (step + 1) / options.warmup
    if options.decay == "inverse":
        return options.learning_rate * math.sqrt(max(options.warmup, 1) / max(step, options.warmup, 1))
    done = (step - options.warmup) / max(options.steps - options.warmup, 1)
    if options.decay == "linear":
        return options.learning_rate * (1 - done)
    if options.decay == "cosine":
        return options.learning_rate * (1 + math.cos(math.pi * done)) / 2
    return options.learning_rate
