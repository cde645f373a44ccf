"""The numbers of tables as a document has them: heads, metrics, roles, importance, redundancy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from manyheads.capture.site import blanked
from manyheads.common.json_numbers import plain
from manyheads.heads.diversity.result import head_names
from manyheads.heads.diversity.summary import layers
from manyheads.heads.roles import catalogue as catalogue  # fills ROLES
from manyheads.heads.roles.role import ROLES
from manyheads.heads.table import HeadTable
from manyheads.view.document import contract
from manyheads.view.document.packing import packed

# With more heads than this, the distances of all pairs are too many numbers for a page.
MOST_PAIRS = 400
NEAREST = 5
# Columns of `diversity` that are no metrics of a head but coordinates and clusters.
_COORDINATES = ("x", "y", "cluster")


def heads(table: HeadTable, judged: HeadTable | None = None) -> contract.Heads:
    """Every head and every metric of a table, and those of `diversity` in another table of the same heads.

    >>> from manyheads.heads.table import Row
    >>> rows = [Row("h.0.attn", 0, head, head, head, "causal") for head in range(2)]
    >>> sums = {"entropy": torch.tensor([[4.0, 4.0], [2.0, 8.0], [1.0, 16.0]])}
    >>> drawn = heads(HeadTable(rows, torch.tensor([4.0, 4.0]), sums))
    >>> drawn["name"], drawn["metrics"]["entropy"]["mean"]
    (['0.0', '0.1'], [0.5, 2.0])
    """
    # roles and coordinates have parts of the document of their own
    names = [name for name in table.metrics if name not in _COORDINATES and _role_of(name) is None]
    metrics = {name: measured(table, name) for name in names}
    labels = dict(table.labels)
    if judged is not None:
        rows = aligned(judged, table)
        for name in judged.metrics:
            if name not in _COORDINATES and name not in metrics:
                metrics[name] = measured(judged, name, rows)
        for name, words in judged.labels.items():
            labels.setdefault(name, [words[i] for i in rows.tolist()])
    return {
        "site": table["site"],
        "layer": table["layer"],
        "head": table["head"],
        "original_head": table["original_head"],
        "kv_head": table["kv_head"],
        "kind": table["kind"],
        "name": head_names(table.rows),
        "tokens": plain(table.tokens),
        "metrics": metrics,
        "labels": labels,
    }


def measured(table: HeadTable, name: str, rows: Tensor | None = None) -> contract.Measured:
    """A metric and its standard error, of all rows or of these."""
    mean, se = table[name], table[f"{name}_se"]
    return {
        "mean": plain(mean if rows is None else mean[rows]),
        "se": plain(se if rows is None else se[rows]),
    }


def aligned(other: HeadTable, table: HeadTable) -> Tensor:
    """The row in another table of the same heads for each row of a table; KeyError if there is none."""
    index = {(row.site, row.head): i for i, row in enumerate(other.rows)}
    return torch.tensor([index[row.site, row.head] for row in table.rows], dtype=torch.long)


def stacks(table: HeadTable) -> list[contract.Stack]:
    """The layers of each stack, with the rows of their heads.

    >>> from manyheads.heads.table import Row
    >>> rows = [Row(f"h.{layer}.attn", layer, 0, 0, 0, "causal") for layer in range(2)]
    >>> stacks(HeadTable(rows, torch.ones(2), {}))[0]["layers"][1]
    {'layer': 1, 'site': 'h.1.attn', 'heads': [1]}
    """
    by_stack: dict[tuple[str, str], dict[str, contract.Layer]] = {}
    for i, row in enumerate(table.rows):
        sites = by_stack.setdefault((row.kind, blanked(row.site.partition("#")[0])), {})
        site = sites.setdefault(row.site, {"layer": row.layer, "site": row.site, "heads": []})
        site["heads"].append(i)
    return [
        {"name": name, "kind": kind, "layers": sorted(sites.values(), key=lambda site: site["layer"])}
        for (kind, name), sites in by_stack.items()
    ]


def importance(tables: Mapping[str, HeadTable], table: HeadTable) -> dict[str, contract.Measured]:
    """The importance of each head by each method, in the order of a table's rows."""
    by_method: dict[str, contract.Measured] = {}
    for method, ranked in tables.items():
        by_method[method] = measured(ranked, "importance", aligned(ranked, table))
        if "measure" in ranked.labels and len(ranked):
            by_method[method]["measure"] = ranked.labels["measure"][0]
    return by_method


