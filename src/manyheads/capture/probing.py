"""Find out what the sites of a model are, on a small probe, by dependence and not by custom.

Three runs of a copy of the model that shares its weights:

1. with every product with weights marked (`dependence`): each attention call is differentiated
   (`probed_call`), which shows its heads (`head_axes`), whether its keys are tokens, what reads its output;
   its output is computed again from what was taken for its weights and values;
2. and 3. with one sequence, and one token, replaced, while attention gives all others what it gave them in
   the first run: what still changes at other tokens got there in a way that was not seen (`token_mixing`).

What was taken wrongly by custom is put right by what was found, and the first run is repeated to see that it
holds.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from manyheads.capture import proof as proofs
from manyheads.capture.axes import Roles
from manyheads.capture.call import Call
from manyheads.capture.call_rows import is_fine
from manyheads.capture.dependence import Marks
from manyheads.capture.interceptor import module_paths
from manyheads.capture.probe_conditions import WithoutDropout, message_when_slow, undisturbed
from manyheads.capture.probe_inputs import LONGER, Inputs, candidate_batches, structure_copy
from manyheads.capture.probed_call import NOTHING_TELLS, ProbedCall, record_call
from manyheads.capture.proof import ForwardCall, Proof, SiteProof, Step
from manyheads.capture.second_run import Rows, is_choosing, probe_interceptor, second_run, token_run
from manyheads.capture.token_mixing import Baseline, is_beside_attention, reasons
from manyheads.common.errors import describe_error
from manyheads.common.preserved_state import seed_generators

_TRIES = 3  # first runs until custom and proof agree
_ALSO_READ = (
    "more than attention's output flows into what reads this head (a norm, a convolution, a residual): "
    "silence makes zero what attention gives, which is not the same as zeroing the columns that read it"
)
_BY_CONTENT = "its tokens are put in an order that depends on what is in them"
_AGAIN = (
    "its weights multiply further values, or what they gave, once more: the table has each weight once, and "
    "output_norm is that of the first values"
)
_SEQUENCES = (
    "its keys are the sequences of the batch, not the tokens of one: its numbers depend on what is in a "
    "batch together, and self, previous, next, first and distance count sequences"
)
_OTHER_SEQUENCES = (
    "the keys of a sequence come from another sequence of the batch: its numbers depend on what is in a "
    "batch together"
)


def prove(forward: ForwardCall, step: Step | None = None) -> Proof:
    """What can be proved of the sites of a model that is about to run; with ``step``, by the shortest probe
    in which that happens (`Interceptor.reach`).
    """
    module, path, called = forward.module, forward.path, forward.inputs
    unfit = _unfit(module, called)
    if unfit:
        return Proof(failed=unfit)
    with undisturbed(module), message_when_slow():
        try:
            module = getattr(module, "_orig_mod", module)
            copied = structure_copy(module)
            try:
                return _prove(copied, path, called, step)
            except Exception:
                if step is None or not any(part.training for part in module.modules()):
                    raise
            for part, original in zip(copied.modules(), module.modules(), strict=True):
                part.training = original.training  # it may be the code path of training
            with WithoutDropout():
                return _prove(copied, path, called, step)
        except Exception as error:
            return Proof(failed=f"the probe failed ({describe_error(error)})")


def _unfit(module: nn.Module, called: Inputs) -> str:
    """Why a model cannot be probed, or nothing."""
    tensors = [*called.tensors(), *module.parameters()]
    if any(x.device.type == "meta" for x in tensors):
        return "tensors on the meta device hold no numbers to probe with"
    if any(x.is_nested for x in tensors):
        return "nested tensors cannot be probed"
    if any(_stands_for_another(x) for x in tensors):
        return "it runs on tensors that stand for others (torch.func, fake or traced tensors)"
    return ""


def _stands_for_another(x: Tensor) -> bool:
    wrapped: bool = torch._C._functorch.is_functorch_wrapped_tensor(x)
    return wrapped or type(x).__module__.startswith("torch._subclasses")


def _prove(copied: nn.Module, path: str, called: Inputs, step: Step | None) -> Proof:
    problem: Exception | None = None
    for inputs in candidate_batches(called) if step is None else candidate_batches(called, LONGER):
        try:
            if step is None or step in _steps(copied, path, inputs):
                return _proof(copied, path, inputs)
        except Exception as error:
            problem = problem or error
    raise problem or ValueError("it does something else each time it is run")


def _steps(copied: nn.Module, path: str, inputs: Inputs) -> set[Step]:
    """What happens when the copy runs on these inputs."""
    interceptor = probe_interceptor(copied, lambda call: None, Proof(), path)
    interceptor.steps = set()
    probe = inputs.changed(lambda x: x.detach().clone())
    with interceptor, torch.no_grad():
        seed_generators(0)
        copied(*probe.args, **probe.kwargs)
    return interceptor.steps


def _proof(copied: nn.Module, path: str, inputs: Inputs) -> Proof:
    proof = Proof(length=inputs.length)
    for _ in range(_TRIES):
        records, first = _first_run(copied, path, inputs, proof)
        if records and all(record.problem == NOTHING_TELLS for record in records):
            records, first = _first_run(copied, path, inputs, proof, forced=True)
        if not _put_right(proof, records):
            break
    _keep(proof, records)
    proof.rejected |= {(r.origin.frame[0], r.origin.number) for r in records if not r.tokens}
    records = [record for record in records if record.tokens]
    _loops(proof, records)
    _second_runs(copied, path, inputs, proof, records, first)
    return proof


def _first_run(
    copied: nn.Module, path: str, inputs: Inputs, proof: Proof, forced: bool = False
) -> tuple[list[ProbedCall], Baseline]:
    """Run the copy with everything marked."""
    records: list[ProbedCall] = []
    first = Baseline(copied, module_paths(copied, path))
    marks = Marks([*copied.parameters(), *copied.buffers()], first.see, first.keep, forced)
    with marks:

        def see(call: Call) -> Tensor:
            with torch._C.DisableTorchFunction(), torch.enable_grad():
                record = record_call(call, marks)
                records.append(record)
                written: Tensor = record.output.clone()  # the model may write to it
                return marks.follow(written)

        probe = inputs.changed(lambda x: _leaf(x, marks))
        interceptor = probe_interceptor(copied, see, proof, path)
        interceptor.embedded = first.ids
        with interceptor, first, torch.enable_grad():
            seed_generators(0)  # a model that draws numbers draws the same in every run
            copied(*probe.args, **probe.kwargs)
    for record in records:
        record.readers = marks.readers.get(id(record.output), [])
    return records, first


def _leaf(x: Tensor, marks: Marks) -> Tensor:
    return marks.leaf(x, (-1,), ()) if x.is_floating_point() and x.dim() > 1 else x.detach().clone()


def _put_right(proof: Proof, records: list[ProbedCall]) -> bool:
    """Overrule custom where the weights show something else; whether there was anything new."""
    wanted: dict[proofs.Key, set[tuple[Roles, int]]] = {}
    for record in records:
        if record.wanted is not None:
            wanted.setdefault(record.origin.key, set()).add(record.wanted)
    fresh = {key: next(iter(roles)) for key, roles in wanted.items() if len(roles) == 1}
    fresh = {key: roles for key, roles in fresh.items() if proof.roles.get(key) != roles}
    proof.roles |= fresh
    return bool(fresh)


def _keep(proof: Proof, records: list[ProbedCall]) -> None:
    """Keep what custom got right by looking at sizes, which may be others in the next batch."""
    kept: dict[proofs.Key, set[tuple[Roles, int]]] = {}
    for record in records:
        origin = record.origin
        if record.tokens and not (
            record.problem or record.wanted or record.call.again or "h" in origin.result[1:2]
        ):
            if origin.heads == 1 < record.call.output.shape[1] and "n" in origin.result:
                continue  # the model unfolds its heads later, which shows how many there are
            single = origin.heads == 1 and "n" in origin.result
            roles = tuple("b" if single and role == "n" else role for role in origin.result)
            kept.setdefault(origin.key, set()).add((roles, origin.heads))
    proof.roles |= {
        key: next(iter(roles)) for key, roles in kept.items() if len(roles) == 1 and key not in proof.roles
    }


def _loops(proof: Proof, records: list[ProbedCall]) -> None:
    """Find modules that make several calls for one site: for pieces of the batch, or for some heads each."""
    by_run: dict[tuple[str, int], list[ProbedCall]] = {}
    for record in records:
        if not record.call.again:
            by_run.setdefault(record.origin.frame, []).append(record)
    for (path, _), calls in by_run.items():
        if len(calls) < 2 or path in proof.cycles:
            continue
        cycle = _cycle(calls)
        if cycle:
            proof.cycles[path] = cycle
            proof.heads[path] = sum(record.call.output.shape[1] for record in calls[:cycle])
            continue
        for record in calls:
            alike = (other for other in calls if other.origin.key == record.origin.key)
            again = [other for other in alike if other is not record and record.rows & other.rows]
            if any(record.rows != other.rows or not _same_queries(record, other) for other in again):
                record.problem = (
                    record.problem or "it is called several times for the same heads, in no plain order"
                )


def _cycle(calls: list[ProbedCall]) -> int:
    """After how many of these calls of one module the same heads come again; 0 when each is a site of its
    own."""
    sequence = [(record.rows, record.origin.key) for record in calls]  # the same code, for other tokens
    cycle = sequence.index(sequence[0], 1) if sequence[0] in sequence[1:] else len(calls)
    if any(key != sequence[i % cycle] for i, key in enumerate(sequence)) or not all(r.rows for r in calls):
        return 0
    for number, record in enumerate(calls):  # the same heads again must be for other tokens
        earlier = calls[number % cycle : number : cycle]
        if any(record.data & other.data or _same_queries(record, other) for other in earlier):
            return 0
    if cycle == 1:
        return 1
    heads = calls[:cycle]
    shapes = {(*r.call.output.shape[1:], r.call.keys) for r in heads}
    distinct = len(frozenset().union(*(r.rows for r in heads))) == sum(len(r.rows) for r in heads)
    return 0 if len(shapes) > 1 or not distinct else cycle


def _look_at_pieces(proof: Proof, names: list[str], records: list[ProbedCall], token: list[Rows]) -> None:
    """Whether pieces of a site's queries come one after the other, and read nothing that comes after them."""
    for name, site in proof.sites.items():
        if site.scattered:
            numbers = [number for number, other in enumerate(names) if other == name]
            reached, asked, causal = 0, 0, True
            replaced_queries: set[int] = set()
            replaced_keys: set[int] = set()
            for number in numbers:
                piece, rows = records[number], token[number]
                if rows is not None:
                    replaced_queries |= {asked + i for i in rows[0].any(0).nonzero().flatten().tolist()}
                    replaced_keys |= set(rows[1].any(0).nonzero().flatten().tolist())
                asked += piece.call.queries
                last = piece.reads.any(0).nonzero()
                reached = max(reached, int(last[-1]) + 1 if last.numel() else 0)
                causal &= reached <= asked
            site.causal = causal and asked > 1
            site.in_order = len(replaced_queries) == 1 and replaced_queries == replaced_keys


