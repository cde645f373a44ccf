"""What it costs when a key/value head forgets: predicted for all heads from one backward pass.

Let o be the output of a head and o' its output when it sees the first and the last tokens only. To second
order, the model's prediction changes by a Kullback-Leibler divergence of half the Fisher form of the
difference: half the mean of (g . (o' - o))^2, where g is the gradient of the log probability of a token that
is drawn from the model's own prediction. So no labels are needed, and heads whose far keys change nothing
cost nothing, however much attention they give them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from manyheads.common.devices import batches_to_device, device_of, for_float64
from manyheads.common.preserved_state import evaluating
from manyheads.common.progress import Progress, count_of, no_progress
from manyheads.common.types import Batch
from manyheads.heads.importance.losses import READ
from manyheads.nn.head_memory import HeadMemory
from manyheads.nn.mask import Mask
from manyheads.nn.stack import DecoderCache
from manyheads.nn.transformers import Decoder
from manyheads.surgery.cache_layers import HeadwiseLayer, full_layers, kv_heads_by_layer

Prices = dict[int, Tensor]  # by layer: (kv_heads,)


@dataclass(eq=False)
class TokenBatch:
    """The tokens of a batch: ids (batch, length), and which of them are no padding, None for all."""

    ids: Tensor
    real: Tensor | None = None

    def run(self, model: nn.Module, cache: Any) -> Tensor:
        """The logits (batch, length, vocabulary) of a model that starts with this cache."""
        if isinstance(model, Decoder):
            logits = model(self.ids, cache=cache)
        else:
            mask = None if self.real is None else self.real.long()
            result = model(input_ids=self.ids, attention_mask=mask, past_key_values=cache, use_cache=True)
            logits = result.logits if hasattr(result, "logits") else None
        if not isinstance(logits, Tensor) or logits.dim() != 3:
            raise ValueError(
                f"model: {type(model).__name__} gives no logits for its next tokens; load it with its head"
            )
        return logits

    def planted(self, window: int) -> tuple[TokenBatch, int] | None:
        """The same text, whose last tokens are replaced by a copy of early ones, and how many those are.

        The copy stands more than ``window`` behind what it copies; None where the text is too short.
        """
        length = self.ids.shape[1]
        copied = min(128, (length - window) // 4)
        if copied < 2 or (self.real is not None and not bool(self.real.all())):
            return None
        start = min(copied, length - window - 2 * copied)
        ids = self.ids.clone()
        ids[:, -copied:] = ids[:, start : start + copied]
        return TokenBatch(ids), copied


@dataclass(eq=False)
class PriceSums:
    """Sums over tokens of what each head's forgetting changes: on the text, and where text is copied."""

    text: Prices = field(default_factory=dict)
    planted: Prices = field(default_factory=dict)
    tokens: int = 0
    copied: int = 0

    @property
    def by_text(self) -> Prices:
        """Nats for each token of the text."""
        return {layer: total / max(1, self.tokens) for layer, total in self.text.items()}

    @property
    def by_copies(self) -> Prices:
        """Nats for each token that could be copied from far back."""
        return {layer: total / max(1, self.copied) for layer, total in self.planted.items()}


def forgetting_prices(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    first: int,
    window: int,
    forget: Mapping[int, Sequence[int]] | None = None,
    seed: int = 0,
    stage: str = "price",
    progress: Progress = no_progress,
) -> PriceSums:
    """What each key/value head would cost if it kept the first and the last tokens only.

    Parameters
    ----------
    model: causal, of transformers or a `Decoder`; it runs in eval mode and is left unchanged.
    batches: token ids: tensors (batch, length), or dicts with input_ids and perhaps attention_mask.
    first, window: how many tokens a head that forgets keeps.
    forget: heads that already forget; they cost nothing more.
    seed: of the tokens that are drawn from the model's predictions.

    Examples
    --------
    >>> model = Decoder(12, heads=3, layers=2, vocabulary=101)
    >>> sums = forgetting_prices(model, [torch.randint(101, (2, 40))], first=1, window=8)
    >>> sums.by_text[0].shape, sums.tokens, sums.copied
    (torch.Size([3]), 80, 14)
    """
    sizes = kv_heads_by_layer(model)
    windows: dict[int, list[int | None]] = {
        layer: [window if head in (forget or {}).get(layer, ()) else None for head in range(size)]
        for layer, size in sizes.items()
    }
    sums, total, short = PriceSums(), count_of(batches), 0
    generator = torch.Generator().manual_seed(seed)
    with evaluating(model), torch.enable_grad():
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for number, tokens in enumerate(token_batches(batches, device_of(model)), 1):
            short = max(short, tokens.ids.shape[1])
            run = _Run(model, windows, first, window, generator)
            _add(sums.text, run.squares(tokens))
            real = tokens.real
            sums.tokens += tokens.ids.numel() if real is None else int(real.sum())
            copies = tokens.planted(first + window)
            if copies is not None:
                planted, copied = copies
                _add(sums.planted, run.squares(planted, last=copied + 1))
                sums.copied += copied * len(planted.ids)
            progress(stage, number, total)
    if short <= first + window:
        raise ValueError(
            f"batches: the longest has {short} tokens, and heads that forget keep {first} first and {window} "
            "last ones, so nothing would be forgotten; expected longer texts, several times the window"
        )
    return sums


