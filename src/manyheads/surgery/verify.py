"""Checking a changed model against the expected one: the model before, with the removed heads silent."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from manyheads.common.compare_outputs import (
    TOLERANCE,
    Captured,
    relative_difference,
    seeded_evaluation,
    tensors,
    tolerance,
)
from manyheads.common.errors import FailedChangeError
from manyheads.common.nested_tensors import map_tensors
from manyheads.common.run_batch import run
from manyheads.common.types import Arguments, Batch, Keywords
from manyheads.heads.silence import silence
from manyheads.models.no_heads import NoHeads
from manyheads.models.per_head_inputs import arguments
from manyheads.models.torch_attention import TorchAttention
from manyheads.nn.transformers import Decoder, Seq2Seq
from manyheads.surgery.arrangement import Arrangement

_NOISE = 1e-2  # a difference up to this may be rounding that a deep model made larger
STEPS = 3

Kind = TypeVar("Kind")


def capture(
    model: nn.Module, batch: Batch, removed: Mapping[str, list[int]], paths: Iterable[str]
) -> tuple[dict[str, list[Captured]], object]:
    """The inputs and outputs of the modules at these paths, call by call, while the heads are silenced, and
    the output of the model.
    """
    captured: dict[str, list[Captured]] = {path: [] for path in paths}
    copies = _Copies()
    returned: dict[int, tuple[str, Tensor]] = {}  # what modules gave, and which first
    with ExitStack() as stack:
        for path, calls in captured.items():

            def before(
                _: nn.Module, args: Arguments, kwargs: Keywords, calls: list[Captured] = calls
            ) -> None:
                producers = {
                    argument: returned[id(value)][0]
                    for argument, value in arguments(args, kwargs)
                    if id(value) in returned
                }
                calls.append(Captured(*copies.of((args, kwargs)), producers=producers))

            def after(
                _: nn.Module, args: object, output: object, path: str = path, calls: list[Captured] = calls
            ) -> None:
                calls[-1].output = output
                for _name, tensor in tensors(output):
                    returned.setdefault(id(tensor), (path, tensor))

            module = model.get_submodule(path)
            hook = module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
            stack.callback(hook.remove)
            stack.callback(module.register_forward_hook(after).remove)
        with seeded_evaluation(model), silence(model, removed, unverified="allow"):
            output = run(model, batch)
    return captured, output


class _Copies:
    """Copies of arguments in which a tensor that comes again, unchanged, is the same copy: every layer gets
    the mask, and the cache with the keys of all layers before it.
    """

    def __init__(self) -> None:
        self._copied: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}

    def of(self, value: Kind) -> Kind:
        memo: dict[int, Any] = {
            key: tensor
            for key, (original, version, tensor) in self._copied.items()
            if (alive := original()) is not None and alive._version == version
        }
        value = copy.deepcopy(value, memo)
        for original in memo.get(id(memo), ()):  # what deepcopy keeps alive: all that it has copied
            if isinstance(original, Tensor) and not original.is_inference():  # those have no version
                self._copied[id(original)] = weakref.ref(original), original._version, memo[id(original)]
        return value


def verify(
    model: nn.Module, changed: nn.Module, batch: Batch, arrangement: Arrangement, modules: Iterable[str]
) -> None:
    """Raise unless the changed model's output is the expected one, also when it generates.

    modules: paths inside which the two may differ.
    """
    verify_output(model, changed, batch, arrangement, modules)
    allowed = tolerance(model)
    off = _agreed(_apart_writing, model, changed, batch, arrangement.removed)
    if off > allowed:
        raise FailedChangeError(
            f"{arrangement.verb}: generating with the cache, {arrangement.result} differs from "
            f"{arrangement.expected} by {off:.2g} (allowed: {allowed:.0e}); nothing was changed"
        )


def verify_output(
    model: nn.Module,
    changed: nn.Module,
    batch: Batch,
    arrangement: Arrangement,
    modules: Iterable[str],
    expected: object = None,
) -> None:
    """Raise unless the changed model's output on a batch is the expected one.

    expected: that output, where it is at hand.
    """
    allowed = tolerance(model)
    if expected is not None:
        with seeded_evaluation(changed):
            actual = run(changed, batch)
        if (
            relative_difference(compared_output(changed, expected), compared_output(changed, actual))
            <= allowed
        ):
            return
    off = _agreed(_apart, model, changed, batch, arrangement.removed)
    if off > allowed:
        where = first_difference(model, changed, batch, arrangement.removed, tuple(modules), allowed)
        raise FailedChangeError(
            f"{arrangement.verb}: {arrangement.result} differs from {arrangement.expected} by {off:.2g} "
            f"(allowed: {allowed:.0e}), first at {where}; nothing was changed"
        )


def _agreed(
    apart: Callable[..., float],
    model: nn.Module,
    cut: nn.Module,
    batch: Batch,
    removed: Mapping[str, list[int]],
) -> float:
    """The difference between two models; 0 where float64 shows that it is only rounding."""
    off, allowed = apart(model, cut, batch, removed), tolerance(model)
    if allowed < off < _NOISE and allowed == TOLERANCE[torch.float32]:
        exact = [copy.deepcopy(each).double() for each in (model, cut)]
        if apart(*exact, map_tensors(_double, batch), removed) <= TOLERANCE[torch.float64]:
            return 0.0
    return off


def _double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def _apart(model: nn.Module, cut: nn.Module, batch: Batch, removed: Mapping[str, list[int]]) -> float:
    with seeded_evaluation(model), silence(model, removed, unverified="allow"):
        expected = run(model, batch)
    with seeded_evaluation(cut):
        actual = run(cut, batch)
    return relative_difference(compared_output(cut, expected), compared_output(cut, actual))


def compared_output(module: nn.Module, output: object) -> object:
    """The part of a module's output that must not change: torch's attention also returns mean weights."""
    if isinstance(module, TorchAttention | NoHeads) and isinstance(output, tuple):
        return output[0]
    return output


def _apart_writing(model: nn.Module, cut: nn.Module, batch: Batch, removed: Mapping[str, list[int]]) -> float:
    """The same for a few tokens that are generated with the cache."""
    try:
        with seeded_evaluation(model), silence(model, removed, unverified="allow"):
            expected = generated_logits(model, batch)
    except Exception:  # the model before does not write from this either
        return 0.0
    if expected is None:
        return 0.0
    with seeded_evaluation(cut):
        actual = generated_logits(cut, batch)
    assert actual is not None
    off = 0.0
    for a, b in zip(expected, actual, strict=False):
        off = max(off, relative_difference(a, b))
        if not torch.equal(a.argmax(-1), b.argmax(-1)):
            break  # a tie: from here on they say different things
    return off


def first_difference(
    model: nn.Module,
    cut: nn.Module,
    batch: Batch,
    removed: Mapping[str, list[int]],
    modules: tuple[str, ...],
    allowed: float,
) -> str:
    """The path of the first module, in the order in which they end, whose output differs."""
    inside = tuple(f"{path}." for path in modules)
    paths = [path for path, _ in cut.named_modules() if not path.startswith(inside)]
    expected = _outputs(model, batch, paths, removed)
    actual = _outputs(cut, batch, paths, None)
    for path, outputs in actual.items():
        for ours, theirs in zip(outputs, expected.get(path, []), strict=False):
            if relative_difference(theirs, ours) > allowed and any(True for _ in tensors(theirs)):
                return repr(path) if path else "the model's own output"
    return "a module that could not be found"


def _outputs(
    model: nn.Module, batch: Batch, paths: list[str], removed: Mapping[str, list[int]] | None
) -> dict[str, list[object]]:
    outputs: dict[str, list[object]] = {}
    with ExitStack() as stack:
        for path in paths:

            def after(_: nn.Module, args: object, output: object, path: str = path) -> None:
                outputs.setdefault(path, []).append(output)

            stack.callback(model.get_submodule(path).register_forward_hook(after).remove)
        stack.enter_context(seeded_evaluation(model))
        if removed is not None:
            stack.enter_context(silence(model, removed, unverified="allow"))
        run(model, batch)
    return outputs


def generated_logits(model: nn.Module, batch: Batch) -> list[Tensor] | None:
    """The logits (1, vocabulary) of some tokens that a model generates greedily, with its cache, from the
    first sequence of a batch; None for models that do not generate, or not from this batch.

    >>> model = Decoder(12, heads=3, layers=2, vocabulary=17).eval()
    >>> [tuple(logits.shape) for logits in generated_logits(model, torch.randint(17, (2, 5)))]
    [(1, 17), (1, 17), (1, 17)]
    """
    with torch.no_grad():
        if isinstance(model, Decoder | Seq2Seq):
            return _ours(model, batch)
        can_generate = getattr(model, "can_generate", None)
        if isinstance(batch, Mapping) and callable(can_generate) and can_generate():
            return _theirs(model, batch)
    return None


def _ours(model: Decoder | Seq2Seq, batch: Batch) -> list[Tensor] | None:
    source = batch[0] if isinstance(batch, tuple | list) else batch
    if not isinstance(source, Tensor) or (isinstance(model, Seq2Seq) and model.decoder.embedding is None):
        return None
    if isinstance(model, Seq2Seq):
        decoder, ids = model.decoder, torch.zeros(1, 1, dtype=torch.long, device=source.device)
        cache = decoder.new_cache(STEPS, model.encoder(source[:1]))
    else:
        if model.embedding is None or getattr(model.blocks[0], "cross_attention", None) is not None:
            return None
        decoder, ids = model, source[:1]
        if decoder.max_length is not None:
            ids = ids[:, : decoder.max_length - STEPS + 1]
        cache = decoder.new_cache(ids.shape[1] + STEPS - 1)
    logits = []
    for _ in range(STEPS):
        logits.append(decoder(ids, cache=cache, last=True)[:, -1])
        ids = logits[-1].argmax(-1, keepdim=True)
    return logits


def _theirs(model: Any, batch: Mapping[str, Any]) -> list[Tensor] | None:
    inputs = {  # one sequence: padding on the right is no start for generation
        name: value[:1] if isinstance(value, Tensor) else value
        for name, value in batch.items()
        if not name.startswith("decoder_")
    }
    result = model.generate(
        **inputs, max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False, num_beams=1, use_cache=True,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return list(result.logits)
