"""The models that studies look at, and what they read: the embedded MiniLM, and small ones of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from manyheads.common.intervals import Interval
from manyheads.common.run_batch import run
from manyheads.common.types import Batch
from manyheads.data.examples import spread
from manyheads.heads.model_outputs import Output, output_distance, read_output
from manyheads.models.loaded import Loaded
from manyheads.models.open import open_model
from manyheads.studies import language_text, translation_text
from manyheads.studies.fitting import Recipe, fit, new_model
from manyheads.studies.study import Settings, Verdict, Words, judge_effect
from manyheads.studies.text_samples import sample, texts

# What a full study looks at: the same models and texts in all of them, so that each model is trained once.
FULL: dict[str, Any] = {
    "seeds": 5, "text": "documents", "sentences": 128, "windows": 64, "d_model": 128, "layers": 4,
    "context": 128, "steps": 500,
}  # fmt: skip

NAMES = {
    "MiniLM": Words("MiniLM (real)", "MiniLM（真实模型）"),
    "language": Words("our language model", "自训语言模型"),
    "translation": Words("our translation model", "自训翻译模型"),
}


@dataclass(frozen=True)
class Subjects(Settings):
    """Which models are looked at, what MiniLM reads, and how ours are trained.

    models: of MiniLM, language and translation.
    text: what MiniLM reads without ``data``: see `text_samples.texts`.
    sentences: how many MiniLM reads in each repetition; no two repetitions share one.
    windows: how many held-out examples our own models read.
    """

    models: tuple[str, ...] = ("MiniLM", "language")
    text: str = "sentences"
    sentences: int = 12
    windows: int = 32
    d_model: int = 64
    heads: int = 8
    layers: int = 4
    context: int = 64
    steps: int = 300
    batch_tokens: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = [name for name in self.models if name not in NAMES]
        if unknown:
            raise ValueError(f"models: expected some of {', '.join(NAMES)}, got {unknown[0]!r}")


@dataclass(frozen=True)
class Subject:
    """A model with what it reads.

    model: in eval mode.
    batches: to measure its heads on.
    held_out: other batches of the same kind.
    loss: how bad it is on these, as it is at the time of the call: nats a token; for MiniLM 1 - cosine of its
        sentence embeddings with those that it gave at first.
    tokenizer: of transformers, for a model that has one.
    task: what a model of ours was trained for.
    """

    model: nn.Module
    batches: Sequence[Batch]
    held_out: Sequence[Batch]
    loss: Callable[[], float]
    tokenizer: Any = None
    task: Any = None

    @property
    def all_batches(self) -> list[Batch]:
        """All that it reads."""
        return [*self.batches, *self.held_out]


def judge_all(effects: Iterable[Interval], least: float) -> Verdict:
    """The verdict on effects, in several models or of several methods, that a claim says are above ``least``.

    >>> yes, no = Interval(1.9, 1.5, 2.3, 3), Interval(-1.0, -1.5, -0.5, 3)
    >>> [judge_all(effects, 0.0) for effects in ([yes, yes], [yes, no], [no, no])]
    ['holds', 'holds in part', 'does not hold']
    """
    return join_verdicts(judge_effect(effect, least) for effect in effects)


def join_verdicts(verdicts: Iterable[Verdict]) -> Verdict:
    """One verdict from several: the one they share; in part, if the claim holds in some; else none.

    >>> join_verdicts(["holds in part", "does not hold"]), join_verdicts(["cannot be told", "does not hold"])
    ('holds in part', 'cannot be told')
    """
    distinct = set(verdicts)
    if len(distinct) == 1:
        return distinct.pop()
    return "holds in part" if distinct & {"holds", "holds in part"} else "cannot be told"


def list_models(effects: Mapping[str, Interval], spec: str) -> Words:
    """The effects by model, for a sentence.

    >>> list_models({"MiniLM": Interval(1.9, 1.5, 2.3, 3)}, ".1f").en
    'MiniLM (real) 1.9 ± 0.4'
    """
    return Words(
        "; ".join(f"{NAMES[name].en} {effect:{spec}}" for name, effect in effects.items()),
        "；".join(f"{NAMES[name].zh}：{effect:{spec}}" for name, effect in effects.items()),
    )


@cache
def minilm() -> Loaded:
    """The embedded MiniLM, loaded once."""
    return open_model(device="cpu")


def subject(setup: Subjects, name: str, seed: int) -> Subject:
    """A model by its name: MiniLM on the sample of this number, or one of ours, trained from this seed.

    >>> setup = Subjects(sentences=4, context=16, steps=1, d_model=8, heads=2, layers=1)
    >>> one = subject(setup, "MiniLM", seed=0)
    >>> one.loss() < 1e-6, one.batches[0]["input_ids"].shape[0]
    (True, 2)
    """
    if name == "MiniLM":
        lines = sample(texts(setup.data or setup.text), seed, setup.seeds, setup.sentences)
        return on_lines(lines)
    sizes = setup.d_model, setup.layers, setup.heads, setup.context
    recipe = Recipe(steps=setup.steps, batch_tokens=setup.batch_tokens)
    task, examples, model = _trained(name, setup.data, sizes, recipe, seed)
    return on_examples(task, deepcopy(model), examples, setup.windows)


@cache
def _trained(
    name: str, data: str | None, sizes: tuple[int, int, int, int], recipe: Recipe, seed: int
) -> tuple[Any, Any, nn.Module]:
    """A model of ours with its task and held-out examples; many studies look at the same ones."""
    task, examples = (
        language_text.opened(data, sizes[-1]) if name == "language" else translation_text.opened()
    )
    task.d_model, task.layers, task.heads = sizes[:-1]
    model = fit(task, examples, new_model(task, seed), recipe, seed).model
    if name == "translation":
        task.label_smoothing = 0.0  # which is for training
    return task, examples.valid, model


def on_lines(lines: Sequence[str], batch: int = 16) -> Subject:
    """MiniLM on these texts: every other one is held out."""
    loaded = minilm()
    batches, held_out = (_encoded(loaded, lines[start::2], batch) for start in (0, 1))

    def outputs() -> list[Output]:
        return [
            read_output(run(loaded.model, each), loaded.model, each["attention_mask"].bool())
            for each in held_out
        ]

    full = outputs()

    def loss() -> float:
        parts = [output_distance(before, after) for before, after in zip(full, outputs(), strict=True)]
        return float(torch.cat(parts).mean())

    return Subject(loaded.model, batches, held_out, torch.no_grad()(loss), loaded.tokenizer())


def on_examples(task: Any, model: nn.Module, examples: Any, count: int, batch: int = 16) -> Subject:
    """A model of ours on some examples of its task, evenly spread: every other one is held out."""
    chosen = spread(len(examples), count)
    halves = [
        [task.collate(examples.take(indices, 0)) for indices in _pieces(chosen[start::2], batch)]
        for start in (0, 1)
    ]
    batches, held_out = ([task.inputs(each) for each in half] for half in halves)
    return Subject(model, batches, held_out, partial(_loss, task, model, halves[1]), task=task)


def windows_of_lines(looked: Subject, lines: Sequence[str], count: int = 32) -> Subject:
    """A language model of ours on other texts, in its own characters."""
    return on_examples(looked.task, looked.model, looked.task.windows("\n".join(lines), jitter=False), count)


@torch.no_grad()
def _loss(task: Any, model: nn.Module, batches: Sequence[dict[str, torch.Tensor]]) -> float:
    summed, counts = zip(*(task.loss(model, batch) for batch in batches), strict=True)
    return float(sum(summed) / sum(counts))


def _encoded(loaded: Loaded, lines: Sequence[str], batch: int) -> list[dict[str, torch.Tensor]]:
    tokenizer = loaded.tokenizer()
    options = {"padding": True, "truncation": True, "max_length": 128, "return_tensors": "pt"}
    encoded = [tokenizer(list(piece), **options) for piece in _pieces(lines, batch)]
    return [{name: each[name] for name in ("input_ids", "attention_mask")} for each in encoded]


def _pieces(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
