"""The cases of each role that were counted, before anything is claimed: they add up over parts of a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from manyheads.heads.roles.judge import judge
from manyheads.heads.roles.role import ROLES
from manyheads.heads.table import HeadTable

# What the model reads, by the name that a role gives as ``on``; in this order.
READING = {
    "text": "the batches",
    "repeated": "random tokens, twice",
    "planted": "planted keys",
    "treebank": "the treebank",
}


@dataclass
class RoleCases:
    """The cases of each role.

    Attributes
    ----------
    table: counts, sums and squares of every score and baseline; no rows where nothing was read.
    roles: the names of those that were looked for.
    left_out: why a role was not looked for, by name.
    """

    table: HeadTable
    roles: list[str]
    left_out: dict[str, str]

    def judged(self, least: int) -> HeadTable:
        """The table with what can be claimed from at least this many cases."""
        unseen = {name: "" for name in self.roles if not any(c.startswith(name) for c in self.table.sums)}
        return judge(self.table, least, unseen | self.left_out)


def merged_cases(parts: Sequence[RoleCases]) -> RoleCases:
    """The cases of several parts of a text together."""
    tables = [part.table for part in parts if len(part.table)]
    if not tables:
        raise ValueError("merge: no attention was seen in any part of the text")
    columns = in_order(list(dict.fromkeys(name for table in tables for name in table.sums)))
    filled = [
        replace(
            table,
            sums={
                name: table.sums.get(name, torch.zeros(3, len(table), dtype=torch.float64))
                for name in columns
            },
        )
        for table in tables
    ]
    left_out = {name: why for part in parts for name, why in part.left_out.items()}
    return RoleCases(filled[0].merge(*filled[1:]), parts[0].roles, left_out)


def in_order(columns: Sequence[str]) -> list[str]:
    """The columns of roles in the order of what is read, whatever was read first.

    >>> from manyheads.heads.roles import catalogue
    >>> in_order(["retrieval_score", "induction_score", "sink_score"])
    ['sink_score', 'induction_score', 'retrieval_score']
    """
    names, sources = list(ROLES), list(READING)

    def position(column: str) -> tuple[int, int, str]:
        name = next(name for name in names if column.startswith((f"{name}_", f"{name}:")))
        source = ROLES[name].on
        return sources.index(source), names.index(name), column if source == "treebank" else ""

    return sorted(columns, key=position)