def _same_queries(first: ProbedCall, second: ProbedCall) -> bool:
    """Whether two calls have the same queries: for other masks, or other keys."""
    if first.query is None or second.query is None:
        return bool(first.data & second.data)
    return first.query.shape == second.query.shape and torch.equal(first.query, second.query)


def _second_runs(
    copied: nn.Module, path: str, inputs: Inputs, proof: Proof, records: list[ProbedCall], first: Baseline
) -> None:
    """Run the copy with a sequence and with a token replaced: what changes where, and what it is called."""
    sequence = second_run(copied, path, inputs, proof, records, first, axis=0)
    token = token_run(copied, path, inputs, proof, records, first)
    names = token.names or sequence.names
    unplaced = token.replaced and any(map(_reads_more, records, token.rows))
    ends = [
        second_run(copied, path, inputs, proof, records, first, axis=1, at=at).rows
        for at in (lambda size: 0, lambda size: size - 1) if unplaced
    ]  # fmt: skip
    if len(names) != len(records):
        raise ValueError("it does not make the same attention calls when it is run again")
    for number, (name, record) in enumerate(zip(names, records, strict=True)):
        site = proof.sites.setdefault(name, SiteProof())
        if record.call.again:
            site.notes += [_AGAIN] * (_AGAIN not in site.notes)
            continue
        if record.problem or record.wanted:
            site.verified = False
            site.refuted |= record.problem != NOTHING_TELLS and is_fine(record.call.output)
            site.reason = (
                record.problem or "its heads are not where custom has them, and other calls disagree"
            )
        if not all(record.readers) and _ALSO_READ not in site.notes:
            site.notes.append(_ALSO_READ)
        if _reads_sequences(sequence.rows[number], inputs.sequences):
            site.notes += [_SEQUENCES] * (_SEQUENCES not in site.notes)
        if _are_others(sequence.rows[number]):
            site.other_sequences = True
            site.notes += [_OTHER_SEQUENCES] * (_OTHER_SEQUENCES not in site.notes)
        elif _is_displaced(record, token.rows[number]):
            site.displaced = True
        elif _is_reordered(record, token.rows[number], *token.index):
            site.displaced = site.reordered = True
            if site.verified and is_choosing(record.origin.frame[0], first):
                site.verified, site.reason = False, _BY_CONTENT
        site.key_margins = _key_margins(
            record, sequence.rows[number], token.rows[number], [rows[number] for rows in ends], token.index[1]
        )
        site.memory = _are_learned(record, site.key_margins, token.rows[number])
        path = record.origin.frame[0]
        site.scattered |= (
            proof.cycles.get(path) == 1 and record.call.queries < record.call.keys and not site.memory
        )
        site.content_masks |= sequence.hidden[number]
        site.kv_heads = record.kv_heads
    for name, rows in zip(names, sequence.rows, strict=False):
        if rows is not None and not bool(rows[1].any()):
            proof.sites[name].scattered = False  # its calls are for one sequence each, not for pieces of all
    _look_at_pieces(proof, names, records, token.rows)
    proof.token_embeddings = sequence.embeddings if token.embeddings is None else token.embeddings
    leaks = {*sequence.leaks, *token.leaks}
    proof.missed = reasons(leaks, first, {record.origin.frame[0] for record in records})
    for name, record in zip(names, records, strict=True):
        path = record.origin.frame[0]
        half_seen, site = proof.missed.get(path), proof.sites[name]
        if half_seen is None:
            continue
        if is_beside_attention(path, first):
            site.notes += [half_seen] * (half_seen not in site.notes)
        elif site.verified:
            site.verified, site.reason = False, half_seen


