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
from manyheads.heads.comparison.matching import Match
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


def open_sides(
    models: tuple[str | None, str | None],
    texts: tuple[str | None, str | None],
    images: str | None,
    *,
    max_length: int | None,
    limit: int,
    opening: Opening,
    other_revision: str | None = None,
) -> Sides:
    """The models and corpora that the options name; a second one that is not named is the first, or another
    revision of it.
    """
    loaded = other = open_model(models[0], head=True, **opening.how)
    if models[1] is not None or other_revision is not None:
        how = opening.how | {"revision": other_revision}
        other = open_model(models[0] if models[1] is None else models[1], head=True, **how)
        if other.name == loaded.name and other_revision != opening.revision:
            loaded.name, other.name = (
                f"{other.name}@{name or 'main'}" for name in (opening.revision, other_revision)
            )
    options = (images, None, max_length, limit, BATCH_TOKENS)
    corpus = corpora.choose(loaded, texts[0], *options)
    if other is loaded and texts[1] is None:
        return Sides((loaded, other), (corpus, corpus))
    return Sides((loaded, other), (corpus, corpora.choose(other, texts[1] or texts[0], *options)))


def compare_sides(sides: Sides, *, match: Match, rate: float, progress: Progress) -> Comparison:
    """Compare them text by text; the changes of a text are paired where both models read it in one piece."""

    def report(stage: str, done: float, total: float | None) -> None:
        stop_if_interrupted()
        progress(stage, done, total)

    first, second = (_one_by_one(corpus) for corpus in sides.corpora)
    paired = sides.corpora[0].what == sides.corpora[1].what and len(first) == len(second)
    (loaded, other), tokens = sides.loaded, sides.corpora[0].groups
    shared = tokens if loaded.vocabulary == other.vocabulary else {}
    return compare(
        loaded.model, other.model, first, second, paired=paired, tokens=shared, match=match, rate=rate,
        progress=report,
    )  # fmt: skip


def _one_by_one(corpus: Corpus) -> list[Batch]:
    return [corpus.make([number]) for number in range(len(corpus.sizes))]
