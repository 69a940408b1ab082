"""DOT text of a graph: shapes, colours, boxes of modules, a legend. Needs no program and no package."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from ..reports import size
from .graph import LEAVES, Edge, Node

#: Type -> the colours of nodes that compute in it, and of edges; told apart by colour-blind readers.
COLOURS: Final[Mapping[str, tuple[str, str]]] = {
    "fp32": ("#cfe0f5", "#5b84b8"),
    "bf16": ("#fbd9a5", "#c47f17"),
    "fp16": ("#f6bfc6", "#b8475a"),
    "fp64": ("#d9d2ec", "#6f5aa8"),
}
#: Of number formats, which are emulated.
EMULATED: Final = ("#c9e7d0", "#3f8f5b")
#: Of other dtypes, and unknown ones.
OTHER: Final = ("#eeeeee", "#888888")

_OTHER_DTYPES: Final = ("int", "uint", "bool", "complex", "float8", "quint", "qint")

_MOST_CHARACTERS: Final = 60


def to_dot(
    nodes: Iterable[Node], edges: Iterable[Edge], classes: Mapping[str, str], emulated: set[str]
) -> str:
    """Returns the text of a directed graph from the inputs at the top to the outputs.

    Args:
        nodes: The nodes.
        edges: The edges between them.
        classes: Qualified name of a module -> name of its class.
        emulated: Names of number formats.
    """
    nodes, edges = list(nodes), list(edges)
    lines = [
        "digraph hmpx {",
        '  graph [rankdir=TB, ranksep=0.28, nodesep=0.2, fontname="Helvetica", fontsize=11, '
        'pad=0.2, newrank=true, labeljust=l, charset="UTF-8"];',
        '  node [fontname="Helvetica", fontsize=11, margin="0.09,0.04", height=0.3, '
        'color="#666666", penwidth=0.8];',
        '  edge [arrowsize=0.55, penwidth=1.1, color="#888888"];',
    ]
    lines += _boxes(nodes, classes, emulated)
    lines += [_edge(edge, emulated) for edge in edges]
    lines += _ranks(nodes, edges)
    lines += _legend(nodes, emulated)
    return "\n".join([*lines, "}", ""])


def colours(dtype: str, emulated: set[str]) -> tuple[str, str]:
    """Returns the colours of a type: of nodes, of edges."""
    if dtype in emulated:
        return EMULATED
    return COLOURS.get(dtype, OTHER)


# --- nodes and edges -------------------------------------------------------------------------------


def _node(node: Node, emulated: set[str]) -> str:
    fill, dark = colours(node.dtype, emulated)
    values = {"label": escaped(_label(node)), "tooltip": escaped(_tooltip(node), None)}
    if node.kind == "cast":
        by_way_of = node.label.split(" -> ")[1]  # of a rounding, too
        dark = colours(by_way_of, emulated)[1]
        values |= {"shape": "diamond", "style": "filled", "fillcolor": "#ffffff", "color": dark}
        values |= {"fontsize": "8", "margin": "0", "width": "0.2", "penwidth": "1.4"}
        values["label"] = escaped("\n".join(node.label.split(" -> ")))
    elif node.kind in LEAVES:
        values |= {"shape": "box", "style": "filled", "fillcolor": fill, "fontsize": "9"}
        values |= {"height": "0.2", "color": fill}
    elif node.kind == "output":
        values |= {"shape": "box", "style": "rounded,bold"}
    elif node.kind == "fold":
        values |= {"shape": "box3d", "style": "filled", "fillcolor": "#ffffff", "color": "#888888"}
    elif node.kind == "cut":
        values |= {"shape": "note", "style": "dashed"}
    else:
        values |= {"shape": "box", "style": "rounded,filled", "fillcolor": fill, "color": dark}
        if node.is_legalized:
            values |= {"style": "rounded,filled,dashed", "penwidth": "1.4"}
    return f"{node.id} [{', '.join(f'{name}={_quoted(value)}' for name, value in values.items())}];"


def _label(node: Node) -> str:
    if node.kind == "fold":
        return "\n".join([*map(_cut, node.label.split("\n")), node.reason])
    name = f"{node.label} (x{node.times:,})" if node.times > 1 else node.label
    if node.kind == "parameter" and node.module:
        name = name.removeprefix(f"{node.module}.")  # the box has it
    details = [node.dtype, _size(node.shape)]
    if node.is_legalized:
        details[0] = f"{node.dtype} via fp32"
    second = "  ".join(filter(None, details))
    if node.kind in LEAVES:
        return f"{_cut(name)}  {second}"
    return f"{_cut(name)}\n{second}" if second and node.kind != "cut" else _cut(name)


def _tooltip(node: Node) -> str:
    if node.kind == "fold":
        return f"{node.label}\n{node.reason}\nhmpx.draw(..., fold=False) draws them"
    said = [node.label]
    if node.reason:
        said.append(f"{node.dtype or 'left alone'}: {node.reason}")
    if node.is_legalized:
        said.append(f"computed in fp32, the result rounded to {node.dtype}")
    if node.module:
        said.append(f"in {node.module}")
    if node.location:
        said.append(node.location)
    if node.grad_fn and node.kind not in LEAVES:
        said.append(", ".join(node.grad_fn[:6]))
    said += _saved(node)
    return "\n".join(said)


#: Of the tensors that a node saves, how many its tooltip names.
_MOST_SAVED: Final = 6


def _saved(node: Node) -> Iterator[str]:
    """Yields lines on what a node keeps for the backward."""
    if not node.saved:
        return
    yield f"saves {size(sum(each.bytes for each in node.saved))} for the backward:"
    for each in node.saved[:_MOST_SAVED]:
        yield f"  {each.dtype}  {_size(each.shape)}  {size(each.bytes)}"
    if len(node.saved) > _MOST_SAVED:
        yield f"  and {len(node.saved) - _MOST_SAVED:,} more"


def _edge(edge: Edge, emulated: set[str]) -> str:
    dark = colours(edge.dtype, emulated)[1]
    tip = escaped("  ".join(filter(None, [edge.dtype, _size(edge.shape)])), None)
    return f"  {edge.source} -> {edge.target} [color={_quoted(dark)}, tooltip={_quoted(tip)}];"


def _ranks(nodes: list[Node], edges: list[Edge]) -> Iterator[str]:
    """Yields invisible edges that put the parameters of an op below what it takes.

    Else the boxes of modules that follow each other overlap in height, and stand side by side.
    """
    kinds = {node.id: node.kind for node in nodes}
    sources: dict[str, list[str]] = {}
    takers: dict[str, list[str]] = {}
    for edge in edges:
        sources.setdefault(edge.target, []).append(edge.source)
        takers.setdefault(edge.source, []).append(edge.target)
    for node in nodes:
        if node.kind not in LEAVES or len(takers.get(node.id, ())) != 1:
            continue
        (taker,) = takers[node.id]
        if kinds[taker] == "cast":
            ops = takers.get(taker, [])
            if len(ops) != 1:
                continue
            (taker,) = ops
        for source in sources[taker]:
            above = source
            while kinds[above] == "cast" and len(sources.get(above, ())) == 1:
                (above,) = sources[above]
            if kinds[above] not in LEAVES:
                yield f"  {above} -> {node.id} [style=invis];"


def _size(shape: tuple[int, ...] | None) -> str:
    if shape is None:
        return ""
    return "x".join(map(str, shape)) if shape else "scalar"


# --- boxes of modules ------------------------------------------------------------------------------


@dataclass
class _Box:
    """A module's box, with the boxes in it."""

    path: str
    nodes: list[Node] = field(default_factory=list)
    inside: dict[str, _Box] = field(default_factory=dict)