def _reads_more(record: ProbedCall, token: Rows) -> bool:
    """Whether a call reads more tokens than it has queries for, and a token it reads is none of its
    queries."""
    return token is not None and record.call.queries < record.call.keys and not bool(token[0].any())


def _reads_sequences(changed: Rows, sequences: int) -> bool:
    """Whether the keys of a call are the sequences of a batch: the one that was replaced is a key of every
    index, and the only one that changed."""
    if changed is None or sequences < 2 or changed[1].shape[1] != sequences:
        return False
    return bool((changed[1].sum(1) == 1).all()) and len(changed[1].unique(dim=0)) == 1


def _are_others(changed: Rows) -> bool:
    """Whether the sequences whose queries changed are others than those whose keys did."""
    if changed is None or len(changed[0]) != len(changed[1]):
        return False
    queries, keys = (rows.any(1) for rows in changed)
    return bool(queries.any()) and bool(keys.any()) and not bool((queries & keys).any())


def _is_displaced(record: ProbedCall, token: Rows) -> bool:
    """Whether the key of the replaced token does not stand where its query does, nor as far behind it as
    there are more keys."""
    if token is None or len(token[0]) != len(token[1]):
        return False
    queries, keys = token
    alone = (queries.sum(1) == 1) & (keys.sum(1) == 1)
    behind = keys.int().argmax(1) - queries.int().argmax(1)
    extra = max(0, record.call.keys - record.call.queries)
    return bool((alone & ((behind < 0) | (behind > extra))).any())


