"""The options of training, for all tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from manyheads.capture.weights import ROLES
from manyheads.common.errors import check_choices
from manyheads.common.types import Keywords
from manyheads.training.diversity_terms import TERMS, check_weights

DECAYS = ("cosine", "linear", "inverse", "none")
PRECISIONS = ("no", "bf16", "fp16")


def option(default: Any, help: str) -> Any:  # as dataclasses.field, whose type checkers take for the default
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

    steps: int = option(1000, "Number of updates.")
    batch_tokens: int = option(4096, "Tokens per update, padding included, of all processes together.")
    accumulate: int = option(1, "Gradient accumulation: parts per update; less memory, same update.")
    learning_rate: float = option(1e-3, "Peak learning rate (AdamW).")
    warmup: int = option(100, "Warm-up: steps in which the learning rate rises.")
    decay: str = option("cosine", "Learning rate after the warm-up: cosine, linear, inverse (root) or none.")
    beta2: float = option(0.98, "AdamW's decay of squared gradients.")
    weight_decay: float = option(0.01, "AdamW's weight decay, of matrices only.")
    clip: float = option(1.0, "Gradient clipping: the largest norm; 0 for none.")
    ema: float = option(0.0, "Exponential moving average of the weights, with this decay; 0 for none.")
    seed: int = option(0, "Seed of weights, batches and dropout.")
    evaluate_every: int = option(100, "Steps between evaluations.")
    evaluate_examples: int = option(512, "Examples per evaluation; the last one takes all. 0 for all always.")
    save_every: int = option(100, "Steps between checkpoints.")
    patience: int = option(0, "Early stopping: evaluations without an improvement; 0 for never.")
    dynamic: bool = option(False, "Cut, reseed, split and add heads while training.")
    final_heads: float = option(0.5, "With --dynamic: heads at the end, as a share of those at the start.")
    watch_every: int = option(100, "Steps between measurements of the heads; 0 for none.")
    precision: str = option("no", "Mixed precision: no, bf16 or fp16.")
    compile: bool = option(False, "Train through torch.compile, which needs a C++ compiler.")
    diversity: str = option("", "Terms that keep heads diverse, as orthogonality=0.1,attention=0.01.")
    orthogonal: str = option("", "Heads whose weights are kept orthogonal: query,key (or value, output).")

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not value >= least:
                raise ValueError(f"{name}: expected {least} or more, got {value}")
        for name in ("learning_rate", "weight_decay", "clip"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}: expected a number, 0 or more, got {value}")
        if not (math.isfinite(self.final_heads) and self.final_heads > 0):
            raise ValueError(f"final_heads: expected a share above 0, got {self.final_heads}")
        for name in ("ema", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 0 or more and below 1, got {getattr(self, name)}")
        for name, names in (("decay", DECAYS), ("precision", PRECISIONS)):
            if getattr(self, name) not in names:
                raise ValueError(f"{name}: expected one of {', '.join(names)}, got {getattr(self, name)!r}")
        captured = sorted(set(diversity_weights(self.diversity)) - {"orthogonality"})
        if self.compile and captured:
            raise ValueError(
                f"compile: got it with --diversity {captured[0]}; expected one of them, since a compiled "
                "model does not show what its heads compute: use orthogonality, which needs the weights only"
            )
        if orthogonal_roles(self.orthogonal) and self.dynamic:
            raise ValueError(
                f"orthogonal: {self.orthogonal} and dynamic were given; expected one of them, since heads "
                "behind a constraint cannot be cut or added while training: use --diversity "
                "orthogonality=0.1 instead"
            )


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


def with_options(defaults: Mapping[str, object], chosen: Mapping[str, object]) -> Options:
    """The defaults of a task, replaced by the user's options.

    >>> with_options({"steps": 50, "clip": 0.5}, {"steps": 70}).steps
    70
    """
    names = [f.name for f in fields(Options)]
    unknown = sorted(set(chosen) - set(names))
    if unknown:
        raise TypeError(f"{unknown[0]}: not an option of training; expected one of {', '.join(names)}")
    values: Keywords = {**defaults, **chosen}  # checked by Options
    return Options(**values)


def diversity_weights(text: str) -> dict[str, float]:
    """The weights of `diversity_terms` in the option ``diversity``.

    >>> diversity_weights("orthogonality=0.1,attention=0.01")
    {'orthogonality': 0.1, 'attention': 0.01}
    """
    weights: dict[str, float] = {}
    for part in text.split(",") if text else ():
        name, _, number = (piece.strip() for piece in part.partition("="))
        try:
            weight = float(number)
        except ValueError:
            raise ValueError(
                f"diversity: got {text!r}; expected terms with their weights, as orthogonality=0.1, of "
                f"{', '.join(TERMS)}"
            ) from None
        if name in weights:
            raise ValueError(f"diversity: got {name} twice in {text!r}; expected each term once")
        weights[name] = weight
    if weights:
        check_weights(weights)
    return weights


def orthogonal_roles(text: str) -> list[str]:
    """The roles of `orthogonal_heads` in the option ``orthogonal``.

    >>> orthogonal_roles("query, key")
    ['query', 'key']
    """
    roles = [role.strip() for role in text.split(",")] if text else []
    if roles:
        check_choices("orthogonal", roles, ROLES)
    return roles


def rate(step: int, options: Options) -> float:
    """The learning rate of a step, counted from 0: warm-up, then decay.

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
