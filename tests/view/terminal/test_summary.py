"""The summary: letters that are true, nothing invented from nan, every terminal."""

import io
import math

import torch
from rich.console import Console

from manyheads.heads.table import HeadTable, Row
from manyheads.view.terminal.summary import heat_map, summary, summary_text, target_of


def table(heads, kind="self", site="encoder.layer.{}.attention"):
    """A table of metrics by (layer, head), each seen on ten tokens."""
    rows = [Row(site.format(layer), layer, head, head, head, kind) for layer, head in heads]
    names = {name: None for values in heads.values() for name in values}
    sums = {
        name: torch.tensor(
            [[10.0, 10 * v.get(name, 0.0), 10 * v.get(name, 0.0) ** 2] for v in heads.values()]
        ).T
        for name in names
    }
    return HeadTable(rows, torch.full((len(rows),), 10.0), sums)


def even(**more):
    return {"entropy_normalised": 0.9, "previous": 0.1, "output_norm": 1.0} | more


def drawn(found, width=100, colour=None, encoding="utf-8", **about):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    summary(
        found, Console(file=stream, width=width, color_system=colour, force_terminal=bool(colour)), **about
    )
    stream.flush()
    return stream.buffer.getvalue().decode(encoding).splitlines()


def test_each_head_stands_in_its_place_with_its_letter():
    lines = drawn(table({
        (0, 0): even(), (0, 1): even(previous=0.8, entropy_normalised=0.1), (0, 2): even(),
        (1, 0): even(), (1, 2): even(previous=0.5),
    }), title="Tiny")  # fmt: skip
    assert lines[0] == "Tiny"
    assert lines[2] == "self encoder.layer.*.attention: 2 layers, 5 heads"
    assert lines[4:7] == ["  layer   head 0  1  2", "      0        ░  █p ░", "      1        ░     ░p"]
    assert [line.split() for line in lines if "previous token" in line] == [
        ["p", "attend", "to", "the", "previous", "token", "2", "0.1", "80%", "1.2", "50%"]
    ]


def test_where_a_head_looks():
    assert target_of({"previous": 0.39}) is None
    assert target_of({"previous": 0.41}).letter == "p"
    assert target_of({"self": math.nan, "special": 0.5}).letter == "x"
    assert target_of({"first": 0.5, "special": 0.6}).letter == "f"
    # rare tokens that are a third of the text get more than a third of the attention from anybody
    assert target_of({"rare": 0.5}, {"rare": 0.33}) is None
    assert target_of({"rare": 0.7}, {"rare": 0.33}).letter == "r"
    assert target_of({"rare": 1.0}, {"rare": 0.8}).letter == "r"


def test_what_else_stands_out():
    heads = {(0, n): even(effective_keys=5.0 + n, distance=2.0 + n) for n in range(7)}
    heads[0, 3] = even(entropy_normalised=0.97, effective_keys=1.25, distance=30.0)
    heads[0, 5] = even(output_norm=0.2, effective_keys=9.0, distance=1.0)
    lines = drawn(table(heads))
    assert "0.3 97%" in next(line for line in lines if "almost evenly" in line)
    assert "0.5 20%" in next(line for line in lines if "say little" in line)
    narrow = next(line for line in lines if "narrowest" in line)
    assert narrow.index("0.3 1.2") < narrow.index("0.0 5.0") < narrow.index("0.1 6.0")
    far = next(line for line in lines if "farthest" in line)
    assert far.index("0.3 30.0") < far.index("0.6 8.0")


def test_stacks_are_told_apart():
    both = table({(0, 0): even()}), table({(0, 0): even(previous=math.nan)}, "cross", "decoder.{}.cross")
    joined = HeadTable(
        both[0].rows + both[1].rows,
        torch.cat([t.tokens for t in both]),
        {name: torch.cat([t.sums[name] for t in both], 1) for name in both[0].sums},
    )
    lines = drawn(joined)
    assert "self encoder.layer.*.attention: 1 layer, 1 heads" in lines
    assert "cross decoder.*.cross: 1 layer, 1 heads" in lines
    assert not [line for line in lines if "nan" in line]


def test_it_fits_every_terminal():
    wide = table({(layer, head): even(previous=head / 40) for layer in range(3) for head in range(40)})
    for width in (30, 60, 80, 200):
        for colour in (None, "truecolor"):
            lines = drawn(wide, width, colour)
            plain = [line if colour is None else "".join(visible(line)) for line in lines]
            assert max(map(len, plain)) <= width
    assert any("heads 18 to 39 do not fit here" in line for line in map(str, drawn(wide, 32)))


def visible(line):
    """The characters between the colours."""
    escaped = False
    for character in line:
        if character == "\x1b":
            escaped = True
        elif not escaped:
            yield character
        elif character == "m":
            escaped = False


def test_colours_say_how_narrow():
    console = Console(file=io.StringIO(), color_system="truecolor", force_terminal=True)
    rows = list(table({(0, 0): even(entropy_normalised=1.0), (0, 1): even(entropy_normalised=0.0)}))
    line = heat_map(rows, console, 80)[1]
    dark, bright = (span.style.bgcolor.triplet for span in line.spans if getattr(span.style, "bgcolor", None))
    assert sum(dark) < sum(bright)


def test_a_terminal_without_unicode():
    lines = drawn(table({(0, 0): even(previous=0.9)}), encoding="ascii", notes=["something was missed"])
    assert "      0        .p" in lines
    assert lines[-1] == "Note: something was missed"


def test_the_text_has_no_colours():
    assert "\x1b" not in summary_text(table({(0, 0): even()}), title="Tiny")


def test_no_color_is_obeyed_by_shades(monkeypatch):
    """A terminal with colours, and a person who wants none: heads still look different."""
    monkeypatch.setenv("NO_COLOR", "1")
    spread = (0.1, 0.35, 0.6, 0.9)
    told = drawn(
        table({(0, head): even(entropy_normalised=x) for head, x in enumerate(spread)}), colour="truecolor"
    )
    line = next(line for line in told if "█" in line)
    assert {"█", "▓", "▒", "░"} <= set(line)
