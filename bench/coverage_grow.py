"""Whether `grow` keeps the function, on the architectures that `bench.coverage_cut` cuts.

`python -m bench.coverage_grow [NAME ...] [--out DIR] [--jobs N] [--again]`. Every site gains something, once
by ``how="zero"`` and once by ``how="split"``: every second site a whole group, the others one head for every
group (where each head has its own keys, that is one head). Whether the outputs agree is for `grow` to find
out, as `cut` does; here its refusals and failures are collected, by name. The architectures are those that
DIR/cut.json has as cut.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import manyheads as mh
from bench import coverage, harness
from bench.coverage_cut import CUT, FAILED, NONE, REFUSED, collect, measure, refusal, sites_of
from manyheads.capture.site import Site

GROWN = "grown"


def choose(sites: list[Site]) -> dict[str, int]:
    """How many heads to add at every site."""
    order: dict[str, int] = {}  # of modules: the calls of one module gain the same heads
    wanted = {}
    for site in sites:
        key_heads = len(set(site.kv_heads))
        whole = order.setdefault(site.path, len(order)) % 2 == 0
        wanted[site.name] = site.heads // key_heads if whole and key_heads > 1 else key_heads
        if key_heads == site.heads:
            wanted[site.name] = 1
    return wanted


def grow(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Grow a model that runs on a batch, in both ways; a verdict and, unless it grew, the reason."""
    wanted = choose(sites_of(model, batch))
    if not wanted:
        return {"status": NONE, "reason": ""}
    ways: tuple[Any, ...] = ("zero", "split")
    for how in ways:
        try:
            mh.grow(model, wanted, batch=batch, how=how)
        except Exception as error:
            found = refusal(error, "grow: ")
            return found | {"reason": f"{how}: {found['reason']}"}
    return {"status": GROWN, "reason": ""}


def report(results: dict[str, dict[str, Any]], cut: dict[str, dict[str, Any]]) -> str:
    """What grew, the misses by name, and the share against what is to be reached.

    cut: what `bench.coverage_cut` found; only what it cut counts.
    """
    by: dict[str, list[str]] = {}
    for name, found in sorted(results.items()):
        if not cut or cut.get(name, {}).get("status") == CUT:
            by.setdefault(found["status"], []).append(name)
    grown, tried = len(by.get(GROWN, ())), sum(map(len, by.values()))
    misses = [
        f"- {name} ({status}): {results[name]['reason']}"
        for status in (REFUSED, FAILED, NONE, coverage.NOT_RUN)
        for name in by.get(status, ())
    ]
    cuttable = sum(found["status"] == CUT for found in cut.values())
    return "\n\n".join(
        [
            f"{grown} of {tried} architectures that were tried, of {cuttable} that are cut, grow, by new "
            f"heads and by split ones, and compute the same: {', '.join(by.get(GROWN, ()))}.",
            "Not grown:",
            "\n".join(misses) or "none",
            harness.targets(("grow keeps the function, share", grown / max(tried, 1), ">=", 0.8)),
        ]
    )


def _cut(out: Path) -> list[str]:
    """The architectures that were cut; all of them if nothing is known."""
    results = coverage.known(out / "cut.json")
    mapping, peers = coverage.names()
    return [name for name in (*mapping, *peers) if not results or results.get(name, {}).get("status") == CUT]


def run(quick: bool = False, out: Path = coverage.OUT) -> str:
    """As a part of `python -m bench`: every architecture that is cut, or every twentieth."""
    torch.set_num_threads(1)
    look = partial(measure, check=grow)
    results = collect(_cut(out)[:: 20 if quick else 1], out / "grow.json", jobs=2, look=look)
    return report(results, coverage.known(out / "cut.json"))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.coverage_grow", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("name", nargs="*", metavar="NAME", help="architectures; default all that are cut")
    parser.add_argument(
        "--out", type=Path, default=coverage.OUT, metavar="DIR", help="where results are kept"
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes at a time")
    parser.add_argument("--again", action="store_true", help="also those that are known already")
    options = parser.parse_args()
    torch.set_num_threads(1)
    path, look = options.out / "grow.json", partial(measure, check=grow)
    results = collect(options.name or _cut(options.out), path, options.jobs, options.again, look)
    text = report(results, coverage.known(options.out / "cut.json"))
    (options.out / "grow.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
