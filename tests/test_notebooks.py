"""The notebooks of the docs run from top to bottom, are saved with their outputs, and link to pages."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))


def read(path):
    return nbformat.read(path, as_version=4)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads that wait for those of other tests are slow
    NotebookClient(read(path), timeout=None, resources={"metadata": {"path": str(tmp_path)}}).execute()


def test_there_are_six():
    assert len(NOTEBOOKS) == 6


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_saved_notebook_has_pictures_and_no_errors(path):
    outputs = [output for cell in read(path).cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [
        output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_of_a_notebook_lead_somewhere(path):
    text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    links = [part.partition(")")[0] for part in text.split("](")[1:]]
    assert not [link for link in links if not (path.parent / link).exists()]
    assert links