def redundancy(judged: HeadTable, table: HeadTable) -> contract.Redundancy | None:
    """Which heads attend alike, from a table of `diversity`, in the order of another table's rows."""
    if "js" not in judged.matrices or "x" not in judged.sums:
        return None
    rows = aligned(judged, table)
    js = judged.matrices["js"][rows][:, rows]
    near = js.clone().fill_diagonal_(torch.nan)
    nearest: list[list[tuple[int, float]]] = []
    for row in near:
        comparable = row.isfinite().nonzero().flatten()
        first = comparable[row[comparable].argsort(stable=True)[:NEAREST]].tolist()
        nearest.append([(i, round(row[i].item(), 4)) for i in first])
    cluster = judged["cluster"][rows]
    return {
        "x": plain(judged["x"][rows]),
        "y": plain(judged["y"][rows]),
        "cluster": [int(c) if c == c else -1 for c in cluster.tolist()],
        "twin": [each[0][0] if each else -1 for each in nearest],
        "twin_distance": plain(judged["twin_distance"][rows]),
        "nearest": nearest,
        # pairs that cannot be compared are at the largest distance
        "matrix": packed(js.nan_to_num(1.0), "uint16") if len(table) <= MOST_PAIRS else None,
        "layers": [
            {
                "layer": layer.layer,
                "site": layer.site,
                "diversity": plain(layer.mean["js"]),
                "distinct": plain(layer.distinct_attention),
            }
            for layer in layers(judged)
        ],
    }


def roles(judged: HeadTable, table: HeadTable) -> contract.Roles | None:
    """The roles of each head with their evidence, in the order of another table's rows."""
    columns = [name.removesuffix("_score") for name in judged.sums if _role_of(name) is not None]
    columns = [c for c in dict.fromkeys(columns) if {f"{c}_score", f"{c}_baseline"} <= set(judged.sums)]
    if not columns or "roles" not in judged.labels:
        return None
    rows = aligned(judged, table).tolist()
    claimed = [set(judged.labels["roles"][i].split(", ")) for i in rows]
    evidence: list[list[contract.RoleEvidence]] = [[] for _ in rows]
    says: dict[str, str] = {}
    against: dict[str, str] = {}
    for column in columns:
        role, variant = ROLES[column.partition(":")[0]], column.partition(":")[2]
        count = judged.sums[f"{column}_score"][0]
        score, baseline = judged[f"{column}_score"], judged[f"{column}_baseline"]
        for label in (pattern.format(variant=variant) for pattern in role.claims):
            offset = label.startswith("offset")  # ten of them: only those that a head claims
            for head, i in enumerate(rows):
                if count[i] > 0 and (not offset or label in claimed[head]):
                    says[label], against[label] = role.says, role.against
                    evidence[head].append(
                        {
                            "role": label,
                            "score": plain(round(score[i].item(), 6)),
                            "baseline": plain(round(baseline[i].item(), 6)),
                            "cases": int(count[i]),
                            "claimed": label in claimed[head],
                        }
                    )
    for of_head in evidence:
        of_head.sort(key=lambda one: not one["claimed"])
    return {
        "names": list(says),
        "says": says,
        "against": against,
        "heads": evidence,
        "not_judged": _reasons(judged),
    }


def _role_of(column: str) -> str | None:
    """The role that a column of `roles` is about; None for other columns."""
    name = column.partition(":")[0]
    for ending in ("_score", "_baseline", "_weight"):
        if column.endswith(ending):
            name = name.removesuffix(ending)
            return name if name in ROLES else None
    return None


def _reasons(judged: HeadTable) -> dict[str, str]:
    """Why roles were not judged, as most heads say it."""
    reasons: dict[str, Counter[str]] = {}
    for text in judged.labels.get("not_judged", []):
        for part in filter(None, text.split("; ")):
            names, _, why = part.partition(": ")
            for name in names.split(", "):
                reasons.setdefault(name, Counter())[why] += 1
    return {name: counts.most_common(1)[0][0] for name, counts in reasons.items() if name in ROLES}
