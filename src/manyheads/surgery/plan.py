"""plan: which heads to remove, by their importance."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal, TypedDict

import torch
from torch import nn

from manyheads.capture.interceptor import Interceptor
from manyheads.capture.site import Selection, Site
from manyheads.common.compare_outputs import seeded_evaluation
from manyheads.common.json_files import read_json
from manyheads.common.labelled_batch import without_labels
from manyheads.common.run_batch import run
from manyheads.common.types import Batch, Heads
from manyheads.common.whole_files import write_whole
from manyheads.heads.fingerprint import check_plan_model, fingerprint
from manyheads.heads.roles.role import ROLES
from manyheads.heads.table import HeadTable
from manyheads.heads.watch import rows_of
from manyheads.models.probe_batch import probe_batch
from manyheads.surgery.leaving_heads import ModuleHeads, WholeGroups, remove_for, remove_least_important
from manyheads.surgery.prices import HeadPrices, check_save, equal_prices

_FORMAT = "manyheads plan"
_VERSION = 1
_MOST = 1_000_000  # heads of a model

Scope = Literal["global", "layer"]


@dataclass(frozen=True, eq=False)
class Plan(Mapping[str, list[int]]):
    """The heads to remove, ``{site: [head numbers]}``, and the model that they are heads of.

    See Also
    --------
    plan: makes one.
    cut, prune: follow one.

    References
    ----------
    Michel, Levy, Neubig, "Are sixteen heads really better than one?" (2019).

    Examples
    --------
    >>> plan = Plan({"h.0.attn": [1]}, {"h.0.attn": 3, "h.1.attn": 3}, model="5e1a")
    >>> dict(plan), plan.removed, plan.keep
    ({'h.0.attn': [1]}, 1, 0.833...)
    """

    heads: dict[str, list[int]]
    sizes: dict[str, int]  # how many heads each site has
    model: str  # fingerprint

    def __getitem__(self, site: str) -> list[int]:
        return self.heads[site]

    def __iter__(self) -> Iterator[str]:
        return iter(self.heads)

    def __len__(self) -> int:
        return len(self.heads)

    def __repr__(self) -> str:
        return f"Plan(remove {self.removed} of {sum(self.sizes.values())} heads: {self.heads})"

    @property
    def removed(self) -> int:
        """How many heads it removes."""
        return sum(map(len, self.heads.values()))

    @property
    def keep(self) -> float:
        """The share of heads that stay."""
        return 1 - self.removed / sum(self.sizes.values())

    def check(self, model: nn.Module) -> None:
        """Raise a ValueError unless the plan was made for this model with these weights."""
        check_plan_model(self.model, model, "rank the heads of this model and plan again")

    @staticmethod
    def of(model: nn.Module, small: nn.Module, batch: Batch | None = None) -> Plan:
        """The plan that turns an uncut model into a cut one."""
        after: Mapping[str, list[int]] = getattr(small, "original_heads", None) or {}
        before: Mapping[str, list[int]] = getattr(model, "original_heads", None) or {}
        batch = probe_batch(model) if batch is None else batch
        with torch.no_grad(), seeded_evaluation(model), Interceptor(model, lambda call: None) as interceptor:
            run(model, batch)
        sizes = {site.name: site.heads for site in interceptor.sites.by_name.values()}
        heads: dict[str, list[int]] = {}
        for site, size in sizes.items():
            old = before.get(site, list(range(size)))
            removed = [number for number, head in enumerate(old) if head not in after.get(site, old)]
            heads |= {site: removed} if removed else {}
        return Plan(heads, sizes, fingerprint(model))

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan as JSON, atomically."""
        document = {
            "format": _FORMAT,
            "version": _VERSION,
            "model": self.model,
            "sizes": self.sizes,
            "remove": self.heads,
        }
        write_whole(path, json.dumps(document, indent=1))

    @staticmethod
    def load(path: str | PathLike[str]) -> Plan:
        """Read what `save` wrote. Raises a ValueError that names the file if it is not a plan."""
        document = read_json(path, _Document, "plan", format=_FORMAT, version=_VERSION)
        heads, sizes = document["remove"], document["sizes"]
        for site, numbers in heads.items():
            if not set(numbers) <= set(range(min(sizes.get(site, 0), _MOST))):
                raise ValueError(f"plan: {path} is damaged: {site[:60]!r} has no such heads")
        if not sizes or not 1 <= sum(sizes.values()) <= _MOST or min(sizes.values()) < 0:
            raise ValueError(f"plan: {path} is damaged: its numbers of heads are not valid")
        return Plan(heads, sizes, document["model"])


class _Document(TypedDict):
    model: str
    sizes: dict[str, int]
    remove: dict[str, list[int]]


