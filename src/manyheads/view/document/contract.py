"""The page's document: every part of it, with its type. Python writes it here, TypeScript draws it in web/.

web/src/contract.ts is generated from this module and from live/contract.py by tools/page_types.py, which
`make web` runs; the comment above a key goes with it. Numbers are null where nothing was counted. Heads are
in the order of the rows of the HeadTable.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypeAlias, TypedDict

# Changes when an old page cannot read a new document.
VERSION = 2

Numbers: TypeAlias = list[float | None]
Dtype: TypeAlias = Literal["uint8", "uint16", "float32"]
Mark: TypeAlias = Literal["joined", "space", "special", "unknown", "newline", "byte"] | None
# A text and a number: a token and its probability, a sentence and its cosine.
Item: TypeAlias = tuple[str, float]
StepValues: TypeAlias = list[str] | Numbers | list[Numbers] | list[list[Numbers]]


class Packed(TypedDict):
    """Numbers as base64 of their little-endian bytes; integers stand for the range from 0 to 1."""

    dtype: Dtype
    shape: list[int]
    data: str


class Measured(TypedDict):
    """A number for each head, and its standard error."""

    mean: Numbers
    se: Numbers
    # of importance: what it is, and its unit
    measure: NotRequired[str]


class Header(TypedDict):
    """What the document is about."""

    # the version of manyheads that wrote it
    manyheads: str
    model: str
    fingerprint: str
    corpus: str
    # how many tokens or images were counted
    units: int
    unit: str
    notes: list[str]
    # whether Ctrl-C ended the measuring
    stopped: bool


class Heads(TypedDict):
    """Every head: its keys, as in a HeadTable, its name, and its metrics."""

    site: list[str]
    layer: list[int]
    head: list[int]
    original_head: list[int]
    kv_head: list[int]
    kind: list[str]
    name: list[str]
    tokens: Numbers
    metrics: dict[str, Measured]
    labels: dict[str, list[str]]


class Layer(TypedDict):
    """One site of a stack, and the rows of its heads."""

    layer: int
    site: str
    heads: list[int]


class Stack(TypedDict):
    """Layers of one kind, one above the other."""

    name: str
    kind: str
    layers: list[Layer]


class Profiles(TypedDict):
    """Attention by distance, (heads, offsets): offsets are those of keys from queries."""

    offsets: list[int]
    mass: Packed


class RoleEvidence(TypedDict):
    """How a head scored in the test of one role."""

    role: str
    score: float | None
    baseline: float | None
    cases: int
    claimed: bool


class Roles(TypedDict):
    """The roles that were tested, and the evidence of each head."""

    names: list[str]
    # by role: what it says about a head, and what its baseline is
    says: dict[str, str]
    against: dict[str, str]
    heads: list[list[RoleEvidence]]
    # by role: why it was not tested
    not_judged: dict[str, str]


class LayerDiversity(TypedDict):
    """How different the heads of one layer are."""

    layer: int
    site: str
    # the mean distance between two heads
    diversity: float | None
    # the effective number of heads with different attention
    distinct: float | None


class Redundancy(TypedDict):
    """Which heads attend alike: a map of all heads, clusters, and the nearest head of each, its twin."""

    x: Numbers
    y: Numbers
    # -1 for none, as in twin
    cluster: list[int]
    twin: list[int]
    twin_distance: Numbers
    # for each head: other heads and their distances, the nearest first
    nearest: list[list[tuple[int, float]]]
    # the distances of all pairs; null where there are too many heads
    matrix: Packed | None
    layers: list[LayerDiversity]


class CurveLine(TypedDict):
    """By one ranking: the shares of heads that are kept, and the quality then."""

    name: str
    kept: list[float]
    mean: Numbers
    se: Numbers


class Curve(TypedDict):
    """Quality as heads are silenced, the least important first."""

    # perplexity, accuracy, agreement, cosine, or another measure of the task
    quality: str
    # how many sequences it was measured on
    sequences: int
    lines: list[CurveLine]


class Token(TypedDict):
    """A token as the tokenizer writes it, as a person reads it, and what is particular about it."""

    text: str
    shown: str
    mark: Mark


class Maps(TypedDict):
    """The attention maps of one site."""

    site: str
    # the names of the axes: keys of the tokens of the example
    queries: str
    keys: str
    # of every head, each scaled by its largest weight, which is in peak
    thumbnails: Packed
    peak: list[float]
    # by head number
    exact: dict[str, Packed]
    # of long inputs: every head, in blocks of row_size queries and column_size keys
    pooled: NotRequired[Packed]
    row_size: NotRequired[int]
    column_size: NotRequired[int]


class PipelineStep(TypedDict):
    """One step of the input through an attention: its shape, and the values that are drawn."""

    step: str
    # the attention that it belongs to
    site: NotRequired[str]
    shape: list[int]
    values: StepValues


class Picture(TypedDict):
    """The image that a model reads, and the grid of its patches: the key of the first patch is `first`."""

    # a data: address
    png: str
    rows: int
    columns: int
    first: int


class Answer(TypedDict):
    """What the model says about an input: next tokens, a filled mask, classes, neighbours, a translation."""

    kind: str
    items: list[Item]
    # the token that was masked
    place: NotRequired[int]


class Silenced(TypedDict):
    """For each head: how far the output changes without it, and what the model says then."""

    # what the change is, and its unit
    measure: NotRequired[str]
    change: Numbers
    answer: list[list[Item] | None] | None


class Example(TypedDict):
    """One input: its tokens or its image, and what every head attends to."""

    kind: Literal["text", "image", "pair"]
    title: str
    # what is right, where the data have labels: a class by its name, an answer, a text
    label: NotRequired[str]
    # by axis
    tokens: dict[str, list[Token]]
    picture: Picture | None
    maps: list[Maps]
    pipeline: list[PipelineStep] | None
    answer: Answer | None
    silenced: Silenced | None


class HeadDocument(TypedDict):
    """All that the page shows. A part that was not measured, or failed, is null; a note says why."""

    version: int
    header: Header
    heads: Heads
    stacks: list[Stack]
    profiles: Profiles | None
    roles: Roles | None
    # by method
    importance: dict[str, Measured]
    redundancy: Redundancy | None
    curve: Curve | None
    # by group of tokens: its share of the corpus, in words
    groups: dict[str, str]
    examples: list[Example]
