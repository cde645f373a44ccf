"""The steps of an input through the first attention, as the page draws them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from manyheads.heads.effects.followed_attention import HEADS, QUERIES, Step
from manyheads.view.document.contract import PipelineStep, Token
from manyheads.view.document.packing import short

# The number of columns of a matrix that are drawn.
COLUMNS = 24


def pipeline_steps(steps: Sequence[Step] | None, tokens: Sequence[Token]) -> list[PipelineStep] | None:
    """The steps, each with its shape and the values that are drawn; None where there are none.

    >>> import torch
    >>> steps = [Step("ids", torch.tensor([5, 7]), [2], "h.0.attn")]
    >>> [step["values"] for step in pipeline_steps(steps, [{"text": "a", "shown": "a", "mark": None}])]
    [['a'], [5, 7]]
    """
    if steps is None:
        return None
    length = steps[0].shape[0]
    drawn: list[PipelineStep] = [
        {"step": "tokens", "shape": [length], "values": [token["shown"] for token in tokens[:QUERIES]]}
    ]
    for step in steps:
        if step.name == "ids":
            values = step.values[:QUERIES].tolist()
        else:
            values = short(_drawn_part(step.values, square=step.name in ("scores", "weights")).float())
        drawn.append({"step": step.name, "shape": step.shape, "values": values, "site": step.site})
    return drawn


def _drawn_part(values: Tensor, square: bool) -> Tensor:
    values = values[:HEADS] if values.dim() == 3 else values
    return values[..., :QUERIES, : QUERIES if square else COLUMNS]
