"""The verdict on cost follows from the slopes of time and memory."""

import pytest

from manyheads.studies.attention_cost import CHEAP, EXACT, verdict
from manyheads.studies.result import Result

LENGTHS = (256, 512, 1024, 2048)


def result(times, memories, noise=0.0):
    rows = []
    for kind in (*EXACT, *CHEAP):
        for seed in range(3):
            for length in LENGTHS:
                factor = 1 + noise * seed * (length == LENGTHS[-1])
                overhead = 1e5 if kind == "window" else 1
                rows.append(
                    {
                        "kind": kind, "length": length, "seed": seed,
                        "seconds": overhead * factor * length ** times[kind],
                        "bytes": length ** memories[kind],
                    }
                )  # fmt: skip
    return Result("attention_cost", "quick", {}, rows, complete=True)


def exponents(exact, cheap):
    return dict.fromkeys(EXACT, exact) | dict.fromkeys(CHEAP, cheap)


@pytest.mark.parametrize(
    ("times", "memories", "noise", "expected"),
    [
        (exponents(2, 1), exponents(2, 1), 0.0, "holds"),
        (exponents(2, 1), exponents(2, 1) | {"fused": 1}, 0.0, "holds in part"),
        (exponents(1, 2), exponents(1, 2), 0.0, "does not hold"),
        (exponents(1.5, 1.5), exponents(1, 2), 3.0, "cannot be told"),
    ],
)
def test_verdict(times, memories, noise, expected):
    assert verdict(result(times, memories, noise)).verdict == expected


def test_where_the_lines_cross():
    """1e5 n < n^2.6 from n = 1334 on; n < n^2.6 always, n^3 never."""
    because = verdict(result(exponents(2.6, 1) | {"linear": 3}, exponents(2, 1))).because.en
    assert "from this length on: window 2048, chunks 256, window and global 256, linear -." in because
