"""roles: what each head of a model does, found by running the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from manyheads.capture.call import Call, measuring
from manyheads.capture.interceptor import Interceptor
from manyheads.capture.mask_reading import update_site, visible, without_dead_rows
from manyheads.common import plugins
from manyheads.common.devices import batches_to_device, device_of, in_float64
from manyheads.common.errors import describe_error, first_line
from manyheads.common.interrupts import interrupted, interruptible, stop_if_interrupted
from manyheads.common.preserved_state import evaluating
from manyheads.common.progress import Progress, no_progress
from manyheads.common.run_batch import run_heads
from manyheads.common.types import Batch
from manyheads.heads.fingerprint import fingerprint
from manyheads.heads.roles import probe_texts, word_alignment
from manyheads.heads.roles.attention_rows import Facts, Rows, tiles_of_rows
from manyheads.heads.roles.direct_logits import lens
from manyheads.heads.roles.judge import LEAST
from manyheads.heads.roles.probe_texts import BatchFacts, separators
from manyheads.heads.roles.role import ROLES, Cases, Role
from manyheads.heads.roles.role_cases import READING, RoleCases, in_order
from manyheads.heads.roles.treebank import read
from manyheads.heads.table import HeadTable
from manyheads.heads.watch import labels_of
from manyheads.heads.watch import rows_of as table_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def roles(
    model: nn.Module,
    batches: Iterable[Batch],
    treebank: str | PathLike[str] | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    only: Sequence[str] | None = None,
    least: int = LEAST,
    context: int = probe_texts.TEXT,
    progress: Progress = no_progress,
) -> HeadTable:
    """What each head of a model does: its roles, each with the score, the baseline and the number of cases.

    Parameters
    ----------
    model: any torch.nn.Module. It runs in eval mode, without gradients.
    batches: dicts (passed by name), tuples (passed in order) or tensors, as the model takes them. Batches of
        token ids also show how to feed it synthetic input: repeated random tokens, a planted key.
    treebank: a CoNLL-U file, for the syntactic role; needs the tokenizer.
    tokenizer: the model's, of transformers: says which tokens are special, punctuation or part of a word.
    only: names of roles; all by default.
    least: with fewer cases than this, nothing is claimed.
    context: the tokens of the texts in which a key is planted, for the role retrieval.
    progress: called with what is read and how many of its batches are done.

    Ctrl-C ends the reading after the current batch; roles are then judged on what was read.

    Returns
    -------
    A HeadTable. Text columns: ``roles``, ``evidence``, and ``not_judged``, what could not be said and why.
    Columns ``<role>_score``, ``<role>_baseline`` and, where the score is the share of largest weights,
    ``<role>_weight``, with ``<role>:<variant>`` for offsets and relations; ``table.sums[column][0]`` is the
    number of cases. Claims need ``least`` cases, and must hold two standard errors to either side.

    See Also
    --------
    watch: the numbers behind some roles.
    plan: can protect the heads of a role.

    References
    ----------
    Clark, Khandelwal, Levy, Manning, "What does BERT look at?" (2019).
    Voita, Talbot, Moiseev, Sennrich, Titov, "Analyzing multi-head self-attention" (2019).
    Olsson and others, "In-context learning and induction heads" (2022).
    Xiao, Tian, Chen, Han, Lewis, "Efficient streaming language models with attention sinks" (2023).
    Wu, Wang, Xiao, Peng, Fu, "Retrieval head mechanistically explains long-context factuality" (2024).

    Examples
    --------
    >>> layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, batch_first=True)
    >>> model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    >>> table = roles(model, [torch.randn(5, 31, 8)], only=["broad", "rare"])
    >>> table["roles"], table["broad_score"].shape
    (['broad', 'broad', 'broad', 'broad'], torch.Size([4]))
    >>> table["not_judged"][0]
    'rare: the batches hold no token ids'
    """
    if isinstance(least, bool) or not isinstance(least, int) or least < 2:
        raise ValueError(f"least: expected a whole number, 2 or more, got {least!r}")
    cases = count_cases(
        model, batches, treebank, tokenizer=tokenizer, only=only, context=context, progress=progress
    )
    if not len(cases.table):
        stop_if_interrupted()
        raise ValueError("model: no attention was seen in it")
    return cases.judged(least)


def count_cases(
    model: nn.Module,
    batches: Iterable[Batch],
    treebank: str | PathLike[str] | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    only: Sequence[str] | None = None,
    context: int = probe_texts.TEXT,
    share: tuple[int, int] = (0, 1),
    progress: Progress = no_progress,
) -> RoleCases:
    """Count the cases of each role, before anything is claimed.

    The arguments are those of `roles`. With ``share``, (number from 0, count), only that part of all batches
    and of all that is made up is read; what is rare, and which tokens are separators, is that of all batches.
    """
    chosen_roles = _chosen(only, treebank)
    batch_list = list(batches_to_device(batches, device_of(model)))
    batch_facts = replace(probe_texts.read_batch_facts(model, batch_list, tokenizer), context=context)
    collected = _Collected(model, progress, share)
    with evaluating(model), torch.no_grad(), interruptible():
        _read_sources(model, batch_facts, batch_list, treebank, tokenizer, chosen_roles, collected)
        return RoleCases(collected.table(), [role.name for role in chosen_roles], collected.left_out)


def _chosen(only: Sequence[str] | None, treebank: str | PathLike[str] | None) -> list[Role]:
    if isinstance(only, str):
        raise TypeError(f"only: expected a list of roles, got the text {only!r}")
    plugins.load("manyheads.roles")  # roles register themselves
    unknown = [name for name in only or [] if name not in ROLES]
    if unknown:
        raise ValueError(
            f"only: there is no role {', '.join(map(repr, unknown))}; there are {', '.join(ROLES)}"
        )
    if only is not None and "syntactic" in only and treebank is None:
        raise ValueError("only: the role 'syntactic' needs a treebank; give treebank=FILE")
    return [role for name, role in ROLES.items() if only is None or name in only]


def _read_sources(
    model: nn.Module,
    batch_facts: BatchFacts,
    batches: list[Batch],
    treebank: str | PathLike[str] | None,
    tokenizer: PreTrainedTokenizerBase | None,
    chosen_roles: list[Role],
    collected: _Collected,
) -> None:
    """Let the model read one source after the other; leave out the roles whose source is not there."""
    by_source = {on: [role for role in chosen_roles if role.on == on] for on in READING}
    if by_source["treebank"] and treebank is not None:  # mistakes in the file first, before any work
        sentences, notes = word_alignment.batches(batch_facts, tokenizer, read(treebank), treebank)
        if notes:
            collected.left_out["syntactic"] = notes
    elif by_source["treebank"]:
        collected.leave_out(by_source["treebank"], "no treebank")
        by_source["treebank"] = []
    if by_source["text"]:
        facts = Facts(
            special=batch_facts.special,
            separators=separators(batch_facts, tokenizer),
            frequencies=batch_facts.frequencies,
        )
        judgeable = collected.judgeable(by_source["text"], facts, batch_facts)
        collected.read("text", judgeable, [(batch, facts) for batch in batches])
    for source, make in (("repeated", probe_texts.repeated), ("planted", probe_texts.planted)):
        roles = by_source[source]
        if roles and not batch_facts.ids:
            collected.leave_out(roles, "the batches hold no token ids")
        elif roles:
            try:
                probes = list(make(batch_facts))
            except ValueError as error:
                collected.leave_out(roles, str(error))
                continue
            if any("lens" in role.needs for role in roles):
                probes = _with_lens(model, batch_facts, probes, roles, collected)
            collected.read(source, collected.judgeable(roles, probes[0][1], batch_facts), probes)
    if by_source["treebank"]:
        collected.read("treebank", by_source["treebank"], sentences)


def _with_lens(
    model: nn.Module,
    batch_facts: BatchFacts,
    probes: list[tuple[Batch, Facts]],
    roles: list[Role],
    collected: _Collected,
) -> list[tuple[Batch, Facts]]:
    try:
        direct = lens(model, batch_facts.batch(batch_facts.ordinary[:14].view(2, 7)), batch_facts.vocabulary)
    except (ValueError, RuntimeError) as error:
        collected.leave_out([role for role in roles if "lens" in role.needs], first_line(error))
        return probes
    return [(batch, replace(facts, lens=direct)) for batch, facts in probes]


class _Collected:
    """The sums of every column, by site, and why roles were left out."""

    def __init__(self, model: nn.Module, progress: Progress, share: tuple[int, int]) -> None:
        self.model = model
        self.share = share
        self.progress = progress
        self.left_out: dict[str, str] = {}
        self._sums: dict[str, dict[str, Tensor]] = {}
        self._tokens: dict[str, Tensor] = {}
        self._roles: list[Role] = []
        self._facts = Facts()
        self._interceptor = Interceptor(model, self._on_call, tokens=True)

    def leave_out(self, roles: Iterable[Role], why: str) -> None:
        """Remember why these roles were not looked for."""
        self.left_out |= {role.name: why for role in roles if role.name not in self.left_out}

    def judgeable(self, roles: list[Role], facts: Facts, batch_facts: BatchFacts) -> list[Role]:
        """The roles that have all they need; the others are left out."""
        lacking = {
            "tokens": "" if batch_facts.ids else "the batches hold no token ids",
            "tokenizer": "" if facts.separators is not None else "no tokenizer",
            "lens": "" if facts.lens is not None else "no vocabulary head",
            "values": "",
        }
        for role in roles:
            for need in sorted(role.needs, reverse=True):
                if lacking[need]:
                    self.leave_out([role], lacking[need])
        return [role for role in roles if role.name not in self.left_out]

    def read(self, source: str, roles: list[Role], probes: Sequence[tuple[Batch, Facts]]) -> None:
        """Let the model read some batches, and count the cases of these roles."""
        if not roles:
            return
        self._roles = roles
        probes = probes[self.share[0] :: self.share[1]]
        reading = READING[source]
        with self._interceptor:
            for number, (batch, self._facts) in enumerate(probes):
                if interrupted():
                    if number == 0:
                        self.leave_out(roles, f"Ctrl-C came before {reading} was read")
                    return
                self.progress(reading, number, len(probes))
                try:
                    run_heads(self.model, batch)
                except (RuntimeError, ValueError, IndexError, TypeError) as error:
                    raise ValueError(
                        f"batches: the model failed while reading {reading} ({describe_error(error)})"
                    ) from error
            self.progress(reading, len(probes), len(probes))

    def _on_call(self, call: Call) -> None:
        if call.again:
            return
        with measuring(call), torch.no_grad():
            call = without_dead_rows(call)
            visibility = visible(call)
            real_queries = update_site(call, visibility)
            foreign = bool(call.site.cross) or not visibility.aligned
            roles = [role for role in self._roles if role.cross or not foreign]
            self._sums.setdefault(call.site.name, {})
            self._tokens.setdefault(call.site.name, torch.zeros(call.site.heads, dtype=torch.float64))
            if roles:
                rows = tiles_of_rows(call, visibility, real_queries, self._facts)
                for part in word_alignment.between_words(rows) if self._facts.words is not None else rows:
                    self._count(part, roles)

    def _count(self, rows: Rows, roles: list[Role]) -> None:
        self._tokens[rows.site.name][rows.heads] += rows.counted.sum((0, 2)).cpu()
        for role in roles:
            if _lacks(role, rows):
                continue
            cases = role.find(rows)
            for variant, case in [("", cases)] if isinstance(cases, Cases) else cases.items():
                name = f"{role.name}:{variant}" if variant else role.name
                self._add(rows, f"{name}_score", case.score, case.counted)
                self._add(rows, f"{name}_baseline", case.baseline, case.counted)
                if case.weight is not None:
                    self._add(rows, f"{name}_weight", case.weight, case.counted)

    def _add(self, rows: Rows, column: str, values: Tensor, counted: Tensor) -> None:
        shape = rows.weights.shape[:-1]
        x = in_float64(values).expand(shape)
        counted = counted.expand(shape).to(x.device)
        x = x.masked_fill(~counted, 0.0)
        sums = torch.stack((counted.sum((0, 2)), x.sum((0, 2)), x.square().sum((0, 2)))).cpu()
        columns = self._sums[rows.site.name]
        if column not in columns:
            columns[column] = torch.zeros(3, rows.site.heads, dtype=torch.float64)
        columns[column][:, rows.heads] += sums

    def table(self) -> HeadTable:
        """The counts as a table."""
        sites = self._interceptor.measured
        names = in_order(list(dict.fromkeys(name for columns in self._sums.values() for name in columns)))
        nothing = {site.name: torch.zeros(3, site.heads, dtype=torch.float64) for site in sites}
        sums = {
            name: torch.cat([self._sums[site.name].get(name, nothing[site.name]) for site in sites], 1)
            for name in names
        }
        tokens = torch.cat([torch.zeros(0), *(self._tokens[site.name] for site in sites)])
        rows = table_rows(self.model, sites)
        return HeadTable(rows, tokens, sums, fingerprint(self.model), labels=labels_of(sites))


def _lacks(role: Role, rows: Rows) -> bool:
    """Whether a call does not show what the role needs."""
    return (
        ("tokens" in role.needs and rows.tokens is None)
        or ("values" in role.needs and rows.value_norm is None)
        or ("lens" in role.needs and rows.site.name not in getattr(rows.facts.lens, "matrices", {}))
        or ("lens" in role.needs and rows.site.kind != "causal")
    )
