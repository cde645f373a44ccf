"""The two sides of ``manyheads compare``: models and corpora by name, a batch for each text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from manyheads.common.interrupts import stop_if_interrupted
from manyheads.common.progress import Progress
from manyheads.common.types import Batch
from manyheads.data import corpus as corpora
from manyheads.data.batches import BATCH_TOKENS, Corpus
from manyheads.heads.comparison.compare import Comparison, compare
from manyheads.heads.options import CompareOptions
from manyheads.models.loaded import Loaded
from manyheads.models.open import open_model
from manyheads.models.opening import Opening


@dataclass(frozen=True)
class Sides:
    """Two models, which may be one, and what each reads."""

    loaded: tuple[Loaded, Loaded]
    corpora: tuple[Corpus, Corpus]

    @property
    def names(self) -> tuple[str, str]:
        """What tells the sides apart: the models, or their texts where the model is one."""
        first, second = self.loaded
        if first is second:
            return self.corpora[0].what, self.corpora[1].what
        short = Path(first.name).name, Path(second.name).name
        return short if short[0] != short[1] else (first.name, second.name)


def open_sides(model: str | None, other: str | None, how: CompareOptions, opening: Opening) -> Sides:
    """The models and corpora that the options name; a second one that is not named is the first, or another
    revision of it.
    """
    if other is None and how.other_text is None and how.other_revision is None:
        raise ValueError(
            "compare: got one model and one text; expected a second model, --other-revision or --other-text"
        )
    first = second = open_model(model, head=True, **opening.how)
    if other is not None or how.other_revision is not None:
        changed = opening.how | {"revision": how.other_revision}
        second = open_model(model if other is None else other, head=True, **changed)
        if second.name == first.name and how.other_revision != opening.revision:
            first.name, second.name = (
                f"{second.name}@{name or 'main'}" for name in (opening.revision, how.other_revision)
            )
    options = (how.images, None, how.max_length, how.limit, BATCH_TOKENS)
    corpus = corpora.choose(first, how.text, *options)
    if second is first and how.other_text is None:
        return Sides((first, second), (corpus, corpus))
    return Sides((first, second), (corpus, corpora.choose(second, how.other_text or how.text, *options)))


def compare_sides(sides: Sides, how: CompareOptions, progress: Progress) -> Comparison:
    """Compare them text by text; the changes of a text are paired where both models read it in one piece."""

    def report(stage: str, done: float, total: float | None) -> None:
        stop_if_interrupted()
        progress(stage, done, total)

    first, second = (_one_by_one(corpus) for corpus in sides.corpora)
    paired = sides.corpora[0].what == sides.corpora[1].what and len(first) == len(second)
    (loaded, other), tokens = sides.loaded, sides.corpora[0].groups
    shared = tokens if loaded.vocabulary == other.vocabulary else {}
    return compare(
        loaded.model, other.model, first, second, paired=paired, tokens=shared, match=how.match,
        rate=how.rate, progress=report,
    )  # fmt: skip


def _one_by_one(corpus: Corpus) -> list[Batch]:
    return [corpus.make([number]) for number in range(len(corpus.sizes))]
