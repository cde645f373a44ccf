"""The numbers of tables, as a document has them: heads, metrics, roles, importance, redundancy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from manyheads.capture.site import blanked
from manyheads.common.json_numbers import plain
from manyheads.heads.diversity.result import head_names
from manyheads.heads.diversity.summary import layers
from manyheads.heads.roles import catalogue as catalogue  # fills ROLES
from manyheads.heads.roles.role import ROLES
from manyheads.heads.table import HeadTable, Row
from manyheads.view.document.packing import packed

# With more heads than this, the distances of all pairs are too many numbers for a page.
MOST_PAIRS = 400
NEAREST = 5
# Columns of `diversity` that are no metrics of a head: they are places and groups.
_PLACES = ("x", "y", "cluster")


def heads(table: HeadTable, also: HeadTable | None = None) -> dict[str, Any]:
    """Every head and every metric of a table, and of a table of the same heads from `diversity`.

    >>> from manyheads.heads.table import Row
    >>> rows = [Row("h.0.attn", 0, head, head, head, "causal") for head in range(2)]
    >>> sums = {"entropy": torch.tensor([[4.0, 4.0], [2.0, 8.0], [1.0, 16.0]])}
    >>> found = heads(HeadTable(rows, torch.tensor([4.0, 4.0]), sums))
    >>> found["name"], found["metrics"]["entropy"]["mean"]
    (['0.0', '0.1'], [0.5, 2.0])
    """
    found: dict[str, Any] = {name: table[name] for name in Row._fields}
    found["name"] = head_names(table.rows)
    found["tokens"] = plain(table.tokens)
    # roles and places have parts of their own
    own = [name for name in table.metrics if name not in _PLACES and _role_of(name) is None]
    found["metrics"] = {name: measured(table, name) for name in own}
    found["labels"] = dict(table.labels)
    if also is not None:
        extra = aligned(also, table)
        for name in also.metrics:
            if name not in _PLACES and name not in found["metrics"]:
                mean, se = also[name][extra], also[f"{name}_se"][extra]
                found["metrics"][name] = {"mean": plain(mean), "se": plain(se)}
        for name, words in also.labels.items():
            found["labels"].setdefault(name, [words[i] for i in extra.tolist()])
    return found


def measured(table: HeadTable, name: str) -> dict[str, Any]:
    """A metric and its standard error."""
    return {"mean": plain(table[name]), "se": plain(table[f"{name}_se"])}


def aligned(other: HeadTable, table: HeadTable) -> Tensor:
    """Where each row of a table stands in another table of the same heads; KeyError if it is not there."""
    place = {(row.site, row.head): i for i, row in enumerate(other.rows)}
    return torch.tensor([place[row.site, row.head] for row in table.rows], dtype=torch.long)


def stacks(table: HeadTable) -> list[dict[str, Any]]:
    """The layers of each stack, with the rows of their heads.

    >>> rows = [Row(f"h.{layer}.attn", layer, 0, 0, 0, "causal") for layer in range(2)]
    >>> stacks(HeadTable(rows, torch.ones(2), {}))[0]["layers"][1]
    {'layer': 1, 'site': 'h.1.attn', 'heads': [1]}
    """
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for i, row in enumerate(table.rows):
        sites = found.setdefault((row.kind, blanked(row.site.partition("#")[0])), {})
        site = sites.setdefault(row.site, {"layer": row.layer, "site": row.site, "heads": []})
        site["heads"].append(i)
    return [
        {"name": name, "kind": kind, "layers": sorted(sites.values(), key=lambda site: site["layer"])}
        for (kind, name), sites in found.items()
    ]


def importance(tables: Mapping[str, HeadTable], table: HeadTable) -> dict[str, Any]:
    """The importance of each head by each method, in the order of a table's rows."""
    found = {}
    for method, ranked in tables.items():
        rows = aligned(ranked, table)
        found[method] = {
            "mean": plain(ranked["importance"][rows]),
            "se": plain(ranked["importance_se"][rows]),
        }
    return found


def redundancy(judged: HeadTable, table: HeadTable) -> dict[str, Any] | None:
    """Who is like whom, from a table of `diversity`, in the order of another table's rows."""
    if "js" not in judged.matrices or "x" not in judged.sums:
        return None
    rows = aligned(judged, table)
    js = judged.matrices["js"][rows][:, rows]
    near = js.clone().fill_diagonal_(torch.nan)
    nearest = []
    for row in near:
        known = row.isfinite().nonzero().flatten()
        first = known[row[known].argsort(stable=True)[:NEAREST]].tolist()
        nearest.append([[i, round(row[i].item(), 4)] for i in first])
    cluster = judged["cluster"][rows]
    return {
        "x": plain(judged["x"][rows]),
        "y": plain(judged["y"][rows]),
        "cluster": [int(c) if c == c else -1 for c in cluster.tolist()],
        "twin": [each[0][0] if each else -1 for each in nearest],
        "twin_distance": plain(judged["twin_distance"][rows]),
        "nearest": nearest,
        # pairs that cannot be compared are as far as can be
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


def roles(judged: HeadTable, table: HeadTable) -> dict[str, Any] | None:
    """What each head was found to be, with the evidence, in the order of another table's rows."""
    columns = [name.removesuffix("_score") for name in judged.sums if _role_of(name) is not None]
    columns = [c for c in dict.fromkeys(columns) if {f"{c}_score", f"{c}_baseline"} <= set(judged.sums)]
    if not columns or "roles" not in judged.labels:
        return None
    rows = aligned(judged, table).tolist()
    claimed = [set(judged.labels["roles"][i].split(", ")) for i in rows]
    found: list[list[dict[str, Any]]] = [[] for _ in rows]
    says: dict[str, str] = {}
    against: dict[str, str] = {}
    for column in columns:
        role, variant = ROLES[column.partition(":")[0]], column.partition(":")[2]
        count = judged.sums[f"{column}_score"][0]
        score, baseline = judged[f"{column}_score"], judged[f"{column}_baseline"]
        for label in (pattern.format(variant=variant) for pattern in role.claims):
            far = label.startswith("offset")  # ten of them: only those that somebody is
            for head, i in enumerate(rows):
                if count[i] > 0 and (not far or label in claimed[head]):
                    says[label], against[label] = role.says, role.against
                    found[head].append(
                        {
                            "role": label,
                            "score": plain(round(score[i].item(), 6)),
                            "baseline": plain(round(baseline[i].item(), 6)),
                            "cases": int(count[i]),
                            "claimed": label in claimed[head],
                        }
                    )
    for each in found:
        each.sort(key=lambda one: not one["claimed"])
    return {
        "names": list(says),
        "says": says,
        "against": against,
        "heads": found,
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
    said: dict[str, Counter[str]] = {}
    for text in judged.labels.get("not_judged", []):
        for part in filter(None, text.split("; ")):
            names, _, why = part.partition(": ")
            for name in names.split(", "):
                said.setdefault(name, Counter())[why] += 1
    return {name: counts.most_common(1)[0][0] for name, counts in said.items() if name in ROLES}
