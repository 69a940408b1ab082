"""The notebook of examples/ runs from the top, and shows what a reader expects to see."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from .test_examples import EXAMPLES

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

NOTEBOOK = EXAMPLES / "hmpx.ipynb"


def ran(folder: Path) -> list[Any]:
    """Returns its cells of code after running all, in a process of their own."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    client = nbclient.NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": str(folder)}}, kernel_name="python3"
    )
    client.execute(env={**os.environ, "OMP_NUM_THREADS": "1", "IPYTHONDIR": str(folder)})
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(cells: list[Any], source: str, kind: str) -> str:
    """Returns what the one cell shows whose source ends so."""
    (cell,) = (cell for cell in cells if cell.source.endswith(source))
    return "\n".join(
        str(output.data[kind]) for output in cell.outputs if kind in output.get("data", {})
    )


#: The end of a cell -> words that it shows: policy, record, comparison and the result of `tune`.
SHOWN = {
    'fp32=["softmax"])': ["<pre>", "linear", "LOW"],
    "rec": ["<table", "linear", "FLOPs"],
    "comparison": ["<table", "effect"],
    "best": ["evaluations"],
}


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore")  # of zmq and of IPython
def test_objects_show_themselves_as_tables(tmp_path: Path) -> None:
    cells = ran(tmp_path)
    for source, words in SHOWN.items():
        html = shown(cells, source, "text/html")
        assert [word for word in words if word not in html] == [], source


def test_it_is_kept_without_outputs() -> None:
    """They would be of somebody's machine."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells)
    assert all(cell.get("execution_count") is None for cell in notebook.cells)
