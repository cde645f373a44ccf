"""Heads that stay whatever they cost, by what they do: those that `roles` says have a role."""

from __future__ import annotations

from collections.abc import Iterable

from manyheads.heads.table import HeadTable


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
    from manyheads.heads.roles.role import ROLES

    each = [set(words.split(", ")) if words else set() for words in table.labels["roles"]]
    wanted = set(roles)
    claims = (claim for role in ROLES.values() for claim in role.claims)
    known = {claim for claim in claims if "{" not in claim}.union(*each)
    unknown = sorted(wanted - known)
    if unknown:
        raise ValueError(f"roles: there is no role {unknown[0]!r}; known are {', '.join(sorted(known))}")
    found: dict[str, list[int]] = {}
    for row, mine in zip(table.rows, each, strict=True):
        if mine & wanted:
            found.setdefault(row.site, []).append(row.head)
    return found
