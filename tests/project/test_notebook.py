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


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Returns its cells of code after running all, in a process of their own."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    folder: Path = tmp_path_factory.mktemp("notebook")
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


@pytest.mark.filterwarnings("ignore")  # of zmq and of IPython
@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('fp32=["softmax"])', ["<pre>", "linear", "LOW"]),
        ("rec", ["<table", "linear", "FLOPs"]),
        ("comparison", ["<table", "effect"]),
        ("best", ["evaluations"]),
    ],
)
def test_objects_show_themselves_as_tables(cells: list[Any], source: str, words: list[str]) -> None:
    """Policy, record, comparison and what tune finds."""
    html = shown(cells, source, "text/html")
    assert [word for word in words if word not in html] == []


def test_it_is_kept_without_outputs() -> None:
    """They would be of somebody's machine."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells)
    assert all(cell.get("execution_count") is None for cell in notebook.cells)
