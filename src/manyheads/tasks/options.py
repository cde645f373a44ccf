"""The options of ``manyheads train``, ``sweep``, ``evaluate`` and ``predict``. This module loads no torch.

Those of each task are the fields of its class, and those of training are in training/options.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from manyheads.common.commands import listed_names
from manyheads.data.labelled_options import LabelledOptions
from manyheads.data.source import BatchTokens, Limit, MaxLength
from manyheads.models.opening import Opening

Beams = Annotated[int | None, "Beam width for translation and speech: wider is slower and better."]


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What a run learns from. The text beside each type is the help of its option, here and below."""

    data: Annotated[str | None, "What to learn from; an embedded example by default."] = None
    valid: Annotated[str | None, "What to validate on; by default, a part of the data is held out."] = None


@dataclass(frozen=True, kw_only=True)
class RunOptions(DataOptions):
    """Of a run, besides those of its task and of training."""

    resume: Annotated[bool, "Continue the run in that folder."] = False
    tracker: Annotated[str, "Where curves go (a tracker of Accelerate), or none."] = "tensorboard"


@dataclass(frozen=True, kw_only=True)
class SweepOptions(DataOptions):
    """Of a sweep, besides those of its task and of training; lists are texts, separated by commas."""

    heads: Annotated[str, "Numbers of heads to try."] = "1,2,4,8,16"
    kv_heads: Annotated[str | None, "Numbers of key and value heads to try; all by default."] = None
    d_key: Annotated[
        str | None, "Widths of a head's queries and keys to try; d_model / heads by default."
    ] = None
    d_value: Annotated[str | None, "Widths of a head's values to try; d_model / heads by default."] = None
    seeds: Annotated[str, "How many seeds, or which: 3, or 5,6,7."] = "3"
    equal: Annotated[str, "What is held equal: parameters, compute (by steps) or nothing."] = "parameters"
    sampler: Annotated[str, "grid for all combinations; tpe or random for what Optuna proposes."] = "grid"
    trials: Annotated[int | None, "How many runs tpe or random may propose."] = None
    storage: Annotated[str | None, "URL of a database for Optuna; a file in --out by default."] = None


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """How a trained model predicts; which of these apply depends on its task.

    >>> PredictOptions(temperature=0.0, beams=4).passed
    {'temperature': None, 'beams': 4}
    """

    new_tokens: Annotated[int | None, "Language: the number of tokens to write."] = None
    temperature: Annotated[
        float | None,
        "Language: below 1 sharpens the distribution (more conservative), above 1 flattens it (more "
        "varied); 0 for greedy.",
    ] = None
    seed: Annotated[int | None, "Language: the seed of the sampling."] = None
    beams: Beams = None
    caption_language: Annotated[
        str | None, "Picture book: the language of the caption; all of them by default."
    ] = None

    @property
    def passed(self) -> dict[str, object]:
        """What was passed, as `predict` takes it: there, greedy is a temperature of None."""
        passed = {name: value for name, value in vars(self).items() if value is not None}
        return passed | ({"temperature": None} if self.temperature == 0 else {})


@dataclass(frozen=True)
class EvaluateOptions(Opening, LabelledOptions):
    """How a model is evaluated, how it is opened, and on which rows."""

    max_length: MaxLength = None
    limit: Limit = None
    beams: Beams = None
    batch_tokens: BatchTokens = 4096

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `evaluate`, besides the model and the data."""
        columns = {"text": listed_names(self.text_column), "label": self.label_column, "split": self.split}
        sizes = {"max_length": self.max_length, "limit": self.limit, "batch_tokens": self.batch_tokens}
        return columns | sizes | {"beams": self.beams} | self.how
