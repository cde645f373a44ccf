"""Proofs: what is known of the sites of a model, and where it is kept.

`prove` (in `probing`) finds it out by running a small probe; `proof_of` does that once for each model and way
of calling it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor, nn

from manyheads.capture.axes import Roles
from manyheads.capture.kernels import registrations
from manyheads.capture.probe_inputs import Inputs
from manyheads.capture.site import Site

Key = tuple[str, str, int]  # the module, the kind of function, the number of axes
Step = tuple[str | int | bool, ...]  # something that happens on a code path of a model (`Interceptor.reach`)

DISPLACED = (
    "its keys stand in another order than its queries, so that self, previous, next, first and distance mean "
    "nothing; queries of padding count"
)
REORDERED = (
    "its tokens stand in another order than in the inputs, so that previous, next, first and distance mean "
    "nothing"
)


@dataclass
class SiteProof:
    """What was proved of one site.

    verified: heads, weights and values are what they were taken for; ``reason`` says why not.
    refuted: they are not, so that its numbers would be wrong; otherwise there was nothing to prove it by.
    notes: what one should know to read its numbers.
    key_margins: how many keys stand before and after those of the queries themselves; ``memory``: they are
        learned.
    scattered: each call has some of the queries, standing somewhere among the keys; ``causal``: none reads
        ahead; ``in_order``: they come in the order of the keys.
    content_masks: which keys are hidden depends on the tokens.
    displaced: the keys stand in another order than the queries, or both in another than the tokens of the
        inputs (``reordered``).
    other_sequences: those of a sequence come from another sequence of the batch.
    kv_heads: the key head that each head reads.
    """

    verified: bool = True
    reason: str = ""
    refuted: bool = False
    notes: list[str] = field(default_factory=list)
    key_margins: tuple[int, int | None] | None = None
    memory: bool = False
    scattered: bool = False
    in_order: bool = False
    causal: bool = False
    content_masks: bool = False
    displaced: bool = False
    reordered: bool = False
    other_sequences: bool = False
    kv_heads: tuple[int, ...] | None = None


@dataclass(eq=False)
class Proof:
    """What was proved of a model.

    roles: what the axes of a function's result are, where custom has it wrong, and the heads in a merged one.
    rejected: products of weights and values that are no attention over tokens: (module, which of its
        products).
    cycles: for modules that make several calls for one site, after how many the same heads come again.
    sites: by name.
    token_embeddings: which embeddings of a forward are those of tokens, the main ones first; None when
        unknown.
    missed: modules that mix tokens in a way that was not seen, and how.
    failed: why nothing could be proved, or nothing.
    length: tokens of the probe.
    steps: what happened in the probe. A run in which something else happens takes another code path, of which
        nothing is proved by it.
    """

    roles: dict[Key, tuple[Roles, int]] = field(default_factory=dict)
    rejected: set[tuple[str, int]] = field(default_factory=set)
    cycles: dict[str, int] = field(default_factory=dict)
    heads: dict[str, int] = field(default_factory=dict)
    sites: dict[str, SiteProof] = field(default_factory=dict)
    token_embeddings: tuple[int, ...] | None = None
    missed: dict[str, str] = field(default_factory=dict)
    failed: str = ""
    length: int = 0
    steps: set[Step] = field(default_factory=set)

    @cached_property
    def attending(self) -> frozenset[str]:
        """The modules that make calls."""
        return frozenset(name.partition("#")[0] for name in self.sites)

    def describe(self, site: Site) -> None:
        """Write to a site what was proved of it. What another proof could not verify, for the code path of
        shorter sequences, say, stays so.
        """
        proved = self.sites.get(site.name)
        before, site.proof = site.proof, self
        if proved is None:
            site.verified, site.reason = False, self.failed or "the probe did not reach it"
            return
        if before is None or site.verified:
            site.verified, site.reason = proved.verified, proved.reason
        site.key_margins, site.in_order = proved.key_margins, proved.in_order
        if proved.kv_heads is not None and len(proved.kv_heads) == site.heads:
            site.kv_heads = proved.kv_heads
        site.refuted |= proved.refuted
        site.causal |= proved.causal
        site.memory, site.scattered, site.content_masks = (
            proved.memory,
            proved.scattered,
            proved.content_masks,
        )
        if proved.other_sequences:
            site.cross = True
        if proved.displaced and not site.cross:
            site.displaced, site.reordered = True, proved.reordered
            site.note(REORDERED if proved.reordered else DISPLACED)
        for note in proved.notes:
            site.note(note)


@dataclass(frozen=True, eq=False)
class ForwardCall:
    """A call of a model, or of a part of it, from outside.

    module: what is called, at ``path`` inside the model.
    structure: that of the module (`structure_of`), where it is at hand.
    """

    model: nn.Module
    module: nn.Module
    path: str
    inputs: Inputs
    structure: int | None = None


Prover = Callable[[ForwardCall, Step | None], Proof]


@dataclass
class _Proofs:
    """The proofs for one way of calling a model, one for each code path that was met."""

    proofs: list[Proof] = field(default_factory=list)
    failures: dict[object, Proof] = field(default_factory=dict)  # by sizes: it may only have been too long
    unreachable: set[Step] = field(default_factory=set)  # steps that no probe came to


_prover: Prover | None = None
_proofs: weakref.WeakKeyDictionary[nn.Module, dict[object, _Proofs]] = weakref.WeakKeyDictionary()
_lock = threading.RLock()
_MOST = 8  # code paths of one model that are proved, and steps that are looked for in vain
_TELLING = 13  # tokens that are enough: of two tokens, a choice of the three largest hides none


def register(prover: Prover) -> None:
    """Say what finds a proof: it runs models, which this module must not know of."""
    global _prover
    _prover = prover


def proof_of(forward: ForwardCall) -> Proof:
    """The proof for a forward that is about to run: of those that there are, the one whose probe is closest
    in length and no longer.
    """
    if _prover is None:
        return Proof(failed="nothing was proved")
    with _lock:
        entry, length = _entry(forward), forward.inputs.length
        shorter = [proof for proof in entry.proofs if proof.length <= max(length, _TELLING)]
        longest = max(shorter or entry.proofs, key=lambda proof: proof.length, default=None)
        if longest is not None and (not longest.length or longest.length >= min(length, _TELLING)):
            return longest
        sizes = tuple(x.shape for x in forward.inputs.tensors())
        if sizes in entry.failures:
            return entry.failures[sizes]
        proof = _prover(forward, None)
        if proof.failed:
            entry.failures[sizes] = proof
        else:
            entry.proofs.append(proof)
    return proof


def proof_reaching(step: Step, forward: ForwardCall) -> Proof | None:
    """The proof for a code path on which ``step`` happens; None where no probe comes to it."""
    if _prover is None:
        return None
    with _lock:
        entry = _entry(forward)
        reached = next((proof for proof in entry.proofs if step in proof.steps), None)
        if reached or step in entry.unreachable or len(entry.proofs) + len(entry.unreachable) > _MOST:
            return reached
        proof = _prover(forward, step)
        if proof.failed:
            entry.unreachable.add(step)
            return None
        proof.steps.add(step)
        entry.proofs.append(proof)
    return proof


def _entry(forward: ForwardCall) -> _Proofs:
    structure = structure_of(forward.module) if forward.structure is None else forward.structure
    # for how many tokens logits are wanted changes nothing before them
    kwargs = {name: value for name, value in forward.inputs.kwargs.items() if name != "logits_to_keep"}
    key = forward.path, structure, _signature((forward.inputs.args, kwargs))
    return _proofs.setdefault(forward.model, {}).setdefault(key, _Proofs())


def forget(model: nn.Module) -> None:
    """Prove again what is known of a model, when it is next run."""
    with _lock:
        _proofs.pop(model, None)


def structure_of(module: nn.Module) -> int:
    """A number that changes when parts of a module are exchanged, its weights get other shapes, or its
    attention is computed in another way.
    """
    config = getattr(module, "config", None)
    kind = getattr(config, "_attn_implementation", None)
    parts = tuple((name, type(part)) for name, part in module.named_modules())
    shapes = tuple(parameter.shape for parameter in module.parameters())
    return hash((kind, parts, shapes, registrations()))


def _signature(value: object) -> object:
    """What kind of arguments these are, whatever their sizes."""
    if isinstance(value, Tensor):
        return value.dim(), value.is_floating_point()
    if isinstance(value, Mapping):
        return tuple((str(name), _signature(item)) for name, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(_signature(item) for item in value)
    return type(value), value if isinstance(value, bool | str) else None
