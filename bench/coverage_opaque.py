"""Which architectures `watch` sees right when attention is computed by a kernel that torch cannot see into.

`python -m bench.coverage_opaque [NAME ...] [--out DIR] [--jobs N] [--again]` builds each entry of
transformers' model mapping, small and with random weights, as `bench.coverage` does, and watches it twice:
with the attention it comes with, and with an opaque operator registered on transformers' attention interface.
Architectures accept a backend if they call it and give the same outputs, as with their own attention or with
eager. Then sites, heads and numbers must be the same; what is not must be named in `missed`.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import manyheads as mh
from bench import coverage, coverage_cut, harness

RIGHT, NAMED, WRONG, NOT_TAKEN = "right", "named", "wrong", "takes no backend"
COLUMNS = ("tokens", "entropy", "confidence", "distance", "self", "previous", "first", "local", "output_norm")
SLACK = 1e-3  # of a metric, relative to 1 or to its size; outputs may differ as much


def measure(name: str) -> dict[str, Any]:
    """Build one architecture and watch it with both kernels."""
    return coverage_cut.measure(name, compare)


def compare(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    """Watch a model with its own attention, and with an opaque kernel."""
    from tests.helpers import opaque_kernels

    from bench import coverage_build as make

    calls = Counter[str]()

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls["backend"] += 1
        return opaque_kernels.backend(*args, **kwargs)

    name = opaque_kernels.register_backend("bench_opaque", counted)
    before, wanted = _watched(model, batch)
    try:
        make._implementation(model, name)
        with torch.no_grad():
            plain = _tensors(model(**batch))
    except Exception as error:
        return {"status": NOT_TAKEN, "reason": " ".join(f"{type(error).__name__}: {error}".split())[:200]}
    if not calls["backend"]:
        return {"status": NOT_TAKEN, "reason": "it never calls the interface"}
    if not _alike(plain, before):
        # Queries that see no key, as padding may be, get zeros from sdpa and a mean from eager's masks.
        try:
            make._implementation(model, "eager")
            before, wanted = _watched(model, batch)
        finally:
            make._implementation(model, name)
        if not _alike(plain, before):
            return {"status": NOT_TAKEN, "reason": _why_others(model)}
    after, seen = _watched(model, batch)
    if not all(torch.equal(a, b) for a, b in zip(plain, after, strict=True)):
        return {"status": WRONG, "reason": "watching changed its outputs"}
    return _verdict(seen, wanted)


def _why_others(model: nn.Module) -> str:
    reason = "its outputs are others with it"
    declared = [getattr(model, f"_supports_{name}", False) for name in ("sdpa", "attention_backend")]
    return reason if any(declared) else f"{reason}, and its class declares that it supports none"


def _verdict(seen: Any, wanted: Any) -> dict[str, Any]:
    """Whether two watched runs saw the same."""
    fresh = {path: why for path, why in seen.missed.items() if path not in wanted.missed}
    try:
        ours, theirs = seen.table, wanted.table
    except ValueError as error:
        return {"status": NAMED if fresh or wanted.missed else WRONG, "reason": str(error)[:200]}
    differences = _differences(ours, theirs)
    if differences:
        return {"status": NAMED if fresh else WRONG, "reason": f"{differences[0]}; {fresh}"[:300]}
    reason = "" if not fresh else str(fresh)[:300]
    return {"status": NAMED if fresh else RIGHT, "reason": reason, "sites": len(seen.sites)}


def _differences(ours: mh.HeadTable, theirs: mh.HeadTable) -> list[str]:
    if list(ours["site"]) != list(theirs["site"]):
        return [f"other sites: {sorted(set(ours['site']) ^ set(theirs['site']))[:4]}"]
    found = []
    for column in COLUMNS:
        one, two = ours[column], theirs[column]
        if not torch.allclose(one, two, rtol=SLACK, atol=SLACK, equal_nan=True):
            found.append(f"{column} differs by {float((one - two).abs().max()):.2g}")
    return found


def _watched(model: nn.Module, batch: dict[str, Any]) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    with torch.no_grad(), mh.watch(model, statistics="full") as seen:
        return _tensors(model(**batch)), seen


def _tensors(output: Any) -> list[Tensor]:
    from bench.coverage_spy import tensors

    return [x for x in tensors(output) if x.is_floating_point()]


def _alike(one: list[Tensor], two: list[Tensor]) -> bool:
    return len(one) == len(two) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=SLACK, atol=SLACK * max(1.0, float(b.abs().max())))
        for a, b in zip(one, two, strict=True)
        if b.numel()
    )


def report(results: dict[str, dict[str, Any]]) -> str:
    """The counts, the misses by name, and the share against what is to be reached."""
    by: dict[str, list[str]] = {}
    for name, result in sorted(results.items()):
        by.setdefault(result["status"], []).append(name)
    right, taken = len(by.get(RIGHT, ())), sum(len(by.get(each, ())) for each in (RIGHT, NAMED, WRONG))
    misses = [
        f"- {name} ({status}): {results[name]['reason']}"
        for status in (WRONG, NAMED)
        for name in by.get(status, ())
    ]
    ended = [name for name, result in sorted(results.items()) if result["status"] == coverage_cut.FAILED]
    none = Counter(results[name]["reason"].split(":")[0] for name in by.get(NOT_TAKEN, ()))
    reasons = ", ".join(f"{count} {reason!r}" for reason, count in none.most_common(4))
    return "\n\n".join(
        [
            f"{len(results)} architectures tried: {len(by.get(coverage.NOT_RUN, ()))} do not run, "
            f"{len(by.get(NOT_TAKEN, ()))} take no backend ({reasons}), {taken} do. Of those {right} are "
            f"seen right, {len(by.get(NAMED, ()))} are named, {len(by.get(WRONG, ()))} are wrong without a "
            "word.",
            f"Ended before there was a verdict (time, memory): {', '.join(ended) or 'none'}.",
            f"Right: {', '.join(by.get(RIGHT, ()))}.",
            "Misses:",
            "\n".join(misses) or "none",
            harness.targets(("right, of those that accept a backend", right / max(taken, 1), ">=", 0.95)),
        ]
    )


def run(quick: bool = False, out: Path = coverage.OUT) -> str:
    """As a part of `python -m bench`: every architecture, or every twentieth."""
    torch.set_num_threads(1)
    mapping, _ = coverage.names()
    wanted = mapping[::20] if quick else mapping
    return report(coverage_cut.collect(wanted, out / "opaque.json", jobs=2, look=measure))


def main() -> None:
    asked = coverage_cut.options("coverage_opaque", __doc__)
    wanted = asked.name or coverage.names()[0]
    path = asked.out / "opaque.json"
    text = report(coverage_cut.collect(wanted, path, asked.jobs, asked.again, look=measure))
    (asked.out / "opaque.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
