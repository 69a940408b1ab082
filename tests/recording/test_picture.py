"""DOT text and pictures: colours, boxes, escapes, files, and what is said where graphviz is missing."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hmpx
from hmpx import Drawing, OptionError
from hmpx.recording import Edge, Node, graph

#: Names that must not become DOT, HTML or SVG.
HOSTILE = [
    'quote " and \\ backslash',
    "\\N \\G \\l ends\\",
    "<b>bold</b> &amp; &lt; &#60;",
    'x"]; evil [label="y',
    "two\nlines\r\ttab",
    "\x00\x1b[31m\ud800",
    "naïve 注意 ⚠",
    "}; subgraph cluster_9 { //",
    "",
]


def drawn(name: str) -> Drawing:
    """Returns a drawing in which everything has that name."""
    inside = name.replace(".", "") or "m"
    nodes = (
        Node("n1", "parameter", name, "bf16", (2,), inside),
        Node("n0", "op", name, "fp32", (2, 2), inside, location=name, reason=name),
        Node("n2", "op", "mul", "fp32", (), inside),
        Node("out0", "output", f"output[{name!r}]", "fp32"),
    )
    edges = (Edge("n1", "n0", "bf16"), Edge("n0", "n2"), Edge("n2", "out0", name))
    return Drawing(nodes, edges, classes={inside: name}, formats=frozenset([name]))


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_stay_names(name: str) -> None:
    """In the DOT text each is one quoted string."""
    text = drawn(name).dot
    text.encode("utf-8")
    assert "\x00" not in text
    for line in text.splitlines():  # outside of strings nothing of it is left
        bare, outside, is_inside = line.replace("\\\\", "").replace('\\"', ""), "", False
        if "<table" in bare:
            continue
        for character in bare:
            is_inside ^= character == '"'
            outside += "" if is_inside else character
        assert not is_inside, line
        assert "evil" not in outside and "cluster_9" not in outside


needs_dot = pytest.mark.skipif(shutil.which("dot") is None, reason="graphviz's dot makes pictures")


class Two(nn.Module):
    """A module in a module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"fc": nn.Linear(2, 2)})

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.inner["fc"](x), -1)


def drawing() -> Drawing:
    with hmpx.convert(device_types={"cpu"}, legalize="never"):
        return hmpx.draw(Two(), torch.ones(1, 2))


def line_with(text: str, words: str) -> str:
    (found,) = [line for line in text.splitlines() if words in line]
    return found


def test_nodes_have_the_colours_of_their_types_and_boxes_those_of_modules() -> None:
    """A legend names the types; modules that hold one module share its box."""
    text = drawing().dot
    assert f'fillcolor="{graph.COLOURS["bf16"][0]}"' in line_with(text, 'label="linear')
    assert f'fillcolor="{graph.COLOURS["fp32"][0]}"' in line_with(text, 'label="softmax')
    assert 'shape="diamond"' in line_with(text, 'label="bf16\\nfp32"')
    assert text.count("subgraph cluster_") == 1
    box = text[text.index("subgraph cluster_0") :]
    box = box[: box.index("\n    }")]
    assert 'label="inner.fc  Linear"' in box
    assert 'label="linear' in box and 'label="weight' in box and 'label="softmax' not in box
    assert "<td bgcolor=" in text


def test_what_is_legalized_is_dashed() -> None:
    """And says how it computes."""
    with hmpx.convert(device_types={"cpu"}, legalize="always"):
        text = hmpx.draw(Two(), torch.ones(1, 2)).dot
    line = line_with(text, 'label="linear')
    assert "bf16 via fp32" in line and "dashed" in line


def test_dot_text_is_saved_without_graphviz(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pictures say what to install."""
    monkeypatch.setitem(sys.modules, "graphviz", None)
    found = drawing()
    assert found.save(tmp_path / "graph.dot").read_text("utf-8") == found.dot
    with pytest.raises(OptionError) as raised:
        found.save(tmp_path / "graph.svg")
    assert str(raised.value) == (
        "pictures need the Python package graphviz: pip install 'hmpx[draw]'; drawing.dot needs none"
    )
    assert found._repr_svg_() is None
    assert not (tmp_path / "graph.svg").exists()


@needs_dot
def test_pictures_are_saved(tmp_path: Path) -> None:
    """The suffix decides."""
    found = drawing()
    assert found.save(tmp_path / "graph.svg").read_text("utf-8").startswith("<?xml")
    assert found.save(str(tmp_path / "graph.PNG")).read_bytes()[1:4] == b"PNG"
    assert (found._repr_svg_() or "").startswith("<?xml")
    assert repr(found) == "<hmpx.Drawing: 2 ops, 3 casts, 2 leaves>"


def test_other_files_are_refused(tmp_path: Path) -> None:
    """A suffix that is unknown, a folder that is not there."""
    with pytest.raises(OptionError, match=r"path must end in one of .svg, .png, .pdf, .dot, .gv"):
        drawing().save(tmp_path / "graph.jpg")
    with pytest.raises(OptionError, match=r"can't write .*graph.dot: No such file"):
        drawing().save(tmp_path / "nowhere" / "graph.dot")
    with pytest.raises(OptionError, match="path must be a string or a path, not 3"):
        drawing().save(3)  # type: ignore[arg-type]
