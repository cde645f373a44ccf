"""What a model's output is, and how far two outputs are apart.

Logits are compared as distributions, by KL(full || other) in nats for each token, or for each sequence where
sequences are classified; amounts (regression) by half the square of their change; anything else as a
direction, by 1 - cosine of the masked mean of the last hidden state. All are zero where nothing changed and
grow with the square of a small change, which is what makes them predictable from gradients: see `directions`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from manyheads.common.devices import in_float64


@dataclass(frozen=True, eq=False)
class Output:
    """The output of a model for each sequence.

    Attributes
    ----------
    value: logits (batch, tokens, classes), where one token stands for a whole sequence that is classified;
        embeddings (batch, width); or amounts (batch, amounts).
    real: (batch, tokens), False for padding; None for embeddings and amounts.
    whole: logits are of whole sequences, not of their tokens.
    amounts: the value is numbers that count as they are: regression.
    named: the logits as the model named them, for the scores of a task.
    """

    value: Tensor
    real: Tensor | None
    whole: bool = False
    named: Mapping[str, Tensor] = field(default_factory=dict)
    amounts: bool = False

    @property
    def measure(self) -> str:
        """The name of what `output_distance` measures."""
        if self.amounts:
            return "half the square of the change of the output"
        if self.real is None:
            return "1 - cosine of the mean hidden state"
        return f"KL(full || silenced), nats a {'sequence' if self.whole else 'token'}"


def read_output(result: object, model: nn.Module, real: Tensor | None = None) -> Output:
    """The output of a model, from what it returned.

    ``logits`` by name, or a tensor whose last axis is as wide as the model's vocabulary, are logits. Else it
    is ``last_hidden_state``, or the first tensor there is: (batch, length, width), of which the mean over
    real positions is taken, or (batch, width). Where an answer starts and ends (``start_logits`` and
    ``end_logits``) are two choices among the real positions.

    Parameters
    ----------
    result: a tensor, a tuple or a mapping, as the model returned it.
    model: for the size of its vocabulary.
    real: (batch, length), False for padding; used where it fits the output.

    >>> read_output({"logits": torch.zeros(2, 5, 7)}, nn.Identity()).value.shape  # (batch, tokens, classes)
    torch.Size([2, 5, 7])
    >>> read_output(torch.ones(2, 5, 3), nn.Identity()).value.shape               # (batch, width)
    torch.Size([2, 3])
    """
    named = _named_logits(result)
    return (
        replace(_read(result, model, real, named), named=named) if named else _read(result, model, real, {})
    )


# The names of logits in what models of transformers return.
_LOGITS = ("logits", "start_logits", "end_logits")


def _named_logits(result: object) -> dict[str, Tensor]:
    if not isinstance(result, Mapping):
        return {}
    return {name: result[name] for name in _LOGITS if isinstance(result.get(name), Tensor)}


def is_span(result: object) -> bool:
    """Whether a model returned where an answer starts and where it ends.

    >>> is_span({"start_logits": torch.zeros(1, 5), "end_logits": torch.zeros(1, 5)}), is_span({})
    (True, False)
    """
    return {"start_logits", "end_logits"} <= set(_named_logits(result))


def _read(result: object, model: nn.Module, real: Tensor | None, named: Mapping[str, Tensor]) -> Output:
    if is_span(result):
        both = torch.stack([named["start_logits"], named["end_logits"]], 1)  # (batch, 2, length)
        if real is not None and real.shape == both[:, 0].shape:
            both = both.masked_fill(~real.unsqueeze(1), torch.finfo(both.dtype).min)
        return Output(both, torch.ones(both.shape[:2], dtype=torch.bool, device=both.device), True)
    name, value = main_tensor(result)
    if not value.is_floating_point() or value.dim() < 2:
        raise ValueError(
            f"model: expected an output of numbers (batch, ..., width), got {value.dtype} "
            f"{tuple(value.shape)}"
        )
    if name == "logits" or (name != "last_hidden_state" and value.shape[-1] in _vocabularies(model)):
        problem = getattr(getattr(model, "config", None), "problem_type", None)
        if value.shape[-1] == 1 or (problem == "regression" and value.dim() == 2):
            return Output(value.flatten(1), None, amounts=True)
        whole = value.dim() == 2
        value = value.unsqueeze(1) if whole else value.flatten(1, -2)
        fits = real is not None and real.shape == value.shape[:2]
        mask = real if fits else torch.ones(value.shape[:2], dtype=torch.bool, device=value.device)
        return Output(value, mask, whole)
    if value.dim() == 2:
        return Output(value, None)
    if value.dim() > 3:  # images: channels first
        return Output(value.flatten(2).mean(2), None)
    if real is None or real.shape != value.shape[:2]:
        return Output(value.mean(1), None)
    weights = real.to(value).unsqueeze(2)
    return Output((value * weights).sum(1) / weights.sum(1).clamp(min=1.0), None)


def main_tensor(result: object) -> tuple[str, Tensor]:
    """The main tensor in what a model returned, and its name if it has one.

    >>> main_tensor((None, torch.ones(2)))
    ('', tensor([1., 1.]))
    """
    if isinstance(result, Tensor):
        return "", result
    if isinstance(result, Mapping):
        for name in ("logits", "last_hidden_state"):
            if isinstance(result.get(name), Tensor):
                return name, result[name]
        result = list(result.values())
    if isinstance(result, tuple | list):
        for item in result:
            if isinstance(item, Tensor):
                return "", item
    raise ValueError(
        f"model: expected a tensor, or one among a tuple or a mapping, as its output, got "
        f"{type(result).__name__}; wrap the model in a module that returns it"
    )


def _vocabularies(model: nn.Module) -> set[int]:
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return {table.num_embeddings for table in tables} - {table.embedding_dim for table in tables}


def output_distance(full: Output, other: Output) -> Tensor:
    """How far each sequence's output is from the full model's: (batch,) in float64.

    >>> full, other = Output(torch.tensor([[3.0, 4.0]]), None), Output(torch.tensor([[4.0, 3.0]]), None)
    >>> output_distance(full, other)                                               # 1 - 24/25
    tensor([0.0400], dtype=torch.float64)
    """
    if full.value.shape != other.value.shape:
        raise ValueError(
            f"model: its output changed from {tuple(full.value.shape)} to {tuple(other.value.shape)} when a "
            "head was silenced; expected the same shape"
        )
    if full.amounts:
        return (in_float64(full.value) - in_float64(other.value)).pow(2).sum(-1) / 2
    if full.real is None:
        a, b = (nn.functional.normalize(in_float64(output.value), dim=-1) for output in (full, other))
        return (a - b).pow(2).sum(-1) / 2
    rows = zip(full.value, other.value, full.real, strict=True)
    return torch.stack([_divergence(a[real], b[real]).mean() for a, b, real in rows])


def _divergence(full: Tensor, other: Tensor) -> Tensor:
    """KL(full || other) of logits (tokens, classes) in float64 (tokens,).

    With the change of the logits centred under p, KL = log sum p exp(change) = log1p(sum p (exp(change) - 1
    - change)): a sum of numbers of one sign, so small divergences keep their digits in float32.
    """
    dtype = torch.promote_types(full.dtype, torch.float32)
    p = full.to(dtype).softmax(-1)
    change = torch.where(p > 0, other.to(dtype) - full.to(dtype), 0.0)
    change = change - (p * change).sum(-1, keepdim=True)
    return in_float64((p * (torch.expm1(change) - change)).sum(-1)).log1p()


# Logits whose probabilities are computed together: those of all tokens would take more than the model's pass.
_TOGETHER = 2**22


def _score_of_drawn(logits: Tensor, drawn: Tensor, weights: Tensor) -> Tensor:
    """The gradient of log p of a class drawn for each token by its number (batch, tokens, 1), weighted."""
    result = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)  # contiguous
    rows = max(1, _TOGETHER // logits.shape[-1])
    parts = (x.flatten(0, 1).split(rows) for x in (logits, result, drawn, weights))
    for value, out, number, weight in zip(*parts, strict=True):
        p = value.to(drawn.dtype).softmax(-1)
        below = p.cumsum(-1)
        chosen = torch.searchsorted(below, number * below[..., -1:]).clamp(max=p.shape[-1] - 1)
        out.copy_(p.mul_(-weight).scatter_add_(-1, chosen, weight))
    return result


def directions(output: Output, generator: torch.Generator, number: int = 1) -> Iterator[Tensor]:
    """Random gradients for the output, shaped like its value, such that half the square of what each finds is
    on average the `output_distance` that a small change makes.

    For logits: log p of tokens drawn from the model's own distribution p, the direction whose square has the
    Fisher information as its mean. For embeddings: a normal direction in the tangent space of the sphere. For
    amounts: random signs.

    >>> next(directions(Output(torch.tensor([[3.0, 0.0]]), None), torch.Generator().manual_seed(0)))
    tensor([[ 0.0000, -0.0978]])
    """
    value = output.value.detach()
    dtype = torch.promote_types(value.dtype, torch.float32)
    if output.amounts:
        for _ in range(number):
            signs = torch.randint(2, value.shape, generator=generator) * 2 - 1
            yield signs.to(value)
        return
    if output.real is None:
        length: Tensor = torch.linalg.vector_norm(value, dim=-1, keepdim=True, dtype=dtype)
        along = value.to(dtype) / length
        for _ in range(number):
            drawn = torch.randn(value.shape, generator=generator, dtype=dtype).to(value.device)
            tangent = drawn - (drawn * along).sum(-1, keepdim=True) * along
            yield (tangent / length).to(value.dtype)
        return
    weights = output.real.to(dtype) / output.real.sum(1, keepdim=True).clamp(min=1).to(dtype).sqrt()
    for _ in range(number):
        drawn = torch.rand(*value.shape[:2], 1, generator=generator, dtype=dtype).to(value.device)
        yield _score_of_drawn(value, drawn, weights.unsqueeze(-1))
