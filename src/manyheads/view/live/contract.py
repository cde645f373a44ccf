"""What the live page sends, and what the server answers: every request with its types.

web/src/contract.ts is generated from this module and from document/contract.py by tools/page_types.py.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, TypedDict

from pydantic import BaseModel, ConfigDict, Field

from manyheads.view.document.contract import Answer, Example, HeadDocument, Packed, PipelineStep
from manyheads.view.live.session import Input

CHARACTERS = 100_000  # of a text that is typed

# Head numbers by site.
SiteHeads: TypeAlias = dict[str, list[int]]
_SiteHeads: TypeAlias = Annotated[SiteHeads, Field(max_length=4096)]


class InputRequest(BaseModel):
    """The input, one of: a text, an image in base64, the number of a sample image."""

    model_config = ConfigDict(extra="forbid", strict=True)
    text: str | None = Field(None, max_length=CHARACTERS)
    image: str | None = None
    sample: int | None = None

    @property
    def input(self) -> Input:
        """The same for the model."""
        return Input(self.text, self.image, self.sample)


class AblationRequest(InputRequest):
    """The input, and the heads to silence."""

    heads: _SiteHeads


class HeadRequest(AblationRequest):
    """The input, the heads to silence, and the head whose map is wanted."""

    site: str
    head: int


class PipelineRequest(AblationRequest):
    """The input, the heads to silence, and the attention to follow; the first by default."""

    site: str | None = None


class QueryRequest(AblationRequest):
    """The input, the heads to silence, and the query whose attention is wanted."""

    query: int


class HeadsRequest(BaseModel):
    """The heads to silence, or to remove."""

    model_config = ConfigDict(extra="forbid", strict=True)
    heads: _SiteHeads


class SelectionRequest(BaseModel):
    """A rule, or a ranking and the share of heads to keep."""

    model_config = ConfigDict(extra="forbid", strict=True)
    rule: str | None = None
    ranking: str | None = None
    keep: float = Field(0.5, gt=0, le=1)


class Shortened(TypedDict):
    """Of a text that is too long: how many tokens it has, and how many are shown."""

    tokens: int
    shown: int


class LiveProgress(TypedDict):
    """How far the measuring is, and what the page offers."""

    # of the document
    version: int
    stage: str
    share: float
    # how many stages are done
    done: int
    stages: list[str]
    finished: bool
    reads: Literal["text", "image"]
    # what stands for a masked token; "" where the model fills in none
    mask: str
    samples: list[str]
    # how many sample images there are
    pictures: int
    rules: list[str]
    rankings: list[str]
    # the command that takes the plan
    command: str
    # how many requests wait
    waiting: int


class FirstPage(TypedDict):
    """What the page carries when it is opened."""

    progress: LiveProgress
    document: HeadDocument


class Attended(TypedDict):
    """What the heads attend to, and what the model says."""

    example: Example
    answer: Answer | None
    cut: Shortened | None


class Ablation(TypedDict):
    """What the model says with all heads and without the silenced ones, and how far apart that is."""

    before: Answer | None
    after: Answer | None
    change: float | None
    # cosine, kl, kl_sequence or square
    measure: str
    cut: Shortened | None
    example: Example


class Quality(TypedDict):
    """How good the model still is on the small text."""

    metric: str
    before: float
    before_se: float | None
    value: float | None
    # standard error of the change from before
    se: float | None
    # whether these sequences cannot tell the change from none
    within_noise: bool
    sequences: int
    # the share of heads
    kept: float


class ExactMap(TypedDict):
    """The exact attention of one head, (queries, keys)."""

    exact: Packed


class QueryRows(TypedDict):
    """The exact attention of one query in every head, (heads, keys) by site."""

    rows: dict[str, Packed]


class Pipeline(TypedDict):
    """The input step by step through an attention."""

    pipeline: list[PipelineStep] | None


class SelectedHeads(TypedDict):
    """The heads that a rule or a ranking selects."""

    heads: SiteHeads


class Failure(TypedDict):
    """Why a request was refused: a sentence."""

    error: str


# What is posted to each address, and the JSON that it answers with.
ENDPOINTS: dict[str, tuple[type[BaseModel], type]] = {
    "/api/attend": (InputRequest, Attended),
    "/api/silence": (AblationRequest, Ablation),
    "/api/exact": (HeadRequest, ExactMap),
    "/api/rows": (QueryRequest, QueryRows),
    "/api/pipeline": (PipelineRequest, Pipeline),
    "/api/quality": (HeadsRequest, Quality),
    "/api/choose": (SelectionRequest, SelectedHeads),
}