def plan(
    table: HeadTable,
    keep: float | None = None,
    *,
    save: Mapping[str, float] | None = None,
    prices: HeadPrices | None = None,
    scope: Scope = "global",
    floor: int = 1,
    protect: Heads | None = None,
    groups: bool = False,
) -> Plan:
    """The heads to remove so that at least the share ``keep`` stays: the least important ones. Or with
    ``save``, so that this share of the cache, of the parameters or of the time is saved: those that save most
    for the least loss.

    Grouped heads, which share a key head, leave a site as a whole group or as one head of every group,
    whichever costs less per head; so the groups of a site always stay equal, as `cut` requires.
    Sites that are calls of one shared module lose the same heads.

    Parameters
    ----------
    table: with the column ``importance``, as `importance` returns it.
    keep: the share of heads that stays, between 0 and 1; 0.5 unless ``save`` says what to reach.
    save: ``{"cache": share}``, ``{"parameters": share}`` or ``{"latency": share}`` of the whole model's, or
        several of them, all to be reached. For the cache, whole groups that share a key head go.
    prices: what heads cost, as `head_prices` measures it. Without it only ``{"cache": share}`` can be
        planned, with every key head of causal attention at the same price.
    scope: ``"global"`` ranks all heads of the model together; with ``"layer"`` each site keeps this share of
        its own, so that sites of equal size stay of equal size.
    floor: the least number of heads that each site keeps; 0 allows removing all attention of a site.
    protect: ``{layer number or site: [head numbers]}`` that stay in any case.
    groups: of heads that share a key head, remove whole groups only, so that the cache shrinks with them; the
        share that stays is then the nearest to ``keep`` that whole groups give.

    See Also
    --------
    importance: the table.
    head_prices: what heads cost.
    cut: removes the heads.
    prune: rank, plan, cut, refit and recover in one call.

    References
    ----------
    Michel, Levy, Neubig, "Are sixteen heads really better than one?" (2019).

    Examples
    --------
    >>> import torch
    >>> from manyheads.heads.table import Row
    >>> rows = [Row(f"h.{layer}.attn", layer, h, h, h, "causal") for layer in range(2) for h in range(3)]
    >>> values = torch.tensor([5.0, 1.0, 4.0, 2.0, 3.0, 6.0])
    >>> table = HeadTable(rows, torch.ones(6), {"importance": torch.stack([values**0, values, values**2])})
    >>> plan(table, keep=0.5)
    Plan(remove 3 of 6 heads: {'h.0.attn': [1], 'h.1.attn': [0, 1]})
    >>> plan(table, keep=0.5, protect={1: [0]})
    Plan(remove 3 of 6 heads: {'h.0.attn': [1, 2], 'h.1.attn': [1]})
    >>> plan(table, keep=0.6, scope="layer")
    Plan(remove 2 of 6 heads: {'h.0.attn': [1], 'h.1.attn': [0]})
    >>> plan(table, save={"cache": 0.3})
    Plan(remove 2 of 6 heads: {'h.0.attn': [1], 'h.1.attn': [0]})
    """
    if scope not in ("global", "layer"):
        raise ValueError(f"scope: got {scope!r}; expected 'global' or 'layer'")
    if floor < 0:
        raise ValueError(f"floor: got {floor}; expected 0 or more heads that each site keeps")
    if save is not None:
        if keep is not None:
            raise ValueError("keep: got both keep and save; expected one of them")
        return _saving(table, check_save(save), prices, scope, floor, protect or {})
    keep = 0.5 if keep is None else keep
    if not isinstance(keep, int | float) or isinstance(keep, bool) or not 0 < keep < 1:
        raise ValueError(f"keep: got {keep!r}; expected the share of heads that stays, between 0 and 1")
    importance, modules = _importance(table), _modules(table, protect or {})
    if groups:
        modules = [WholeGroups.of(module) for module in modules]
    for part in [modules] if scope == "global" else [[module] for module in modules]:
        most = (1 - keep) * sum(module.size for module in part)
        most += min(len(group) for module in part for group in module.groups) / 2 - 1e-6 if groups else 0
        remove_least_important(part, importance, int(most + 1e-9), floor)
    if all(module.left == module.size for module in modules):
        shared = any(len(module.groups) < module.size for module in modules)
        within = " (heads that share keys leave a whole group at a time)" if shared else ""
        raise ValueError(
            f"keep: {keep} removes no head{within}; choose a smaller share, a lower floor, or protect less"
        )
    if not any(module.left for module in modules):
        raise ValueError(f"keep: {keep} leaves no head at all; keep at least one")
    return _plan(modules, table.model)