def _is_reordered(record: ProbedCall, token: Rows, index: int, size: int) -> bool:
    """Whether the replaced token is the query of another index: one more where a token stands in front, and
    the last one is left out."""
    if token is None or record.call.blocked or record.call.queries != size:
        return False
    queries = token[0].any(0).nonzero().flatten().tolist()
    return len(queries) == 1 and queries[0] not in (index, index + 1)


def _key_margins(
    record: ProbedCall, sequence: Rows, token: Rows, ends: list[Rows], size: int
) -> tuple[int, int | None] | None:
    """How many keys stand before and after those of the queries themselves; None when unknown.

    Where the queries are some of the tokens that are read, as in class attention, what stands after is not
    known. ``ends``: what changed with the first and the last token, where those of ``token`` are no queries;
    ``size``: how many tokens there are.
    """
    if token is None or sequence is None or record.call.blocked:
        return None
    extra = record.call.keys - record.call.queries
    before = _offset(token)
    if before is not None:
        return (before, extra - before) if 0 <= before <= extra else None
    if bool(token[0].any()) or extra <= 0:
        return None
    offsets = [None if rows is None else _offset(rows) for rows in ends]
    if offsets and record.call.queries == 1:
        if offsets[0] is not None and 0 <= offsets[0] <= extra:
            return offsets[0], None
        if offsets[1] is not None:
            return extra, 0
        if bool(token[1].any()) and record.call.keys == size:
            return 0, None  # neither the first nor the last token asks
    steady = (~sequence[1].any(0)).nonzero().flatten().tolist()
    if not bool(sequence[0].any()) and len(steady) == record.call.queries:
        return steady[0], None  # the only tokens that come from no input are the queries
    return None


def _offset(changed: tuple[Tensor, Tensor]) -> int | None:
    """How far the key of the replaced token stands behind its query."""
    queries, keys = (rows.any(0).nonzero().flatten().tolist() for rows in changed)
    return int(keys[0] - queries[0]) if len(queries) == len(keys) == 1 else None


def _are_learned(record: ProbedCall, margins: tuple[int, int | None] | None, token: Rows) -> bool:
    """Whether the keys before and after those of the queries are the same for every sequence, as parameters
    are."""
    if (
        margins is None
        or margins[1] is None
        or not margins[0] + margins[1]
        or record.key is None
        or record.key.shape[0] < 2
    ):
        return False
    keys = record.key.shape[2]
    real = [] if token is None else token[0].any(0).nonzero().flatten().tolist()  # others may be padding
    reads = record.reads[real] if real else record.reads
    if not bool(torch.cat([reads[:, : margins[0]], reads[:, keys - margins[1] :]], -1).any()):
        return False  # a cache that is not yet full
    extra = torch.cat([record.key[:, :, : margins[0]], record.key[:, :, keys - margins[1] :]], 2)
    return bool(torch.isclose(extra, extra[:1], rtol=1e-4, atol=1e-6).all())


proofs.register(prove)
