"""The data of a picture: ops, casts, parameters, and the tensors between them; and its DOT text."""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from ..errors import fielded, printable
from ..reports import size

#: The kinds of nodes: an op; a cast or a rounding; a named leaf of the graph, or another leaf; a tensor
#: given by the user; everything beyond ``max_nodes``; or, only in pictures, modules similar to the one before.
Kind = Literal["op", "cast", "parameter", "input", "output", "cut", "fold"]

LEAVES: Final = frozenset({"parameter", "input"})


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that autograd keeps for the backward.

    Attributes:
        dtype: Its dtype: ``"bf16"``.
        shape: Its shape; None if unknown.
        bytes: The bytes of its elements, even if other nodes keep the same memory.
    """

    dtype: str
    shape: tuple[int, ...] | None
    bytes: int


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the picture.

    Attributes:
        id: Its name in DOT.
        kind: ``"op"``, ``"cast"``, ``"parameter"``, ``"input"``, ``"output"`` or ``"cut"``.
        label: ``"linear"``, ``"fp32 -> bf16"``, ``"fc.weight"``.
        dtype: The type in which an op computes, or of a cast's result or a tensor: ``"bf16"``,
            ``"float8_e4m3fn"``; ``""`` if unknown.
        shape: Shape of the result; None if unknown.
        module: Qualified name of its module; ``""`` for none.
        location: ``"train.py:12"``, for an observed op.
        reason: Why it computes in that type: ``"lists/hmpx/bf16.txt:18"``, for an observed op.
        grad_fn: Autograd's names for this node.
        is_legalized: Whether an op computes in fp32 and rounds to ``dtype``.
        saved: The tensors it keeps for the backward; none once that has run.
    """

    id: str
    kind: Kind
    label: str
    dtype: str = ""
    shape: tuple[int, ...] | None = None
    module: str = ""
    location: str = ""
    reason: str = ""
    grad_fn: tuple[str, ...] = ()
    is_legalized: bool = False
    saved: tuple[Saved, ...] = ()

    __repr__ = fielded


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor that goes from one node to another.

    Attributes:
        source: ``id`` of the node that made it.
        target: ``id`` of the node that takes it.
        dtype: Its dtype: ``"bf16"``; ``""`` if unknown.
        shape: Its shape; None if unknown.
    """

    source: str
    target: str
    dtype: str = ""
    shape: tuple[int, ...] | None = None


# --- DOT text: shapes, colours, module boxes, a legend ----------------------------------------------

#: Type -> the colours of its nodes and edges; colour-blind readers can distinguish them.
COLOURS: Final[Mapping[str, tuple[str, str]]] = {
    "bf16": ("#cfe0f5", "#5b84b8"),  # blue, as in reports and on terminals
    "fp32": ("#fbd9a5", "#c47f17"),
    "fp16": ("#f6bfc6", "#b8475a"),
    "fp64": ("#d9d2ec", "#6f5aa8"),
}
_MOST_CHARACTERS: Final = 60

_HEAD: Final = """\
digraph hmpx {
  graph [rankdir=TB, ranksep=0.28, nodesep=0.2, fontname="Helvetica", fontsize=11, \
pad=0.2, newrank=true, labeljust=l, charset="UTF-8"];
  node [fontname="Helvetica", fontsize=11, margin="0.09,0.04", height=0.3, \
color="#666666", penwidth=0.8];
  edge [arrowsize=0.55, penwidth=1.1, color="#888888"];"""


def to_dot(
    nodes: Iterable[Node], edges: Iterable[Edge], classes: Mapping[str, str], formats: set[str]
) -> str:
    """Returns the text of a directed graph from the inputs at the top to the outputs.

    ``classes`` maps qualified names of modules to names of their classes; ``formats`` are names of number formats.
    """
    nodes, edges = list(nodes), list(edges)
    lines = [_HEAD, *_boxes(nodes, classes, formats)]
    for edge in edges:
        tip = "  ".join(filter(None, [edge.dtype, _size(edge.shape)]))
        values = {"color": _colours(edge.dtype, formats)[1], "tooltip": _escaped(tip, None)}
        lines.append(f"  {edge.source} -> {edge.target} [{_attributes(values)}];")
    return "\n".join([*lines, *_legend(nodes, formats), "}", ""])


def _colours(dtype: str, formats: set[str]) -> tuple[str, str]:
    if dtype in formats:  # which are emulated
        return "#c9e7d0", "#3f8f5b"
    return COLOURS.get(dtype, ("#eeeeee", "#888888"))


# --- nodes -----------------------------------------------------------------------------------------


_LEAF: Final = 'shape="box", style="filled", fontsize="9", height="0.2"'

#: Kind of a node -> attributes of its box.
_BOXES: Final = {
    "output": 'shape="box", style="rounded,bold"',
    "fold": 'shape="box3d", style="filled", fillcolor="#ffffff", color="#888888"',
    "cut": 'shape="note", style="dashed"',
    "cast": 'shape="diamond", style="filled", fillcolor="#ffffff", fontsize="8", margin="0", '
    'width="0.2", penwidth="1.4"',
    "op": 'shape="box", style="rounded,filled"',
    "parameter": _LEAF,
    "input": _LEAF,
}


def _node(node: Node, formats: set[str]) -> str:
    fill, dark = _colours(node.dtype, formats)
    values = {"label": _escaped(_label(node)), "tooltip": _escaped("\n".join(_tooltip(node)), None)}
    if node.kind == "cast":
        types = node.label.split(" -> ")
        values["label"] = _escaped("\n".join(types))
        values["color"] = _colours(types[1], formats)[1]  # also for a rounding
    elif node.kind in LEAVES:
        values |= {"fillcolor": fill, "color": fill}
    elif node.kind == "op":
        values |= {"fillcolor": fill, "color": dark}
        if node.is_legalized:
            values |= {"style": "rounded,filled,dashed", "penwidth": "1.4"}
    return f"{node.id} [{_BOXES[node.kind]}, {_attributes(values)}];"


def _label(node: Node) -> str:
    if node.kind == "fold":
        return "\n".join([*map(_cut, node.label.split("\n")), node.reason])
    name = node.label
    if node.kind == "parameter" and node.module:
        name = name.removeprefix(f"{node.module}.")  # the box names it
    dtype = f"{node.dtype} via fp32" if node.is_legalized else node.dtype
    second = "  ".join(filter(None, [dtype, _size(node.shape)]))
    if node.kind in LEAVES:
        return f"{_cut(name)}  {second}"
    return f"{_cut(name)}\n{second}" if second and node.kind != "cut" else _cut(name)


def _tooltip(node: Node) -> Iterator[str]:
    yield node.label
    if node.kind == "fold":
        yield node.reason
        yield "hmpx.draw(..., fold=False) draws them"
        return
    if node.reason:
        yield f"{node.dtype or 'left alone'}: {node.reason}"
    if node.is_legalized:
        yield f"computed in fp32, the result rounded to {node.dtype}"
    if node.module:
        yield f"in {node.module}"
    if node.location:
        yield node.location
    if node.grad_fn and node.kind not in LEAVES:
        yield ", ".join(node.grad_fn[:6])
    if node.saved:
        yield f"saves {size(sum(each.bytes for each in node.saved))} for the backward:"
        for each in node.saved[:6]:
            yield f"  {each.dtype}  {_size(each.shape)}  {size(each.bytes)}"
        if len(node.saved) > 6:
            yield f"  and {len(node.saved) - 6:,} more"


def _size(shape: tuple[int, ...] | None) -> str:
    if shape is None:
        return ""
    return "x".join(map(str, shape)) if shape else "scalar"


# --- boxes of modules ------------------------------------------------------------------------------


@dataclass
class _Box:
    """A module's box, with the boxes inside it."""

    path: str
    nodes: list[Node] = field(default_factory=list)
    inside: dict[str, _Box] = field(default_factory=dict)

    def open_small_ones(self) -> None:
        """Moves single nodes of modules, usually activations, into the parent boxes."""
        for name, inner in [*self.inside.items()]:
            inner.open_small_ones()
            if len(inner.nodes) == 1 and not inner.inside:
                self.nodes += inner.nodes
                del self.inside[name]


def _boxes(nodes: list[Node], classes: Mapping[str, str], formats: set[str]) -> Iterator[str]:
    """Yields the nodes in the boxes of their modules, nested as the modules are."""
    root = _Box("")
    for node in nodes:
        box, path = root, ""
        for part in node.module.split(".") if node.module else ():
            path = f"{path}.{part}" if path else part
            box = box.inside.setdefault(part, _Box(path))
        box.nodes.append(node)
    root.open_small_ones()
    numbers = itertools.count()

    def lines(box: _Box, depth: int, above: str) -> Iterator[str]:
        indent = "  " * (depth + 1)
        while depth and not box.nodes and len(box.inside) == 1:  # "blocks.0" is one box
            (box,) = box.inside.values()
        if depth:
            name = box.path[len(above) + 1 :] if above else box.path
            title = _cut(f"{name}  {classes[box.path]}" if box.path in classes else name)
            values = {"label": _escaped(title), "style": "rounded,filled", "color": "#bbbbbb"}
            values |= {"fillcolor": "#f7f7f7" if depth % 2 else "#ffffff", "fontcolor": "#555555"}
            values |= {"tooltip": _escaped(box.path, None)}
            yield f"{indent}subgraph cluster_{next(numbers)} {{"
            yield f"{indent}  {_attributes(values, '; ')};"
        for node in box.nodes:
            yield f"{indent}  {_node(node, formats)}"
        for each in box.inside.values():
            yield from lines(each, depth + 1, box.path)
        if depth:
            yield f"{indent}}}"

    yield from lines(root, 0, "")


# --- the legend ------------------------------------------------------------------------------------


def _legend(nodes: list[Node], formats: set[str]) -> Iterator[str]:
    """Yields a row of small boxes below the graph: one per type, and one per shape."""
    used = dict.fromkeys(node.dtype for node in nodes if node.dtype and node.kind != "output")
    rows = []
    for dtype in [*(name for name in COLOURS if name in used), *(used.keys() - COLOURS.keys())]:
        shown = html.escape(printable(dtype))
        rows.append(f'<td bgcolor="{_colours(dtype, formats)[0]}">{shown}</td>')
    if any(node.kind == "cast" for node in nodes):
        rows.append("<td>◇ cast: from, to</td>")
    if any(node.is_legalized for node in nodes):
        rows.append("<td>dashed: fp32 computes, the result is rounded</td>")
    if rows:
        table = '<table border="0" cellborder="0" cellspacing="4" cellpadding="3"><tr>'
        yield f"  fontsize=9; labelloc=b; labeljust=c; label=<{table}{''.join(rows)}</tr></table>>;"


# --- text ------------------------------------------------------------------------------------------


def _attributes(values: Mapping[str, str], separator: str = ", ") -> str:
    quoted = {name: value.replace('"', '\\"') for name, value in values.items()}
    return separator.join([f'{name}="{value}"' for name, value in quoted.items()])


def _escaped(text: str, most: int | None = 4 * _MOST_CHARACTERS) -> str:
    r"""Returns ``text`` escaped for a quoted label: graphviz reads backslashes, and entities of HTML.

    Control characters become visible, except line ends.
    """
    clean = "\n".join([printable(line) for line in text.split("\n")])
    if most is not None and len(clean) > most:
        clean = f"{clean[:most]}..."
    return clean.replace("\\", "\\\\").replace("&", "&amp;").replace("\n", "\\n")


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."
