"""The metrics of tasks, each with a 95% interval over examples."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from manyheads.common.intervals import Interval, binomial, bootstrap

RESAMPLES = 1000
Array: TypeAlias = NDArray[Any]
Numbers: TypeAlias = Sequence[float] | Array
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def share(right: Sequence[bool]) -> Interval:
    """The share of what is right, with Wilson's interval.

    >>> f"{share([True, True, True, False]):.2f}"
    '0.75 ± 0.33'
    """
    return binomial(sum(right), len(right))


def ratio(numerators: Numbers, denominators: Numbers) -> Interval:
    """The sum of one thing by the sum of another, with a bootstrap over examples.

    >>> ratio([1, 2, 3], [2, 4, 6]).mean
    0.5
    """
    numerator, denominator = np.asarray(numerators, float), np.asarray(denominators, float)
    return bootstrap(lambda i: _divide(numerator[i].sum(), denominator[i].sum()), len(numerator))


def _divide(numerator: float, denominator: float) -> float:
    return float(numerator / denominator) if denominator else 0.0


def macro_f1(truths: Sequence[int], predictions: Sequence[int]) -> Interval:
    """The mean F1 of the classes that occur, in truth or in predictions; as scikit-learn has it.

    >>> round(macro_f1([0, 0, 1, 1], [0, 1, 1, 1]).mean, 4)
    0.7333
    """
    pairs = Counter(zip(truths, predictions, strict=True))  # drawn by pair: the cost is that of the classes
    sides = [np.array(side) for side in zip(*pairs, strict=True)]
    classes = np.unique(np.concatenate(sides))
    truth, prediction = (side[:, None] == classes for side in sides)  # (pairs, classes) each
    true_positives, totals = (truth & prediction).astype(float), truth.astype(float) + prediction

    def value(weights: Array) -> Array:
        denominator = weights @ totals
        f1 = 2 * (weights @ true_positives) / np.maximum(denominator, 1)
        return np.asarray(f1.sum(-1) / (denominator > 0).sum(-1))

    counts = np.array(list(pairs.values()))
    resamples = np.random.default_rng(0).multinomial(counts.sum(), counts / counts.sum(), RESAMPLES)
    low, high = np.percentile(value(resamples), [2.5, 97.5])
    return Interval(float(value(counts)), float(low), float(high), int(counts.sum()))


def several_f1(truths: Array, predictions: Array, average: Literal["micro", "macro"]) -> Interval:
    """F1 where each example may have several classes, (examples, classes) each; as scikit-learn has it.

    >>> several_f1(np.array([[1, 0], [1, 1]]), np.array([[1, 0], [1, 0]]), "micro").mean
    0.8
    """
    true_positives, totals = truths * predictions, truths + predictions

    def value(i: Array) -> float:
        tp, denominator = true_positives[i].sum(0), totals[i].sum(0)
        if average == "micro":
            tp, denominator = tp.sum(), denominator.sum()
        return float(np.mean(2 * tp / np.maximum(denominator, 1)))

    return bootstrap(value, len(truths))


def correlation(truths: Sequence[float], predictions: Sequence[float], ranks: bool) -> Interval:
    """Pearson's correlation, or Spearman's with ``ranks``; nan where one side never changes.

    >>> correlation([1, 2, 3], [2, 4, 7], ranks=True).mean
    1.0
    """
    from scipy.stats import rankdata

    truth, prediction = np.asarray(truths, float), np.asarray(predictions, float)

    def value(i: Array) -> float:
        a, b = (rankdata(x[i]) if ranks else x[i] for x in (truth, prediction))
        a, b = a - a.mean(), b - b.mean()
        size = float(np.sqrt((a @ a) * (b @ b)))
        return float(a @ b) / size if size > 0 else float("nan")

    return bootstrap(value, len(truth))


def entities(labels: Sequence[str]) -> set[tuple[int, int, str]]:
    """The entities in the labels of a sentence, (start, end, type): runs of B- and I- labels of one type.

    A run that begins with I- counts, as in the CoNLL evaluation.

    >>> sorted(entities(["B-PER", "I-PER", "O", "I-LOC", "B-LOC"]))
    [(0, 2, 'PER'), (3, 4, 'LOC'), (4, 5, 'LOC')]
    """
    chunks: set[tuple[int, int, str]] = set()
    start, inside = 0, ""
    for position, label in enumerate([*labels, "O"]):
        prefix, _, kind = label.partition("-")
        goes_on = bool(inside) and prefix == "I" and kind == inside
        if inside and not goes_on:
            chunks.add((start, position, inside))
            inside = ""
        if prefix in ("B", "I") and kind and not goes_on:
            start, inside = position, kind
    return chunks


def f1_of_counts(counts: Sequence[tuple[int, int, int]]) -> Interval:
    """Micro F1 from (right, predicted, true) of each example.

    >>> f1_of_counts([(1, 2, 2), (1, 1, 1)]).mean
    0.6666666666666666
    """
    table = np.asarray(counts, float)
    return ratio(2 * table[:, 0], table[:, 1] + table[:, 2])


def plain_answer(text: str) -> str:
    """An answer as SQuAD compares it: lower case, no punctuation, no articles, single spaces.

    >>> plain_answer("The  Eiffel-Tower!")
    'eiffeltower'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def answer_f1(prediction: str, truth: str) -> float:
    """The F1 of the words that two answers share; of two empty ones it is 1.

    >>> answer_f1("the old tower", "Tower of London")
    0.4
    """
    a, b = plain_answer(prediction).split(), plain_answer(truth).split()
    if not a or not b:
        return float(a == b)
    return 2 * (Counter(a) & Counter(b)).total() / (len(a) + len(b))


def edits(truth: Sequence[object], prediction: Sequence[object]) -> int:
    """The fewest insertions, deletions and replacements from one sequence to another (Levenshtein).

    >>> edits("kitten", "sitting"), edits([], ["a"])
    (3, 1)
    """
    row = list(range(len(prediction) + 1))
    for i, one in enumerate(truth, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(prediction, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (one != other))
    return row[-1]


def error_rate(truths: Sequence[str], predictions: Sequence[str], words: bool) -> Interval:
    """Edits by the length of the truth: the word error rate, or that of characters.

    >>> error_rate(["one two three"], ["one too three"], words=True).mean
    0.3333333333333333
    """
    split = [[text.split() if words else list(text) for text in side] for side in (truths, predictions)]
    pairs = list(zip(*split, strict=True))
    return ratio([edits(a, b) for a, b in pairs], [len(a) for a, _ in pairs])


def translation_score(truths: Sequence[str], predictions: Sequence[str], metric: str) -> Interval:
    """BLEU or chrF of sacrebleu, 0 to 100, with its bootstrap.

    >>> round(translation_score(["the cat sat on the mat"], ["the cat sat on the mat"], "BLEU").mean, 1)
    100.0
    """
    metrics = sacrebleu_package().metrics
    scorer = getattr(metrics, metric)()
    score = scorer.corpus_score(list(predictions), [list(truths)], n_bootstrap=RESAMPLES)
    several = len(truths) > 1
    half = float(score._ci) if several else float("nan")
    middle = float(score._mean)
    return Interval(float(score.score), middle - half, middle + half, len(truths))


def sacrebleu_package() -> ModuleType:
    """sacreBLEU; an ImportError names the command that installs it."""
    try:
        import sacrebleu
    except ImportError:
        raise ImportError("BLEU and chrF need sacrebleu: pip install 'manyheads[train]'") from None
    module: ModuleType = sacrebleu
    return module
