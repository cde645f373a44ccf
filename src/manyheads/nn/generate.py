"""Generation with a `Decoder` or a `Seq2Seq`: greedy, by sampling, or by beam search, with a cache.

Prompts of different lengths are padded on the left, so that all of them step together; the padding is masked,
and each prompt continues as it would alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manyheads.common.preserved_state import evaluating
from manyheads.nn.decoding import FEWEST, Steps, steps_of
from manyheads.nn.stack import DecoderCache
from manyheads.nn.transformers import Decoder, Seq2Seq

__all__ = ["generate"]


@torch.no_grad()
def generate(
    model: Decoder | Seq2Seq,
    prompt: Tensor,
    *,
    new_tokens: int,
    lengths: Tensor | None = None,
    start: int | None = None,
    end: int | None = None,
    beams: int = 1,
    length_penalty: float = 1.0,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    cache: DecoderCache | None = None,
) -> Tensor:
    """Continue prompts with a `Decoder`, or generate the target of a source with a `Seq2Seq`.

    Greedy unless ``beams`` is above 1 (beam search) or one of ``temperature``, ``top_k``, ``top_p`` is set
    (sampling). Dropout is off.

    Parameters
    ----------
    model
        A `Decoder` with a vocabulary, or a `Seq2Seq` with a target vocabulary.
    prompt
        Ids ``(batch, length)`` to continue; for a `Seq2Seq` its source (ids, or vectors).
    new_tokens
        The largest number of tokens to generate.
    lengths
        The length of each prompt (or source), ``(batch,)``; tokens past it are padding.
    start
        For a `Seq2Seq`: the id that every target begins with.
    end
        The id that ends a text. A text that ended is padded with it.
    beams
        Beam width: hypotheses per text.
    length_penalty
        Hypotheses are compared by log probability / length ** length_penalty; 0 for no penalty.
    temperature
        Divides the logits before sampling: below 1 sharpens the distribution, above 1 flattens it.
    top_k
        Sample among the k most probable tokens only.
    top_p
        Sample among the fewest tokens that together have this probability (nucleus sampling).
    generator
        The random generator for sampling; the same seed gives the same text.
    cache
        An empty cache to use for a `Decoder`, such as a `HeadwiseCache`; by default a full one.

    Returns
    -------
    Tensor
        The new tokens, ``(batch, new_tokens)``, without the prompt; fewer columns if all texts end earlier.

    Examples
    --------
    >>> from manyheads.nn.transformers import Decoder, Seq2Seq
    >>> decoder = Decoder(12, heads=3, layers=2, vocabulary=101)
    >>> prompt = torch.randint(101, (2, 7))
    >>> generate(decoder, prompt, new_tokens=5, lengths=torch.tensor([7, 4])).shape
    torch.Size([2, 5])
    >>> seed = torch.Generator().manual_seed(0)
    >>> generate(decoder, prompt, new_tokens=5, temperature=0.8, top_p=0.9, generator=seed).shape
    torch.Size([2, 5])
    >>> model = Seq2Seq(12, heads=3, layers=2, vocabulary=101)
    >>> generate(model, prompt, new_tokens=5, start=1, beams=3).shape
    torch.Size([2, 5])

    See Also
    --------
    Decoder, Seq2Seq : the models.
    predict : the output of a trained model for texts.

    References
    ----------
    Holtzman et al. 2020, The curious case of neural text degeneration (top-p).
    Fan et al. 2018, Hierarchical neural story generation (top-k).
    Wu et al. 2016, Google's neural machine translation system (length penalty).
    """
    if not isinstance(model, Decoder | Seq2Seq):
        raise TypeError(f"model: expected a Decoder or a Seq2Seq, got {type(model).__name__}")
    sampling = not (temperature is None and top_k is None and top_p is None)
    _check(new_tokens, beams, sampling, temperature, top_k, top_p)
    is_long = new_tokens >= FEWEST and cache is None  # a cache that was passed may do more than hold keys
    with evaluating(model, draws=True):
        if isinstance(model, Seq2Seq):
            if cache is not None:
                raise ValueError("cache: expected none with a Seq2Seq, which makes one for its source")
            decoder = model.decoder
            ids, cache = _read_source(model, prompt, lengths, start, new_tokens, beams)
        else:
            decoder = model
            ids, cache = _read_prompt(model, prompt, lengths, new_tokens, beams, cache)
        steps = steps_of(decoder, cache, ids.shape[0], beams) if is_long else None
        reader = Modules(decoder, cache) if steps is None else steps
        if beams > 1:
            return _search(reader, ids, new_tokens, end, beams, length_penalty)
        tokens: list[Tensor] = []
        ended = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
        while len(tokens) < new_tokens and not bool(ended.all()):
            logits = reader.token(ids) if tokens else reader.prompt(ids)  # (batch, vocabulary)
            logits = logits.float()
            if sampling:
                logits = narrow(logits / (1.0 if temperature is None else temperature), top_k, top_p)
                token = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            else:
                token = logits.argmax(-1, keepdim=True)
            if end is not None:
                token = token.masked_fill(ended[:, None], end)
                ended = ended | (token[:, 0] == end)
            tokens.append(token)
            ids = token
    return torch.cat(tokens, dim=1)


def narrow(logits: Tensor, top_k: int | None = None, top_p: float | None = None) -> Tensor:
    """Logits ``(batch, vocabulary)`` with -inf for the tokens that are not to be sampled.

    Examples
    --------
    >>> logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    >>> narrow(logits, top_k=3).softmax(-1)
    tensor([[0.5263, 0.3158, 0.1579, 0.0000]])
    >>> narrow(logits, top_p=0.7).softmax(-1)
    tensor([[0.6250, 0.3750, 0.0000, 0.0000]])
    """
    if top_k is not None and top_k < logits.shape[-1]:
        kth_logit = logits.topk(top_k).values[..., -1:]
        logits = logits.masked_fill(logits < kth_logit, -torch.inf)
    if top_p is not None:
        sorted_logits, order = logits.sort(descending=True)
        share = sorted_logits.softmax(-1)
        mass_before = share.cumsum(-1) - share  # what the more probable tokens already hold
        logits = logits.masked_fill((mass_before >= top_p).gather(-1, order.argsort(-1)), -torch.inf)
    return logits


class Modules:
    """A decoder as it is, whatever is hooked to it, behind the methods of `Steps`."""

    def __init__(self, decoder: Decoder, cache: DecoderCache) -> None:
        self.decoder, self.cache = decoder, cache
        self.beams = 1  # hypotheses of each row in the cache: after the prompt there is one

    def prompt(self, ids: Tensor) -> Tensor:
        """Read ids (rows, length); the logits of the next token, (rows, vocabulary)."""
        logits: Tensor = self.decoder(ids, cache=self.cache, last=True)
        return logits[:, -1]

    def token(self, ids: Tensor, parents: Tensor | None = None) -> Tensor:
        """Read one token of each hypothesis, (rows * beams, 1), that continues ``parents (rows, beams)``."""
        if parents is not None:
            first = torch.arange(len(parents), device=ids.device)[:, None] * self.beams
            self.cache.reorder((first + parents.clamp(max=self.beams - 1)).flatten())
            self.beams = parents.shape[1]
        return self.prompt(ids)


def _search(
    reader: Steps | Modules,
    ids: Tensor,
    new_tokens: int,
    end: int | None,
    beams: int,
    length_penalty: float,
) -> Tensor:
    """The best of ``beams`` hypotheses per row. One that ended stays in the beam while its score holds."""
    batch, device = ids.shape[0], ids.device
    total = torch.full((batch, beams), -torch.inf, device=device)  # log probability of each hypothesis
    total[:, 0] = 0  # at first there is one: nothing
    length = torch.zeros(batch, beams, device=device)
    ended = torch.zeros(batch, beams, dtype=torch.bool, device=device)
    tokens = torch.empty(batch, beams, 0, dtype=ids.dtype, device=device)
    logits = reader.prompt(ids)[:, None].expand(-1, beams, -1)  # (batch, beams, vocabulary)
    while True:
        step = logits.float().log_softmax(-1)
        if end is not None:  # what ended goes on with `end` at no cost, and with nothing else
            step = step.masked_fill(ended[..., None], -torch.inf)
            step[..., end] = step[..., end].masked_fill(ended, 0)
        length = length + ~ended
        score = (total[..., None] + step) / length[..., None] ** length_penalty
        best, choice = score.flatten(1).topk(beams)  # (batch, beams), the best first
        parent, token = choice // step.shape[-1], choice % step.shape[-1]
        total = total.gather(1, parent) + step.flatten(1).gather(1, choice)
        length, ended = length.gather(1, parent), ended.gather(1, parent)
        if end is not None:
            ended = ended | (token == end)
        tokens = torch.cat([tokens.gather(1, parent[..., None].expand_as(tokens)), token[..., None]], -1)
        if tokens.shape[-1] == new_tokens or bool((ended | best.isneginf()).all()):
            return tokens[:, 0]
        logits = reader.token(token.view(-1, 1), parent).view(batch, beams, -1)


def _read_prompt(
    decoder: Decoder,
    prompt: Tensor,
    lengths: Tensor | None,
    new_tokens: int,
    beams: int,
    cache: DecoderCache | None,
) -> tuple[Tensor, DecoderCache]:
    """The prompts, all ending in the last column, and the cache to read them into."""
    if decoder.embedding is None:
        raise ValueError("model: expected a Decoder with a vocabulary, got one of vectors")
    if prompt.dim() != 2 or prompt.shape[1] == 0:
        raise ValueError(f"prompt: expected (batch, length) with at least one id, got {tuple(prompt.shape)}")
    left = None
    if lengths is not None:
        lengths = lengths.to(prompt.device)
        if lengths.shape != prompt.shape[:1] or bool(((lengths < 1) | (lengths > prompt.shape[1])).any()):
            batch, length = prompt.shape
            raise ValueError(f"lengths: expected {batch} numbers from 1 to {length}, got {lengths.tolist()}")
        longest = int(lengths.max())
        left = longest - lengths
        position = torch.arange(longest, device=prompt.device) - left[:, None]
        prompt = prompt.gather(1, position.clamp(min=0))
        if not bool(left.any()):
            left = None
    if left is not None and any(block.attention.chunk for block in decoder.blocks):
        raise ValueError("lengths: a decoder with chunks takes prompts of equal lengths, got different ones")
    room = _room(decoder, prompt.shape[1], new_tokens, beams)
    if cache is None:
        return prompt, decoder.new_cache(room, left=left)
    if cache.length:
        raise ValueError(
            f"cache: it already holds {cache.length} tokens; expected a new cache, or a reset one"
        )
    cache.left = left
    return prompt, cache


def _read_source(
    model: Seq2Seq, source: Tensor, lengths: Tensor | None, start: int | None, new_tokens: int, beams: int
) -> tuple[Tensor, DecoderCache]:
    """The first token of every target, and a cache with the source."""
    if model.decoder.embedding is None:
        raise ValueError("model: expected a Seq2Seq with a target vocabulary, got one of vectors")
    if start is None:
        raise ValueError("start: expected the id that every target begins with, got None")
    memory = model.encoder(source, lengths=lengths)
    ids = torch.full((source.shape[0], 1), start, dtype=torch.int64, device=source.device)
    room = _room(model.decoder, 1, new_tokens, beams)
    return ids, model.decoder.new_cache(room, memory, context_lengths=lengths)


def _room(decoder: Decoder, length: int, new_tokens: int, beams: int) -> int:
    """How many keys a cache holds: of the tokens read, all but the last one written of every hypothesis."""
    room = length + new_tokens - 1
    if decoder.max_length is not None and room > decoder.max_length:
        raise ValueError(
            f"new_tokens: {length} tokens and {new_tokens} new ones need {room} positions, "
            f"expected at most {decoder.max_length} (max_length)"
        )
    return length + (new_tokens - 1) * beams


def _check(
    new_tokens: int,
    beams: int,
    sampling: bool,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
) -> None:
    for name, count in (("new_tokens", new_tokens), ("beams", beams), ("top_k", top_k)):
        if count is not None and count < 1:
            raise ValueError(f"{name}: expected at least 1, got {count}")
    if temperature is not None and not temperature > 0:
        raise ValueError(f"temperature: expected more than 0 (leave it out for greedy), got {temperature}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p: expected a share above 0 and up to 1, got {top_p}")
    if sampling and beams > 1:
        raise ValueError(f"beams: expected 1 with temperature, top_k or top_p, got {beams}")
