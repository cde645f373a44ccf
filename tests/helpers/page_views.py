"""The document of `made` with something for every view: pipeline, distances, curve, picture, alignment."""

import base64
import math
import struct
import zlib
from typing import Any

from tests.helpers.page_document import SIZES, TOKENS, N, document, packed, token, weight

WIDTH = 3  # of a head
ROWS, COLUMNS, FIRST = 3, 5, 1  # patches of the picture, and the class token before them
KEYS = FIRST + ROWS * COLUMNS
SOURCE = ("three", "and", "twenty", "<b>", ".")
TARGET = ("<start>", "dreiund", "zwanzig")
KEPT = [1.0, 0.75, 0.5, 0.25]


def value(seed: int, *at: int) -> float:
    """A number of either sign that nothing else in the document has."""
    return round(math.sin(1.7 * seed + sum((7 * i + 3) * place for i, place in enumerate(at))), 4)


def matrix(seed: int, rows: int, columns: int, *at: int) -> list[list[float]]:
    return [[value(seed, *at, row, column) for column in range(columns)] for row in range(rows)]


def pipeline() -> list[dict[str, Any]]:
    """Of the first layer: five heads, seven tokens."""
    length, heads = len(TOKENS), SIZES[0]
    site = "layer.0.attention"
    steps: list[dict[str, Any]] = [
        {"step": "tokens", "shape": [length], "values": [token(text)["shown"] for text in TOKENS]},
        {"step": "ids", "shape": [length], "values": [101 + 13 * i for i in range(length)]},
    ]
    for seed, name in enumerate(("embedding", "positions", "input")):
        steps.append(
            {"step": name, "shape": [length, heads * WIDTH], "values": matrix(seed, length, heads * WIDTH)}
        )
    for seed, name in enumerate(("query", "key", "value", "heads"), 5):
        values = [matrix(seed, length, WIDTH, head) for head in range(heads)]
        steps.append({"step": name, "site": site, "shape": [heads, length, WIDTH], "values": values})
    scores = [matrix(9, length, length, head) for head in range(heads)]
    scores[3][0][length - 1] = None  # type: ignore[call-overload]  # hidden by a mask
    steps.append({"step": "scores", "site": site, "shape": [heads, length, length], "values": scores})
    weights = [
        [[weight(head, q, k, length) for k in range(length)] for q in range(length)] for head in range(heads)
    ]
    steps.append({"step": "weights", "site": site, "shape": [heads, length, length], "values": weights})
    for seed, name in enumerate(("joined", "projected"), 11):
        steps.append(
            {"step": name, "shape": [length, heads * WIDTH], "values": matrix(seed, length, heads * WIDTH)}
        )
    return steps


def distance(a: int, b: int) -> float:
    return 0.0 if a == b else 0.1 + 0.07 * ((a + b) % N)


def png(width: int, height: int) -> str:
    """A grey picture, brighter to the right."""
    row = b"\0" + bytes(round(255 * x / width) for x in range(width))
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(row * height)),
        (b"IEND", b""),
    )
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in chunks
    )
    return "data:image/png;base64," + base64.b64encode(data).decode()


def maps(site: str, heads: range, rows: int, columns: int, axes: tuple[str, str]) -> dict[str, Any]:
    every = [[weight(head, q, k, columns) for q in range(rows) for k in range(columns)] for head in heads]
    peak = [max(one) for one in every]
    small = [255 * x / top for one, top in zip(every, peak, strict=True) for x in one]
    return {
        "site": site,
        "queries": axes[0],
        "keys": axes[1],
        "thumbnails": packed("uint8", [len(heads), rows, columns], small),
        "peak": peak,
        "exact": {
            str(i): packed("uint16", [rows, columns], [65535 * x for x in one]) for i, one in enumerate(every)
        },
    }


def layers() -> list[tuple[str, range]]:
    """Site and heads of each layer."""
    starts = [sum(SIZES[:layer]) for layer in range(len(SIZES))]
    sizes = zip(starts, SIZES, strict=True)
    return [(f"layer.{layer}.attention", range(at, at + size)) for layer, (at, size) in enumerate(sizes)]


def picture_example() -> dict[str, Any]:
    places = [f"{i // COLUMNS},{i % COLUMNS}" for i in range(ROWS * COLUMNS)]
    return {
        "kind": "image",
        "title": "a grey picture",
        "tokens": {"self": [token("[+0]"), *(token(place) for place in places)]},
        "picture": {"png": png(50, 30), "rows": ROWS, "columns": COLUMNS, "first": FIRST},
        "maps": [maps(site, heads, KEYS, KEYS, ("self", "self")) for site, heads in layers()],
    }


def pair_example() -> dict[str, Any]:
    """The last layer is the cross-attention."""
    site, heads = layers()[-1]
    return {
        "kind": "pair",
        "title": "a translation",
        "tokens": {"source": [token(text) for text in SOURCE], "target": [token(text) for text in TARGET]},
        "maps": [maps(site, heads, len(TARGET), len(SOURCE), ("target", "source"))],
    }


def everything() -> dict[str, Any]:
    made = document()
    made["heads"]["metrics"]["distance"] = {
        "mean": [1.1 + 0.3 * ((i * 4) % N) for i in range(N)],
        "se": [0.01] * N,
    }
    redundancy = made["redundancy"]
    redundancy["x"] = [math.cos(2.4 * i) * i for i in range(N)]
    redundancy["y"] = [math.sin(2.4 * i) * i for i in range(N)]
    redundancy["cluster"] = [0, 0, 0, 1, 1, 2, 3, 4, 5, 6, 7]
    redundancy["matrix"] = packed(
        "uint16", [N, N], [65535 * distance(a, b) for a in range(N) for b in range(N)]
    )
    redundancy["layers"] = [
        {"layer": layer, "site": site, "diversity": 0.3 + 0.11 * layer}
        for layer, (site, _) in enumerate(layers())
    ]
    made["curve"] = {
        "quality": "cosine",
        "lines": [
            {"name": "fisher", "kept": KEPT, "mean": [1.0, 0.97, 0.91, 0.7]},
            {
                "name": "random",
                "kept": KEPT,
                "mean": [1.0, 0.9, 0.73, 0.41],
                "se": [0.0, 0.01, 0.02, 0.03],
            },
        ],
    }
    made["examples"][0]["pipeline"] = pipeline()
    made["examples"] += [picture_example(), pair_example()]
    return made
