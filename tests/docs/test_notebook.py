"""The notebooks run, and their stored outputs are of what they compute."""

import nbformat
import pytest
from nbclient import NotebookClient

from depthlm.locations import REPOSITORY


def kinds(notebook: nbformat.NotebookNode) -> list[list[str]]:
    """Return the kind of each output of each cell."""
    return [
        ["image/png" if "image/png" in output.get("data", {}) else output.output_type for output in cell.outputs]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pictures", "steps", "fewer"),
    [("across_depth", 4, "max_steps=60", "max_steps=5"), ("low_rank_theory", 2, "3, 100, 1000", "3, 100, 300")],
)
def test_a_notebook_runs(tmp_path, monkeypatch, name, pictures, steps, fewer):
    # the folder of the runs
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = nbformat.read(REPOSITORY / f"docs/notebooks/{name}.ipynb", as_version=4)
    stored = kinds(notebook)
    # the steps take most of the time
    assert any(steps in cell.source for cell in notebook.cells)
    for cell in notebook.cells:
        cell.source = cell.source.replace(steps, fewer)
    NotebookClient(notebook, timeout=300).execute()
    assert kinds(notebook) == stored
    assert sum("image/png" in outputs for outputs in stored) == pictures
