"""A further run of the probe, with a sequence or a token replaced: which queries and keys of every call
change, and which modules carry something to other tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from manyheads.capture.call import Call
from manyheads.capture.interceptor import Interceptor
from manyheads.capture.mask_reading import find_unmasked
from manyheads.capture.probe_inputs import Inputs, position, replaced, telling_position
from manyheads.capture.probed_call import ProbedCall, shown_digest, softmaxed
from manyheads.capture.proof import Proof
from manyheads.capture.token_mixing import Baseline, Perturbed, row_map
from manyheads.common.preserved_state import seed_generators
from manyheads.common.types import Arguments, Function, Keywords

_CHOICES = {torch.topk, Tensor.topk, torch.sort, Tensor.sort, torch.argsort, Tensor.argsort}
_NAMES = {func.__name__ for func in _CHOICES}
_TOKENS = 5  # that are replaced in turn
Rows = tuple[Tensor, Tensor] | None  # which queries and keys of a call changed


@dataclass
class Second:
    """What a second run shows: for each call the name of its site, and which rows of its queries and keys
    changed."""

    names: list[str] = field(default_factory=list)
    rows: list[Rows] = field(default_factory=list)
    hidden: list[bool] = field(default_factory=list)  # other keys are hidden now
    leaks: set[str] = field(default_factory=set)
    index: tuple[int, int] = (0, 0)  # of what was replaced, and among how many
    replaced: bool = False  # whether anything was
    embeddings: tuple[int, ...] | None = None  # that read other ids now, the model's main ids first


def second_run(
    copied: nn.Module,
    path: str,
    inputs: Inputs,
    proof: Proof,
    records: list[ProbedCall],
    first: Baseline,
    axis: int,
    at: Callable[[int], int] | None = None,
    ids: bool | None = None,
    choices: Choices | None = None,
) -> Second:
    """Run the copy of a model with the sequence (``axis`` 0) or token (1) replaced that ``at`` chooses. With
    ``ids`` whole numbers are replaced, too; unless it is given, where the model takes others. With
    ``choices`` tokens are chosen as in another run.
    """
    if ids is None:
        again = partial(second_run, copied, path, inputs, proof, records, first, axis, at, choices=choices)
        if len({x.is_floating_point() for x in inputs.tensors()}) == 1:
            return again(ids=True)
        try:
            return again(ids=True)
        except Exception:  # whatever it says, it was asked too much
            return again(ids=False)
    at = at or (partial(telling_position, inputs) if axis else position)
    tokens = max((record.call.queries for record in records), default=0)
    other = replaced(inputs, axis, at, ids, first.ids, tokens)
    run = Second(rows=[None] * len(records), hidden=[False] * len(records))
    size = max((x.shape[axis] for x in inputs.tensors() if 1 < x.dim() < 4), default=0) if axis else 0
    if axis and not size:  # images: a pixel
        size = max((x.shape[-1] * x.shape[-2] for x in inputs.tensors() if x.dim() >= 4), default=0)
    if axis and not size:  # no axis of sequences
        size = max((len(x) for x in inputs.tensors() if x.dim() == 1), default=0)
    size = size or inputs.sequences
    asked = {(record.call.queries, record.call.keys) for record in records}
    run.index, run.replaced = (at(size), size), other is not None
    perturbed = Perturbed(first, max(2, size), run.index[0], inputs.sequences, asked)

    def see(call: Call) -> Tensor | None:
        with torch._C.DisableTorchFunction():
            number = len(run.names)
            run.names.append(call.site.name)
            if number >= len(records) or records[number].output.shape != call.output.shape:
                return None
            record, changed = records[number], None
            if (
                record.query is not None
                and call.query is not None
                and call.key is not None
                and record.key is not None
            ):
                changed = run.rows[number] = (
                    _changed_rows(call.query, record.query),
                    _changed_rows(call.key, record.key),
                )
            else:
                changed = run.rows[number] = _changed_in_scores(softmaxed(call), record.scores)
            before = record.call.scores
            if call.scores is not None and before is not None and before.shape == call.scores.shape:
                run.hidden[number] = shown_digest(call.scores) != record.hidden
            kept = record.output.detach()
            if changed is None or changed[0].shape != (kept.shape[0], kept.shape[2]):
                return kept
            return torch.where(
                changed[0][:, None, :, None], call.output, kept
            )  # the replaced token's own row

    probe = other if other is not None else inputs.changed(lambda x: x.detach().clone())
    interceptor = probe_interceptor(copied, see, proof, path)
    interceptor.embedded, interceptor.steps = perturbed.ids, proof.steps
    if choices is not None:
        choices.perturbed, perturbed.one_by_one = perturbed, True
    with choices or nullcontext(), _Reused(first), interceptor, perturbed, torch.no_grad():
        seed_generators(0)
        copied(*probe.args, **probe.kwargs)
    run.leaks = perturbed.leaks if other is not None else set()
    if other is not None and len(perturbed.ids) == len(first.ids):
        pairs = zip(perturbed.ids, first.ids, strict=True)
        run.embeddings = tuple(i for i, (now, then) in enumerate(pairs) if not torch.equal(now, then))
        main = inputs.kwargs.get("input_ids", inputs.args[0] if inputs.args else None)
        if isinstance(main, Tensor):  # other ids beside these are kinds, places or boxes of the same tokens
            run.embeddings = tuple(
                sorted(run.embeddings, key=lambda i: not torch.equal(first.ids[i].flatten(), main.flatten()))
            )
    return run


class Choices(TorchFunctionMode):
    """A context that keeps the indices that `topk` and sorting give. With what one has ``kept``, a further
    run gets the same ones where others would be chosen, and not for the share of what was replaced alone: a
    choice of tokens stays what it was.

    moved: the modules that would have chosen others.
    """

    def __init__(self, kept: list[tuple[Function, Tensor]] | None = None) -> None:
        super().__init__()
        self.kept = kept or []
        self.perturbed: Perturbed | None = None
        self.moved: set[str] = set()
        self._number = 0

    def __torch_function__(
        self, func: Function, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        if func not in _CHOICES:
            return out
        with torch._C.DisableTorchFunction():
            indices = out if isinstance(out, Tensor) else out[1]
            if self.perturbed is None:
                self.kept.append((func, indices.clone()))
                return out
            kept = self.kept[self._number] if self._number < len(self.kept) else None
            self._number += 1
            if kept is None or kept[0] is not func or kept[1].shape != indices.shape:
                return out
            if not _is_moved(indices != kept[1], self.perturbed):
                return out
            self.moved.add(self.perturbed.innermost or "")
            if isinstance(out, Tensor):
                return kept[1].clone()
            dim = _axis_of(func, args, kwargs or {})
            data = args[0] if args else (kwargs or {})["input"]
            return type(out)((data.gather(dim, kept[1]), kept[1].clone()))


def _is_moved(changed: Tensor, perturbed: Perturbed) -> bool:
    """Whether more was chosen otherwise, in some sequence, than the share of what was replaced."""
    by_sequence = changed.dim() > 1 and changed.shape[0] == perturbed.sequences
    parts = changed if by_sequence else [changed]
    return any(bool(part.any()) and not perturbed.is_confined(part) for part in parts)


def _axis_of(func: Function, args: Arguments, kwargs: Keywords) -> int:
    """The axis along which a function chooses."""
    where = 2 if func in (torch.topk, Tensor.topk) else 1
    dim = kwargs.get("dim", args[where] if len(args) > where else -1)
    return dim if isinstance(dim, int) and not isinstance(dim, bool) else -1


class _Reused(TorchFunctionMode):
    """A context in which linear maps compute no row again whose data are those of the first run."""

    def __init__(self, first: Baseline) -> None:
        super().__init__()
        self._waiting = {key: iter(kept) for key, kept in first.products.items()}

    def __torch_function__(
        self, func: Function, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        row = None if kwargs else row_map(func, args)
        kept = None if row is None else next(self._waiting.get(row[0], iter(())), None)
        if row is not None and kept is not None and kept[0].shape == row[1].shape:
            with torch._C.DisableTorchFunction():
                data, (before, result) = row[1], kept
                changed = (data != before).any(-1).flatten().nonzero().flatten()
                if len(changed) * 2 < before.shape[:-1].numel() and data.dtype == before.dtype:
                    out = result.clone(memory_format=torch.contiguous_format)
                    if len(changed):
                        rows = data.flatten(0, -2)[changed]
                        again = [rows if x is data else x for x in args]
                        out.flatten(0, -2)[changed] = func(*again)
                    return out
        return func(*args, **(kwargs or {}))


def token_run(
    copied: nn.Module, path: str, inputs: Inputs, proof: Proof, records: list[ProbedCall], first: Baseline
) -> Second:
    """The run with a token replaced. Where a model chooses tokens by what is in them (`topk`, sorting), a
    replaced one may put all others in other places, which looks as if they had been mixed there, or may not
    be chosen at all, which tells nothing. Then several are replaced in turn, with the choice as it was; the
    modules that would have chosen others are among the leaks.
    """
    run = partial(second_run, copied, path, inputs, proof, records, first, axis=1)
    token = run()
    attending = {record.origin.frame[0] for record in records}
    blamed = token.leaks & attending
    unclear = blamed | (attending - _reached(token, records, least=2))
    choosing = {path for path, names in first.functions.items() if names & _NAMES}
    suspected = token.leaks & choosing
    if not (choosing and (unclear or suspected)):
        return token
    kept = Choices()
    probe = inputs.changed(lambda x: x.detach().clone())
    with kept, torch.no_grad():
        seed_generators(0)
        copied(*probe.args, **probe.kwargs)
    leaks: set[str] = set() if blamed else token.leaks
    for number in range(_TOKENS):
        choices = Choices(kept.kept)
        again = run(at=partial(_another, number), choices=choices)
        if blamed and not number:
            token = again
        first.choosing |= choices.moved
        leaks |= again.leaks | choices.moved
        unclear -= _reached(again, records, least=1)
        suspected -= first.choosing
        if not (unclear or blamed or suspected):
            break
    token.leaks = leaks | (blamed & (unclear | choosing))  # a module's own choices may be what it mixes by
    return token


def is_choosing(path: str, first: Baseline) -> bool:
    """Whether a module, or one that it is in, chooses tokens by what is in them."""
    return any(
        functions & _NAMES and (path == outer or not outer or path.startswith(f"{outer}."))
        for outer, functions in first.functions.items()
    )


def _another(number: int, size: int) -> int:
    """The index of the token that is replaced at each try: the usual one first."""
    return (position(size) + number * max(1, size // _TOKENS)) % size


def _reached(run: Second, records: list[ProbedCall], least: int) -> set[str]:
    """The modules to whose queries or keys what was replaced came, in as many sequences."""
    pairs = ((record.origin.frame[0], rows) for record, rows in zip(records, run.rows, strict=True))
    return {
        path for path, rows in pairs
        if rows is None or len(rows[0]) < least or any(int(part.any(1).sum()) >= least for part in rows)
    }  # fmt: skip


def _changed_rows(now: Tensor, before: Tensor) -> Tensor:
    """Which tokens of (batch, heads, tokens, width) changed, in any sequence and head: (batch, tokens)."""
    if now.shape != before.shape:
        return torch.zeros(now.shape[0], now.shape[2], dtype=torch.bool)
    tiny = 1e-5 * float(before.abs().max().nan_to_num(1.0)) if before.numel() else 0.0
    return ((now - before).abs() > tiny).any(3).any(1)


def _changed_in_scores(now: Tensor | None, before: Tensor | None) -> Rows:
    """Which queries and keys changed, by scores that are no product of queries and keys: a query changes its
    row, a key one number in the rows of others.
    """
    if now is None or before is None or now.shape != before.shape:
        return None
    visible = find_unmasked(before)
    tiny = (
        1e-5 * float(before.masked_fill(~visible, 0.0).abs().max().nan_to_num(1.0)) if before.numel() else 0.0
    )
    changed = (((now - before).abs() > tiny) & visible).any(1)
    queries = changed.sum(2) * 2 > visible.any(1).sum(2).clamp(min=2)
    others = changed & ~queries.unsqueeze(2)
    whole = queries.all(1, keepdim=True)  # no other query tells which keys are new
    return queries, torch.where(whole, changed.any(1), others.any(1))


def probe_interceptor(
    copied: nn.Module, see: Callable[[Call], Tensor | None], proof: Proof, path: str
) -> Interceptor:
    """What sees the calls of a probe; whose sequence is whose does not matter here."""
    interceptor = Interceptor(copied, see, parts=True, proof=proof, prefix=path)
    interceptor.follows_streams, interceptor.probing = False, True
    return interceptor
