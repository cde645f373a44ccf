"""One input, with some heads silenced or with all: what the heads attend to, and what the model answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from manyheads.capture.call import Call
from manyheads.capture.site import Site
from manyheads.common.types import Batch
from manyheads.heads.effects.answers import Answer, Sentences, answer
from manyheads.heads.effects.followed_attention import FollowedAttention, Step
from manyheads.heads.maps import maps
from manyheads.heads.observer import Forward, observed
from manyheads.heads.pooled_maps import THUMBNAIL, Seen, see
from manyheads.heads.silence import silence

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

# Heads by site name, as the page names them.
SiteHeads = Mapping[str, list[int]]


@dataclass(frozen=True, eq=False)
class Observation:
    """One run of a model on one input.

    Attributes
    ----------
    seen: what the model returned, and the maps of its heads.
    steps: the input step by step through one attention; None where that was not asked for, or where the
        model reads no token ids.
    """

    seen: Seen
    steps: list[Step] | None


def observe_input(
    model: nn.Module,
    batch: Batch,
    silenced: SiteHeads | None = None,
    *,
    exact: Callable[[Site], Sequence[int]] | None = None,
    pooled: int = 128,
    thumbnail: int = THUMBNAIL,
    steps: bool = False,
    site: str | None = None,
) -> Observation:
    """Run a model once on a batch of one sequence or image, and keep what its heads attend to.

    Parameters
    ----------
    model: any torch.nn.Module, run as it is.
    batch: a dict, a tuple or a tensor.
    silenced: heads to silence meanwhile.
    exact, pooled, thumbnail: as in `see`.
    steps: whether to follow the input through an attention: the first, or that of ``site``.

    Examples
    --------
    >>> import torch
    >>> from manyheads.nn.transformers import Encoder
    >>> model = Encoder(d_model=8, heads=2, layers=1, vocabulary=17).eval()
    >>> observation = observe_input(model, torch.randint(17, (1, 5)), steps=True)
    >>> observation.seen.maps[0].thumbnails.shape, observation.steps[0].name
    (torch.Size([2, 5, 5]), 'ids')
    """
    followed = FollowedAttention(model, site) if steps else None
    following: AbstractContextManager[Callable[[Call], None]] = followed or nullcontext(lambda call: None)
    with _without(model, silenced), following as also:
        seen = see(model, batch, exact=exact, pooled=pooled, thumbnail=thumbnail, also=also)
    return Observation(seen, None if followed is None else followed.steps())


def observe_answer(
    model: nn.Module,
    batch: Batch,
    silenced: SiteHeads | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    kind: str | None = None,
    sentences: Sentences | None = None,
) -> tuple[Observation, Answer | None]:
    """As `observe_input`, and what the model answers: `answer` on the same run.

    Parameters
    ----------
    model, batch, silenced: as in `observe_input`.
    tokenizer, kind, sentences: as in `answer`.

    Examples
    --------
    >>> import torch
    >>> from manyheads.nn.transformers import Decoder
    >>> model = Decoder(12, heads=3, layers=1, vocabulary=101).eval()
    >>> observation, said = observe_answer(model, torch.randint(101, (1, 5)), {"blocks.0.attention": [1]})
    >>> len(observation.seen.maps), said["kind"], len(said["items"])
    (1, 'next', 5)
    """
    with _without(model, silenced):
        observation = observe_input(model, batch)
        result = observation.seen.result
        return observation, answer(model, tokenizer, batch, kind=kind, sentences=sentences, result=result)


def exact_maps(
    model: nn.Module,
    batch: Batch,
    heads: SiteHeads,
    silenced: SiteHeads | None = None,
    queries: Sequence[int] | None = None,
) -> dict[str, Tensor]:
    """The exact attention weights of chosen heads to the first sequence, {site: (heads, queries, keys)}.

    Examples
    --------
    >>> import torch
    >>> from manyheads.nn.transformers import Encoder
    >>> model = Encoder(d_model=8, heads=2, layers=1, vocabulary=17).eval()
    >>> weights = exact_maps(model, torch.randint(17, (1, 5)), {"blocks.0.attention": [1]}, queries=[3])
    >>> weights["blocks.0.attention"].shape
    torch.Size([1, 1, 5])
    """
    with _without(model, silenced):
        rows = maps(model, batch, heads, queries=queries, size=None)
    return {name: rows[name].weights[0] for name in heads}


def forwards(model: nn.Module, batches: Iterable[Batch], silenced: SiteHeads | None = None) -> list[Forward]:
    """What the model gives for some batches, in eval mode and without gradients.

    Examples
    --------
    >>> import torch
    >>> from manyheads.nn.transformers import Encoder
    >>> model = Encoder(d_model=8, heads=2, layers=1, vocabulary=17)
    >>> forwards(model, [torch.randint(17, (3, 5))], {"blocks.0.attention": [0]})[0].output.value.shape
    torch.Size([3, 8])
    """
    with _without(model, silenced), observed(model) as observer:
        return [observer.forward(batch) for batch in batches]


def _without(model: nn.Module, heads: SiteHeads | None) -> AbstractContextManager[None]:
    return silence(model, heads) if heads else nullcontext()
