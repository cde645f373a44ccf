"""Which attention manyheads gets right, names, refuses, or gets wrong without a word: the zoo of tests/zoo.

`python -m bench.zoo [NAME ...]` judges every hand-written module and every library model of the zoo that is
installed (see tests/zoo/judge.py), prints a row for each, and writes bench/results/zoo.md. A NAME is a part of
a model's name; a table of chosen models is printed only. `--drawn N` judges N modules drawn at random instead.
"""

import argparse
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from bench import harness
from tests.zoo import handwritten
from tests.zoo.case import Case
from tests.zoo.judge import ASPECTS, NAMED, REFUSED, RIGHT, WRONG, Verdict, judge

OUT = Path("bench/results/zoo.md")


def verdicts(cases: Iterable[tuple[str, Callable[[], Case]]]) -> list[Verdict]:
    """Judge these, one after the other, with a line on stderr for each."""
    out = []
    for name, make in cases:
        started = time.perf_counter()
        try:
            verdict = judge(make())
        except ImportError as error:
            harness.say(f"{name}: skipped, {error}")
            continue
        except Exception as error:
            verdict = Verdict(name, "does not run")
            verdict.say("heads", WRONG, f"the zoo itself: {type(error).__name__}: {str(error)[:200]}")
        harness.say(f"{name}: {_short(verdict)} {time.perf_counter() - started:.1f} s")
        out.append(verdict)
    return out


def _short(verdict: Verdict) -> str:
    return " ".join(f"{verdict.outcomes.get(aspect, ''):>7}" for aspect in ASPECTS)


def report(judged: list[Verdict]) -> str:
    """The table, the counts, and what is wrong by name."""
    rows = [[v.theme, v.name, *(_cell(v, aspect) for aspect in ASPECTS)] for v in judged]
    counts = {aspect: Counter(v.outcomes.get(aspect, "") for v in judged) for aspect in ASPECTS}
    totals = [[outcome, *(counts[aspect][outcome] for aspect in ASPECTS)] for outcome in (RIGHT, NAMED, REFUSED, WRONG)]
    wrong = [verdict for verdict in judged if verdict.wrong]
    lines = [f"- **{v.name}**: {'; '.join(v.wrong)}" for v in wrong]
    other = [
        f"- {v.name}: " + "; ".join(f"{a} {v.outcomes[a]}: {r}" for a, r in v.reasons.items() if v.outcomes[a] in (NAMED, REFUSED))
        for v in judged
        if any(v.outcomes[a] in (NAMED, REFUSED) for a in v.reasons)
    ]
    return "\n\n".join(
        [
            f"{len(judged)} models, {len(wrong)} silently wrong in something.",
            harness.table(["", *ASPECTS], totals),
            harness.table(["theme", "model", *ASPECTS], rows),
            "Wrong:",
            "\n".join(lines) or "none",
            "Named or refused:",
            "\n".join(other) or "none",
        ]
    )


def _cell(verdict: Verdict, aspect: str) -> str:
    outcome = verdict.outcomes.get(aspect, "")
    return "**WRONG**" if outcome == WRONG else outcome


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.zoo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", nargs="*", metavar="NAME", help="parts of names; default all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cases = dict(handwritten.CASES)
    chosen = [(n, make) for n, make in cases.items() if not options.name or any(part in n for part in options.name)]
    if not chosen:
        parser.error(f"no model of the zoo has {' or '.join(options.name)} in its name")
    judged = verdicts(chosen)
    text = report(judged)
    print(text)
    if not options.name:
        OUT.write_text(f"## zoo: {(__doc__ or '').splitlines()[0]}\n\n{text}\n\n{harness.machine('python -m bench.zoo')}\n")
        harness.say(f"written to {OUT}")
    sys.exit(any(verdict.wrong for verdict in judged))


if __name__ == "__main__":
    main()
