"""Maps as characters and as a picture: every weight at its place, whatever the terminal and the tokens."""

import io

import matplotlib.image
import pytest
import torch
from rich.console import Console

from manyheads.view import text_maps
from manyheads.view.colour import RAMP, colour
from manyheads.view.figures import attention_maps


def console(colours, width=80, encoding="utf-8"):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    return Console(file=file, color_system="truecolor" if colours else None, width=width, force_terminal=True)


def test_brighter_is_more():
    shades = [sum(colour(weight / 50)) for weight in range(51)]
    assert shades == sorted(set(shades))
    assert colour(-1e-9) == RAMP[0]
    assert colour(1.0000001) == RAMP[-1]


def test_two_rows_to_a_coloured_line():
    weights = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.25, 0.75]])
    lines = text_maps.small(weights, console(True))
    assert [line.plain for line in lines] == ["▀▀", "▀▀"]
    upper, lower = lines[0].spans[0].style, lines[0].spans[1].style
    assert tuple(upper.color.triplet) == colour(1.0)
    assert tuple(upper.bgcolor.triplet) == colour(0.0)
    assert tuple(lower.bgcolor.triplet) == colour(1.0)
    assert lines[1].spans[0].style.bgcolor is None  # there is no fourth row


def test_no_color_is_obeyed_by_shades(monkeypatch):
    """A terminal with colours, and a person who wants none: different weights still look different."""
    monkeypatch.setenv("NO_COLOR", "1")
    weights = torch.tensor([[1.0, 0.5, 0.2, 0.1, 0.0]])
    plain = console(True)
    assert text_maps.small(weights, plain)[0].plain == "█▓▒░ "
    assert len(set(text_maps.large(weights.expand(5, 5), list("abcde"), plain, 60)[1].plain.split()[-1])) > 2
    assert "█" in text_maps.scale(plain).plain


def test_shades_where_there_are_no_colours():
    weights = torch.tensor([[1.0, 0.5, 0.2, 0.1, 0.0]])
    assert text_maps.small(weights, console(False))[0].plain == "█▓▒░ "
    assert text_maps.small(weights, console(False, encoding="ascii"))[0].plain == "#*:. "


@pytest.mark.parametrize("width", [10, 17, 80, 200])
def test_a_grid_fits_the_width_and_shows_every_map(width):
    maps = [torch.eye(5) for _ in range(7)]
    lines = text_maps.grid(maps, [f"head {n}" for n in range(7)], console(False), width)
    assert max(line.cell_len for line in lines) <= width
    text = "\n".join(line.plain for line in lines)
    assert [n for n in range(7) if f"head {n}" in text] == list(range(7))
    assert text.count("█") == 35


def test_a_large_map_has_its_tokens():
    tokens = ["[CLS]", "我", "##ing", "[SEP]"]
    lines = text_maps.large(torch.eye(4), tokens, console(False), 60)
    assert [line.plain.split()[0] for line in lines[1:]] == tokens
    assert lines[2].plain.index("██") > lines[1].plain.index("██")
    assert {line.cell_len for line in lines[1:]} == {lines[1].cell_len}  # wide characters do not shift it


def bright(path, query, key):
    """Draw one weight of 1, in layer 1 and head 2, and say where it shines: shares of height and width."""
    weights = [torch.zeros(3, 2, 2) for _ in range(2)]
    weights[1][2, query, key] = 1.0
    attention_maps.draw(weights, ["a", "b"], path, "two layers")
    picture = torch.tensor(matplotlib.image.imread(path))[..., :3]
    found = (picture - torch.tensor(RAMP[-1]) / 255).abs().sum(-1) < 0.02
    rows, columns = found[:, : int(picture.shape[1] * 0.94)].nonzero(as_tuple=True)  # left of the scale
    return rows.float().mean() / picture.shape[0], columns.float().mean() / picture.shape[1]


def test_the_picture_shows_the_weights(tmp_path):
    path = tmp_path / "new" / "heads.png"
    upper, right = bright(path, 0, 1)
    lower, left = bright(path, 1, 0)
    assert 0.5 < upper < lower  # the second layer; the first query at the top
    assert 0.5 < left < right  # the third head; the first key at the left
    assert [each.name for each in path.parent.iterdir()] == ["heads.png"]


def test_uneven_layers_and_any_token(tmp_path):
    tokens = ["$x$", "我", "🎉", "a_b", "\\frac"]
    weights = [torch.eye(5).expand(2, 5, 5), torch.eye(5).expand(3, 5, 5)]
    attention_maps.draw(weights, tokens, tmp_path / "heads.png", "costs $5 and $6 ^_^")
    assert (tmp_path / "heads.png").stat().st_size > 1000


def test_a_failure_leaves_no_half_written_picture(tmp_path, monkeypatch):
    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("manyheads.common.whole_files.os.replace", full_disk)
    with pytest.raises(OSError, match="No space left"):
        attention_maps.draw([torch.eye(3)[None]], ["a", "b", "c"], tmp_path / "heads.png", "")
    assert not list(tmp_path.iterdir())
