"""A small document made by hand: every number in it is known. Prime sizes, uneven layers."""

import base64
import struct
from typing import Any

from manyheads.view.document.contract import VERSION

SIZES = (5, 3, 3)  # heads of each layer
N = sum(SIZES)
TOKENS = ("[CLS]", "light", "##house", "灯塔", "مرحبا", "👩‍👩‍👧‍👦", "[SEP]")
LONG = 53


def packed(dtype: str, shape: list[int], values: list[float]) -> dict[str, Any]:
    letter = {"uint8": "B", "uint16": "H", "float32": "f"}[dtype]
    numbers = values if dtype == "float32" else [round(value) for value in values]
    return {
        "dtype": dtype,
        "shape": shape,
        "data": base64.b64encode(struct.pack(f"<{len(numbers)}{letter}", *numbers)).decode(),
    }


def weight(head: int, query: int, key: int, length: int) -> float:
    """Attention of a head: half on one key, the rest the same everywhere."""
    return 0.5 * (key == (query * 3 + head) % length) + 0.5 / length


def token(text: str) -> dict[str, Any]:
    if text.startswith("["):
        return {"text": text, "shown": text, "mark": "special"}
    if text.startswith("##"):
        return {"text": text, "shown": text[2:], "mark": "joined"}
    return {"text": text, "shown": text, "mark": None}


def example(title: str, texts: tuple[str, ...], exact: tuple[int, ...] | None = None) -> dict[str, Any]:
    """exact: which head numbers have their exact map; all of them if nothing is said."""
    length = len(texts)
    side = min(length, 48)
    maps = []
    start = 0
    for layer, size in enumerate(SIZES):
        heads = range(start, start + size)
        rows = [[weight(head, q, k, length) for q in range(length) for k in range(length)] for head in heads]
        peak = [max(row) for row in rows]
        small = [
            255 * weight(head, q, k, length) / top
            for head, top in zip(heads, peak, strict=True)
            for q in range(side)
            for k in range(side)
        ]
        one: dict[str, Any] = {
            "site": f"layer.{layer}.attention",
            "queries": "self",
            "keys": "self",
            "thumbnails": packed("uint8", [size, side, side], small),
            "peak": peak,
            "exact": {
                str(number): packed("uint16", [length, length], [65535 * x for x in row])
                for number, row in enumerate(rows)
                if exact is None or number in exact
            },
        }
        if exact is not None:
            blocks = -(-length // 2)
            one["pooled"] = packed("uint8", [size, blocks, blocks], [128] * (size * blocks * blocks))
            one["row_size"] = one["column_size"] = 2
        maps.append(one)
        start += size
    return {
        "kind": "text",
        "title": title,
        "tokens": {"self": [token(text) for text in texts]},
        "picture": None,
        "maps": maps,
        "pipeline": None,
        "answer": None,
        "silenced": None,
    }


def document() -> dict[str, Any]:
    layer = [number for number, size in enumerate(SIZES) for _ in range(size)]
    head = [number for size in SIZES for number in range(size)]
    metrics = {
        "entropy": [0.5 + 0.31 * ((i * 7) % N) for i in range(N)],
        "confidence": [0.05 + 0.083 * ((i * 5) % N) for i in range(N)],
        "first": [0.9 if i in (2, 7) else 0.01 * i for i in range(N)],
        "special": [0.08 * i for i in range(N)],
        "previous": [0.05 * (N - i) for i in range(N)],
    }
    measured = {
        name: {"mean": mean, "se": [0.001 * (i + 1) for i in range(N)]} for name, mean in metrics.items()
    }
    measured["entropy"]["mean"][4] = measured["entropy"]["se"][4] = None
    roles = [
        [
            {
                "role": "sink",
                "score": 0.9 if i in (2, 7) else 0.1,
                "baseline": 0.14,
                "cases": 211,
                "claimed": i in (2, 7),
            },
            {
                "role": "induction",
                "score": 0.7 if i == 9 else 0.0,
                "baseline": 0.05,
                "cases": 101,
                "claimed": i == 9,
            },
        ]
        for i in range(N)
    ]
    importance = [0.001 * (1 + (i * 3) % N) for i in range(N)]
    first = example("a light house", TOKENS)
    first["answer"] = {"kind": "next", "items": [["cat", 0.31], ["dog", 0.17]]}
    first["silenced"] = {
        "change": [0.01 * i for i in range(N)],
        "answer": [[["cat", 0.01 * i], ["cow", 0.2]] for i in range(N)],
    }
    return {
        "version": VERSION,
        "header": {
            "manyheads": "0.1.0",
            "model": "hand-made",
            "fingerprint": "f" * 40,
            "corpus": "seven tokens",
            "units": 4243,
            "unit": "tokens",
            "notes": ["made by hand"],
            "stopped": False,
        },
        "heads": {
            "site": [f"layer.{number}.attention" for number in layer],
            "layer": layer,
            "head": head,
            "original_head": head,
            "kv_head": head,
            "kind": ["self"] * N,
            "name": [f"{a}.{b}" for a, b in zip(layer, head, strict=True)],
            "tokens": [4243.0] * N,
            "metrics": measured,
            "labels": {},
        },
        "stacks": [
            {
                "name": "layer.*.attention",
                "kind": "self",
                "layers": [
                    {
                        "layer": number,
                        "site": f"layer.{number}.attention",
                        "heads": [i for i in range(N) if layer[i] == number],
                    }
                    for number in range(len(SIZES))
                ],
            }
        ],
        "profiles": {"offsets": [-3, -1, 0, 1, 3], "mass": packed("uint16", [N, 5], [65535 * 0.2] * (5 * N))},
        "roles": {
            "names": ["sink", "induction"],
            "says": {},
            "against": {},
            "heads": roles,
            "not_judged": {"syntactic": "no treebank was given"},
        },
        "importance": {"fisher": {"mean": importance, "se": [value / 7 for value in importance]}},
        "redundancy": {
            "x": [0.1 * i for i in range(N)],
            "y": [0.0] * N,
            "cluster": [0, 0, *range(1, N - 1)],
            "twin": [(i + 1) % N for i in range(N)],
            "twin_distance": [0.03 * (i + 1) for i in range(N)],
            "nearest": [[[(i + 1) % N, 0.03 * (i + 1)], [(i + 2) % N, 0.5]] for i in range(N)],
            "matrix": None,
            "layers": [],
        },
        "curve": None,
        "groups": {"special": "[CLS], [SEP]"},
        "examples": [first, example("a long one", tuple(f"w{i}" for i in range(LONG)), exact=(0,))],
    }