def _boxes(nodes: list[Node], classes: Mapping[str, str], emulated: set[str]) -> Iterator[str]:
    """Yields the nodes in the boxes of their modules, nested as the modules are."""
    root = _Box("")
    for node in nodes:
        box, path = root, ""
        for part in node.module.split(".") if node.module else ():
            path = f"{path}.{part}" if path else part
            box = box.inside.setdefault(part, _Box(path))
        box.nodes.append(node)
    _open_small_ones(root)
    count = 0
    waiting: list[tuple[_Box | None, int, str]] = [(root, 0, "")]
    while waiting:
        box_or_end, depth, above = waiting.pop()
        indent = "  " * (min(depth, 40) + 1)
        if box_or_end is None:
            yield f"{indent}}}"
            continue
        box = box_or_end
        while depth and not box.nodes and len(box.inside) == 1:  # "blocks.0" is one box
            (box,) = box.inside.values()
        if depth:
            name = box.path[len(above) + 1 :] if above else box.path
            title = _cut(f"{name}  {classes[box.path]}" if box.path in classes else name)
            shade = "#f7f7f7" if depth % 2 else "#ffffff"
            yield f"{indent}subgraph cluster_{count} {{"
            yield (
                f"{indent}  label={_quoted(escaped(title))}; style={_quoted('rounded,filled')}; "
                f"color={_quoted('#bbbbbb')}; fillcolor={_quoted(shade)}; "
                f"fontcolor={_quoted('#555555')}; tooltip={_quoted(escaped(box.path, None))};"
            )
            count += 1
            waiting.append((None, depth, ""))
        for node in box.nodes:
            yield f"{indent}  {_node(node, emulated)}"
        waiting += [(each, depth + 1, box.path) for each in reversed(box.inside.values())]