def check_plan(model: nn.Module, batch: Batch, keep: float, **options: Any) -> None:
    """Raise what `plan` would raise for this model after ranking, whatever the ranking; options as for it.

    >>> from manyheads.nn.transformers import Decoder
    >>> model = Decoder(d_model=12, heads=6, kv_heads=2, layers=1, vocabulary=17)
    >>> check_plan(model, torch.ones(1, 5, dtype=torch.int64), 0.5, groups=True)
    >>> check_plan(model, torch.ones(1, 5, dtype=torch.int64), 0.9, groups=True)
    Traceback (most recent call last):
    ValueError: keep: 0.9 removes no head ...
    """
    with torch.no_grad(), seeded_evaluation(model), Interceptor(model, lambda call: None) as interceptor:
        run(model, without_labels(batch))
    rows = rows_of(model, list(interceptor.sites.by_name.values()))
    count = len(rows)
    ranking = {"importance": torch.ones(3, count, dtype=torch.float64)}
    plan(HeadTable(rows, torch.ones(count), ranking), keep, **options)


def _plan(modules: list[ModuleHeads], model: str) -> Plan:
    heads = {site: module.removed for module in modules if module.removed for site in module.sites}
    sizes = {site: module.size for module in modules for site in module.sites}
    return Plan(heads, sizes, model)


def _saving(
    table: HeadTable,
    save: dict[str, float],
    prices: HeadPrices | None,
    scope: Scope,
    floor: int,
    protect: Heads,
) -> Plan:
    """The plan that reaches these savings."""
    if scope == "layer":
        raise ValueError("scope: 'layer' is for a share of heads; with save, all layers are planned together")
    if prices is None:
        prices = equal_prices(table, save)
    elif prices.model != table.model:
        raise ValueError(
            f"prices: they are of the model {prices.model}, and the table is of "
            f"{table.model or 'an unknown one'}; measure those of this model"
        )
    importance, modules = _importance(table), _modules(table, protect)
    remove_for(modules, importance, save, prices, floor)
    return _plan(modules, table.model)


def _importance(table: HeadTable) -> dict[str, list[float]]:
    """The importance of each head, by site."""
    if "importance" not in table.columns:
        raise ValueError(
            f"table: expected a column importance, got {', '.join(table.columns)}; "
            "make it with mh.importance(model, batches)"
        )
    by_site: dict[str, list[float]] = {}
    for row, value in zip(table.rows, table["importance"].tolist(), strict=True):
        if not math.isfinite(value):
            raise ValueError(
                f"table: head {row.head} of {row.site!r} has no finite importance; "
                "rank on batches that reach it"
            )
        by_site.setdefault(row.site, []).append(value)
    return by_site


def _modules(table: HeadTable, protect: Heads) -> list[ModuleHeads]:
    """The modules that have heads; calls of a shared module are one module."""
    kv_heads: dict[str, list[int]] = {}
    layers: dict[str, int] = {}
    for row in table.rows:
        kv_heads.setdefault(row.site, []).append(row.kv_head)
        layers[row.site] = row.layer
    chosen = Selection(protect)
    sites = [Site(name, layers[name], len(each), tuple(each)) for name, each in kv_heads.items()]
    modules: dict[str, ModuleHeads] = {}
    for site in sites:
        module = modules.setdefault(site.path, ModuleHeads([], list(site.kv_heads), set()))
        module.sites.append(site.name)
        module.protected.update(chosen.at(site))
    chosen.finish(sites)
    return list(modules.values())


def with_roles(table: HeadTable, roles: Iterable[str] = ("retrieval",)) -> dict[str, list[int]]:
    """The heads that have one of these roles, ``{site: [head numbers]}``, as `plan` and `prune` protect them.

    Parameters
    ----------
    table: as `roles` makes it, or `HeadTable.load` of what ``manyheads roles`` wrote.
    roles: their names, as in the table.

    Examples
    --------
    >>> import torch
    >>> from manyheads.heads.table import Row
    >>> rows = [Row("h.0.attn", 0, h, h, h, "causal") for h in range(3)]
    >>> words = ["retrieval, induction", "", "previous token"]
    >>> table = HeadTable(rows, torch.ones(3), {}, labels={"roles": words})
    >>> with_roles(table), with_roles(table, ["previous token", "induction"])
    ({'h.0.attn': [0]}, {'h.0.attn': [0, 2]})
    """
    if "roles" not in table.labels:
        raise ValueError(
            "table: it has no column roles; expected one that `roles` made, or roles.json of manyheads roles"
        )
    each = [set(words.split(", ")) if words else set() for words in table.labels["roles"]]
    role_names = set(roles)
    claims = (claim for role in ROLES.values() for claim in role.claims)
    available = {claim for claim in claims if "{" not in claim}.union(*each)
    unknown = sorted(role_names - available)
    if unknown:
        raise ValueError(
            f"roles: there is no role {unknown[0]!r}; expected one of {', '.join(sorted(available))}"
        )
    heads: dict[str, list[int]] = {}
    for row, names in zip(table.rows, each, strict=True):
        if names & role_names:
            heads.setdefault(row.site, []).append(row.head)
    return heads