class _Run:
    """Runs of a model in which every head is compared with itself when it forgets."""

    def __init__(
        self, model: nn.Module, windows: Mapping[int, list[int | None]], first: int, window: int,
        generator: torch.Generator,
    ) -> None:  # fmt: skip
        self.model, self.windows, self.first, self.window = model, windows, first, window
        self.generator = generator

    def squares(self, tokens: TokenBatch, last: int | None = None) -> Prices:
        """By layer: the sum over tokens of half the squared change, (kv_heads,) in float64.

        ``last``: count the last ones only.
        """
        layers_by_number = {layer: _PricedLayer(windows, self) for layer, windows in self.windows.items()}
        logits = tokens.run(self.model, self._cache(layers_by_number))
        predictions = logits[:, :-1] if last is None else logits[:, -last:-1]
        log_probability = predictions.float().log_softmax(-1)  # (batch, predicted, vocabulary)
        with torch.no_grad():
            flat = log_probability.detach().exp().flatten(0, 1).cpu()
            choice = torch.multinomial(flat, 1, generator=self.generator)
            choice = choice.view(*predictions.shape[:2], 1).to(predictions.device)
        drawn_log_probability = log_probability.gather(-1, choice)[..., 0]
        if tokens.real is not None and last is None:
            drawn_log_probability = drawn_log_probability * tokens.real[:, 1:]
        layers = list(layers_by_number)
        outputs = [layers_by_number[layer].output for layer in layers]
        gradients = torch.autograd.grad(drawn_log_probability.sum(), outputs)
        squares: Prices = {}
        for layer, gradient in zip(layers, gradients, strict=True):
            change = layers_by_number[layer].change
            kv_heads = len(self.windows[layer])
            slope = (gradient * change).unflatten(
                1, (kv_heads, -1)
            )  # (batch, kv_heads, group, length, width)
            slope = slope.to(for_float64(slope.device)).sum((2, 4))
            squares[layer] = slope.pow(2).sum((0, 2)).div(2).double().cpu()
        return squares

    def _cache(self, priced: Mapping[int, _PricedLayer]) -> Any:
        if isinstance(self.model, Decoder):
            return DecoderCache(list(priced.values()), [], None, None)  # type: ignore[arg-type]
        layers = full_layers(self.model)[0]
        return Cache(layers=[priced.get(number, layer) for number, layer in enumerate(layers)])


class _PricedLayer(HeadwiseLayer):
    """A layer whose heads attend as ever, with gradients, and that notes what forgetting would change."""

    inference_only = False

    def __init__(self, windows: list[int | None], run: _Run) -> None:
        super().__init__(windows, run.first, None)
        self._run = run
        self._output: Tensor | None = None
        self.change = torch.zeros(())  # (batch, heads, length, width)

    @property
    def output(self) -> Tensor:
        """The outputs of its heads, (batch, heads, length, width)."""
        if self._output is None:
            raise ValueError("model: one of its layers never attended; expected all of them to")
        return self._output

    def attend(self, q: Tensor, mask: Mask, scale: float | None, dropout: float) -> Tensor:
        k, v = self.take_new()
        output = self.memory.attend(q, k, v, mask, scale, dropout)
        with torch.no_grad():
            all_forget: list[int | None] = [self._run.window] * len(self.memory.windows)
            other = HeadMemory(all_forget, self._run.first).attend(q, k, v, mask, scale, dropout)
            self.change = other - output.detach()
        if not output.requires_grad:  # the first layer: nothing before it has a gradient
            output = output.detach().requires_grad_()
        self._output = output
        return output.clone()


def token_batches(batches: Iterable[Batch], device: torch.device) -> Iterator[TokenBatch]:
    """The token ids of batches, on the model's device; raises when there are none."""
    for batch in batches_to_device(batches, device):
        yield _token_batch(batch)


def _token_batch(batch: Batch) -> TokenBatch:
    if isinstance(batch, Mapping):
        ids = next((batch[name] for name in READ if name in batch), None)
        real, lengths = batch.get("attention_mask"), batch.get("lengths")
    else:
        ids, real, lengths = (batch[0] if isinstance(batch, tuple | list) else batch), None, None
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
        raise ValueError("batches: expected token ids (batch, length), or dicts with input_ids")
    if real is None and isinstance(lengths, Tensor):
        real = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None].to(ids.device)
    if isinstance(real, Tensor):
        return TokenBatch(ids, None if bool(real.all()) else real.bool())
    return TokenBatch(ids)


def _add(sums: Prices, values: Prices) -> None:
    for layer, value in values.items():
        sums[layer] = sums[layer] + value if layer in sums else value