def _open_small_ones(root: _Box) -> None:
    """Moves what is alone in its module, an activation as a rule, to the box around that one."""
    waiting, found = [root], []
    while waiting:
        box = waiting.pop()
        found.append(box)
        waiting += box.inside.values()
    for box in reversed(found):
        for name, inner in [*box.inside.items()]:
            if len(inner.nodes) == 1 and not inner.inside:
                box.nodes += inner.nodes
                del box.inside[name]


# --- the legend ------------------------------------------------------------------------------------


def _legend(nodes: list[Node], emulated: set[str]) -> Iterator[str]:
    """Yields a row of small boxes, below the graph: a type each, and what shapes mean."""
    used = dict.fromkeys(node.dtype for node in nodes if node.dtype and node.kind != "output")
    rows = []
    for dtype in [*(name for name in COLOURS if name in used), *(used.keys() - COLOURS.keys())]:
        fill, _ = colours(dtype, emulated)
        rows.append(f'<td bgcolor="{fill}">{_as_html(dtype)}</td>')
    if any(node.kind == "cast" for node in nodes):
        rows.append("<td>◇ cast: from, to</td>")
    if any(node.is_legalized for node in nodes):
        rows.append("<td>dashed: fp32 computes, the result is rounded</td>")
    if rows:
        table = '<table border="0" cellborder="0" cellspacing="4" cellpadding="3"><tr>'
        yield f"  fontsize=9; labelloc=b; labeljust=c; label=<{table}{''.join(rows)}</tr></table>>;"


def _as_html(text: str) -> str:
    clean = _printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return clean.replace('"', "&quot;")


# --- text ------------------------------------------------------------------------------------------


def escaped(text: str, most: int | None = 4 * _MOST_CHARACTERS) -> str:
    r"""Returns ``text`` as a quoted label has it: graphviz reads backslashes, and entities of HTML.

    Control characters become visible ones, except line ends.
    """
    clean = "\n".join([_printable(line) for line in text.split("\n")])
    if most is not None and len(clean) > most:
        clean = f"{clean[:most]}..."
    return clean.replace("\\", "\\\\").replace("&", "&amp;").replace("\n", "\\n")


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '\\"') + '"'


def _printable(text: str) -> str:
    return "".join(
        [
            c
            if unicodedata.category(c) not in ("Cc", "Cs", "Cn", "Co")
            else "\N{REPLACEMENT CHARACTER}"
            for c in text
        ]
    )


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."
