"""The figure of heads that change."""

import pytest

from manyheads.training.dynamic_heads import Act
from manyheads.view.figures.head_history import draw

HISTORY = [(0, {"a": 5, "b": 5}), (10, {"a": 3, "b": 5}), (20, {"a": 3, "b": 6})]
ACTS = [
    Act(10, "cut", "a", 0, (1, 2), "it costs nothing"),
    Act(15, "reseed", "b", 1, (0,), "it is dead"),
    Act(20, "add", "b", 1, (5,), "every head here matters"),
    Act(25, "none", "", -1, (), "the copy differs"),
]


def test_the_figure_is_written_as_its_name_says(tmp_path):
    draw(HISTORY, ACTS, 30, tmp_path / "heads.png")
    assert (tmp_path / "heads.png").read_bytes().startswith(b"\x89PNG")
    draw(HISTORY, [], 30, tmp_path / "heads.svg")
    assert "<svg" in (tmp_path / "heads.svg").read_text(encoding="utf-8")


def test_other_names_and_nothing_to_draw_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"path: got .*heads.gif'; expected a name that ends with"):
        draw(HISTORY, ACTS, 30, tmp_path / "heads.gif")
    with pytest.raises(ValueError, match="no step was made yet"):
        draw([], [], 0, tmp_path / "heads.png")
