"""Whether `cut` gives what `silence` gives, on the architectures of `bench.coverage`.

`python -m bench.coverage_cut [NAME ...] [--out DIR] [--jobs N] [--again]`. Every site loses something: every
second one its second key head's group, the others one head of every group (where each head has its own keys,
that is one head). Calls of one module lose the same heads. Whether the outputs agree is for `cut` to find
out, which makes its batch longer than 256 tokens where the model allows it; here its refusals and failures
are collected, by name, and how long the batch was that it was held to.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import manyheads as mh
from bench import coverage, harness
from manyheads.capture.site import Site
from manyheads.models.changes import changes_of

CUT, REFUSED, FAILED, NONE = "cut", "refused", "failed", "no heads to spare"
_GAINS = (0.4, 0.0)  # of the weights: larger ones make more noise than there is to see here


def measure(name: str, check: Callable[[nn.Module, Any], dict[str, Any]] | None = None) -> dict[str, Any]:
    """Build one architecture and cut it, or look at it otherwise."""
    from bench import coverage_build as make
    from bench.missing_packages import stand_in

    check = check or cut
    others = coverage.others()
    if name in others:
        model, forward, _ = others[name]()
        return check(_Run(model, forward).eval(), ())
    stand_in("torchvision")
    failures: list[str] = []
    for how, divisor in make.SHRINKS:
        for gain in _GAINS:
            try:
                model = make.build(name, how, divisor, gain)
            except Exception as error:
                failures.append(str(error))
                break
            given = coverage._first_that_runs(model, make.inputs(name, model), failures)
            if given is None:
                break
            if not gain or coverage._finite(model, given):
                return check(model.eval(), given)
    return {"status": coverage.NOT_RUN, "reason": " ".join((failures or [""])[0].split())[:220]}


def sites_of(model: nn.Module, batch: Any) -> list[Site]:
    """The sites of a model that runs on a batch."""
    with torch.no_grad(), mh.watch(model) as seen:
        model(*batch) if isinstance(batch, tuple) else model(**batch)
    return seen.sites


def choose(sites: list[Site]) -> dict[str, list[int]]:
    """Heads to remove at every site that has several."""
    chosen: dict[str, list[int]] = {}
    order: dict[str, int] = {}  # of modules: the calls of one module lose the same heads
    for site in sites:
        groups: dict[int, list[int]] = {}
        for head, key_head in enumerate(site.kv_heads):
            groups.setdefault(key_head, []).append(head)
        whole = order.setdefault(site.path, len(order)) % 2 == 0
        if len(groups) == site.heads or (whole and len(groups) > 1):
            heads = list(groups.values())[1 if whole and len(groups) > 1 else 0]
        else:
            heads = [group[0] for group in groups.values()]
        if len(heads) < site.heads:
            chosen[site.name] = heads
    return chosen


def cut(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Cut a model that runs on a batch; a verdict and, unless it was cut, the reason. ``note`` is what could
    not be shown.
    """
    heads = choose(sites_of(model, batch))
    if not heads:
        return {"status": NONE, "reason": ""}
    try:
        small = mh.cut(model, heads, batch=batch)
    except Exception as error:
        return refusal(error, "cut: ")
    return {"status": CUT, "reason": "", "note": "; ".join(changes_of(small).notes)[:300]}


def refusal(error: Exception, ours: str) -> dict[str, Any]:
    """The verdict on an error: refused in a sentence, or failed. ``ours``: how errors of ours begin."""
    reason = " ".join(str(error).split())[:300]
    if isinstance(error, ValueError) and reason.startswith("heads: "):
        return {"status": REFUSED, "reason": reason}
    return {
        "status": FAILED,
        "reason": reason if reason.startswith(ours) else f"{type(error).__name__}: {reason}",
    }


class _Run(nn.Module):
    """A model together with its input, so that it can be run without knowing how."""

    def __init__(self, model: nn.Module, forward: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.model = model
        self.run = forward

    def forward(self) -> Any:
        return self.run(self.model)


def collect(
    wanted: Iterable[str],
    path: Path,
    jobs: int,
    again: bool = False,
    look: Callable[[str], dict[str, Any]] = measure,
) -> dict[str, dict[str, Any]]:
    """The results of these architectures, from a file where they are known."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known = coverage.known(path)

    def done(name: str, found: dict[str, Any]) -> None:
        if found["reason"].startswith(("its process ended", "still running")):
            found["status"] = FAILED
        known[name] = found
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(known, indent=1))
        fresh.replace(path)
        harness.say(f"{name}: {found['status']} {found['reason'][:160]}")

    coverage.each([name for name in wanted if again or name not in known], jobs, done, look)
    return known


def report(results: dict[str, dict[str, Any]]) -> str:
    """What was cut, the misses by name, and the share against what is to be reached."""
    by: dict[str, list[str]] = {}
    for name, found in sorted(results.items()):
        by.setdefault(found["status"], []).append(name)
    right, tried = len(by.get(CUT, ())), sum(len(by.get(status, ())) for status in (CUT, REFUSED, FAILED))
    misses = [
        f"- {name} ({status}): {results[name]['reason']}"
        for status in (REFUSED, FAILED)
        for name in by.get(status, ())
    ]
    short = [name for name in by.get(CUT, ()) if "could not be made longer" in results[name].get("note", "")]
    others = [
        f"{status}: {', '.join(names)}." for status, names in by.items() if status in (NONE, coverage.NOT_RUN)
    ]
    return "\n\n".join(
        [
            f"{right} of {tried} architectures with heads to spare are cut, and equal the silenced ones: "
            f"{', '.join(by.get(CUT, ()))}.",
            f"Held to their own batch only, which cannot be made longer: {', '.join(short) or 'none'}.",
            "Not cut:",
            "\n".join(misses) or "none",
            *(other[0].upper() + other[1:] for other in others),
            harness.targets(("cut equals silenced, share", right / max(tried, 1), ">=", 0.9)),
        ]
    )


def run(quick: bool = False, out: Path = coverage.OUT) -> str:
    """As a part of `python -m bench`: every architecture, or every twentieth."""
    torch.set_num_threads(1)
    mapping, peers = coverage.names()
    return report(collect([*(mapping[::20] if quick else mapping), *peers], out / "cut.json", jobs=2))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.coverage_cut", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("name", nargs="*", metavar="NAME", help="architectures; default all")
    parser.add_argument(
        "--out", type=Path, default=coverage.OUT, metavar="DIR", help="where results are kept"
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes at a time")
    parser.add_argument("--again", action="store_true", help="also those that are known already")
    options = parser.parse_args()
    torch.set_num_threads(1)
    wanted = options.name or [name for part in coverage.names() for name in part]
    text = report(collect(wanted, options.out / "cut.json", options.jobs, options.again))
    (options.out / "cut.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
