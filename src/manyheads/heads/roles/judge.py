"""From counted cases to claims: which roles a head has, with the evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from manyheads.heads.roles import catalogue as catalogue  # fills ROLES
from manyheads.heads.roles.role import ROLES, Role
from manyheads.heads.table import HeadTable

# Fewer cases than this are no ground for a claim.
LEAST = 100
# A claim must also hold when the score is this many standard errors off.
ERRORS = 2.0


def judge(table: HeadTable, least: int = LEAST, left_out: Mapping[str, str] | None = None) -> HeadTable:
    """The table with its text columns: ``roles``, ``evidence`` and ``not_judged``.

    `roles` calls it; call it yourself after merging tables of roles, which leaves text columns out.
    ``left_out`` says why roles were not looked for, or nothing of roles that no case was found of.

    >>> import torch
    >>> from manyheads.heads.table import Row
    >>> score = torch.tensor([[200.0, 40.0], [198.0, 40.0], [198.0, 40.0]])
    >>> chance = torch.tensor([[200.0, 40.0], [20.0, 4.0], [2.0, 0.4]])
    >>> sums = {"positional:previous_score": score, "positional:previous_baseline": chance}
    >>> rows = [Row("h.0.attn", 0, head, head, head, "causal") for head in range(2)]
    >>> table = judge(HeadTable(rows, torch.ones(2), sums))
    >>> table["roles"], table["evidence"][0]
    (['previous', ''], 'previous 0.99 (a random visible key 0.10, 200 queries)')
    >>> table["not_judged"][1]
    'positional: too few (previous 40 of 100 queries)'
    """
    names: list[list[str]] = [[] for _ in table.rows]
    evidence: list[list[str]] = [[] for _ in table.rows]
    few: list[dict[str, list[str]]] = [{} for _ in table.rows]
    for column in (name.removesuffix("_score") for name in table.sums if name.endswith("_score")):
        role = ROLES.get(column.partition(":")[0])
        if role is None:
            continue
        variant = column.partition(":")[2]
        count = table.sums[f"{column}_score"][0]
        score, baseline = table[f"{column}_score"], table[f"{column}_baseline"]
        error = ERRORS * table[f"{column}_score_se"]
        claims = {
            label.format(variant=variant): rule(score - error, baseline) & rule(score + error, baseline)
            for label, rule in role.claims.items()
        }
        for row, cases in enumerate(count.tolist()):
            if 0 < cases < least:
                few[row].setdefault(role.name, []).append(f"{variant} {cases:,.0f}".strip())
            for label, holds in claims.items():
                if cases >= least and bool(holds[row]):
                    names[row].append(label)
                    numbers = (
                        f"{score[row]:.2f} ({role.against} {baseline[row]:.2f}, {cases:,.0f} {role.unit})"
                    )
                    evidence[row].append(f"{label} {numbers}")
    missing = _missing(table, left_out or {})
    labels = {
        "roles": [", ".join(each) for each in names],
        "evidence": ["; ".join(each) for each in evidence],
        "not_judged": ["; ".join([*_too_few(each, least), *missing[row]]) for row, each in enumerate(few)],
    }
    return replace(table, labels=table.labels | labels)


def _too_few(few: Mapping[str, list[str]], least: int) -> list[str]:
    return [
        f"{name}: too few ({', '.join(each)} of {least} {ROLES[name].unit})" for name, each in few.items()
    ]


def _missing(table: HeadTable, left_out: Mapping[str, str]) -> list[list[str]]:
    """For each head the roles that were left out or have no case at all, and why."""
    cases = {name: torch.zeros(len(table)) for name in (*left_out, *ROLES)}
    judged_names = set(left_out)
    for column, sums in table.sums.items():
        name = column.partition(":")[0].removesuffix("_score") if column.endswith("_score") else ""
        if name in cases:
            cases[name] = cases[name] + sums[0]
            judged_names.add(name)
    out: list[list[str]] = []
    for row, head in enumerate(table.rows):
        reasons: dict[str, list[str]] = {}
        for name in sorted(judged_names, key=list(ROLES).index):
            if name in left_out or not cases[name][row]:
                why = left_out.get(name) or _no_case(ROLES[name], head.kind)
                reasons.setdefault(why, []).append(name)
        out.append([f"{', '.join(names)}: {why}" for why, names in reasons.items()])
    return out


def _no_case(role: Role, kind: str) -> str:
    if kind == "cross" and not role.cross:
        return "no meaning in cross-attention"
    return "no next token to copy to" if "lens" in role.needs and kind != "causal" else "no case found"
