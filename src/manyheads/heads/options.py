"""The options of the commands that measure and compare heads, with their help. This module loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from manyheads.data.source import Images, Limit, MaxLength, Sample, Text

Unverified = Annotated[
    Literal["refuse", "allow"],
    "What to do with heads at sites about which nothing could be proved: refuse or allow.",
]
Memory = Annotated[
    str | None, "Memory budget for elimination and refit: 2GB, 800MB ...; half of the free memory by default."
]


@dataclass(frozen=True)
class RoleOptions:
    """Of ``manyheads roles``. The text beside each type is the help of its option, here and below."""

    treebank: Annotated[Path | None, "Sentences with dependencies (CoNLL-U), for syntactic roles."] = None
    only: Annotated[str | None, "Some roles only, as in: induction,retrieval"] = None
    least: Annotated[int, "Minimum number of cases for a role."] = 100
    sample: Sample = 16384


@dataclass(frozen=True)
class DiversityOptions:
    """Of ``manyheads diversity``."""

    rows: Annotated[int, "Queries of each batch on which attention is compared."] = 128
    measures: Annotated[
        str | None, "Some of attention,outputs,subspaces,contributions,gradients; all by default."
    ] = None
    sample: Sample = 16384


@dataclass(frozen=True)
class ImportanceOptions:
    """Of ``manyheads importance``."""

    method: Annotated[
        str | None,
        "One or several: fisher, elimination, gradient, leave-one-out, mean-ablation, confidence, "
        "output-norm, relevance, gates, random; fisher by default, with labels gradient and fisher.",
    ] = None
    loss: Annotated[
        str | None,
        "For gradient, leave-one-out, mean-ablation and gates: causal, masked, classification, seq2seq, "
        "embedding, labels; with labels, that of their task by default.",
    ] = None
    gates: Annotated[int | None, "Number of heads that --method gates keeps; half of them by default."] = None
    unverified: Unverified = "refuse"
    seed: Annotated[int, "The seed of all random numbers."] = 0
    memory: Memory = None


@dataclass(frozen=True)
class CompareOptions:
    """Of ``manyheads compare``: what both models read, and how their heads are matched."""

    text: Text = None
    other_text: Annotated[str | None, "What the second model reads; the same text by default.", "Corpus"] = (
        None
    )
    images: Images = None
    max_length: MaxLength = None
    limit: Limit = 200
    match: Annotated[
        Literal["function", "number"], "Match heads by what they do, or by their numbers before any cut."
    ] = "function"
    rate: Annotated[float, "The false discovery rate: wrong findings, as a share of all findings."] = 0.05
    other_revision: Annotated[
        str | None, "A branch, tag or commit of the second model; --revision is the first one's.", "Model"
    ] = None
