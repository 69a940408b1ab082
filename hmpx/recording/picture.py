"""`Drawing`: a graph as data, as DOT text, and as a picture if graphviz is installed.

A picture shows only the first of similar modules that follow each other.
"""

from __future__ import annotations

import importlib
import itertools
import os
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from .. import arguments, files
from ..errors import OptionError, said_by, shown
from .graph import LEAVES, Edge, Node, to_dot

_TEXT: Final = (".dot", ".gv")
_PICTURES: Final = (".svg", ".png", ".pdf")


@dataclass(frozen=True)
class Drawing:
    """The autograd graph of a result. Notebooks show it as a picture.

    Attributes:
        nodes: Ops, casts, parameters, from the inputs to the outputs.
        edges: The tensors between them.
        left_out: Least number of nodes omitted because of ``max_nodes``.
        classes: Qualified name of a module -> name of its class, if modules are known.
        formats: Names of the number formats among the nodes' types.
        fold: Whether pictures show only the first of similar modules; nodes and edges have all.

    Example:
        >>> model = torch.nn.Linear(4, 2, bias=False)
        >>> with hmpx.convert(device_types={"cpu"}, legalize="never"):
        ...     drawing = hmpx.draw(model, torch.ones(3, 4))
        >>> for node in drawing.nodes:
        ...     print(node.kind, node.label, node.dtype)
        parameter weight fp32
        cast fp32 -> bf16 bf16
        op linear bf16
        output output bf16
        >>> drawing.dot.startswith("digraph")
        True
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    left_out: int = 0
    classes: Mapping[str, str] = field(default_factory=dict)
    formats: frozenset[str] = frozenset()
    fold: bool = True

    @property
    def dot(self) -> str:
        """The graph in graphviz's language; needs no graphviz."""
        nodes: Iterable[Node] = self.nodes
        edges: Iterable[Edge] = self.edges
        if self.fold:
            nodes, edges = _folded(nodes, edges, self.classes)
        return to_dot(nodes, edges, self.classes, set(self.formats))

    def svg(self) -> str:
        """Returns the picture as SVG.

        Raises:
            OptionError: The package graphviz or its program ``dot`` is missing, or fails.
        """
        return self._rendered("svg").decode("utf-8")

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the picture (``.svg``, ``.png``, ``.pdf``) or its DOT text (``.dot``, ``.gv``).

        Args:
            path: The file; its suffix decides.

        Returns:
            The path.

        Raises:
            OptionError: The suffix is not one of these, the file can't be written, or graphviz is missing for
                a picture.
        """
        file = Path(arguments.path("path", path))
        suffix = file.suffix.lower()
        if suffix in _TEXT:
            content = self.dot.encode("utf-8")
        elif suffix in _PICTURES:
            content = self._rendered(suffix[1:])
        else:
            known = ", ".join((*_PICTURES, *_TEXT))
            raise OptionError(f"path must end in one of {known}, not {shown(str(file))}")
        files.write(content, file)
        return file

    def _repr_svg_(self) -> str | None:
        try:
            return self.svg()
        except OptionError:
            return None

    def __repr__(self) -> str:
        counts = [sum(node.kind == kind for node in self.nodes) for kind in ("op", "cast")]
        leaves = sum(node.kind in ("parameter", "input") for node in self.nodes)
        more = f", {self.left_out:,} nodes left out" if self.left_out else ""
        return f"<hmpx.Drawing: {counts[0]} ops, {counts[1]} casts, {leaves} leaves{more}>"

    def _rendered(self, file_format: str) -> bytes:
        try:
            graphviz: Any = importlib.import_module("graphviz")
        except ImportError as error:
            raise OptionError(
                "pictures need the Python package graphviz: pip install 'hmpx[draw]'; drawing.dot needs none"
            ) from error
        try:
            found: bytes = graphviz.Source(self.dot).pipe(format=file_format)
        except graphviz.ExecutableNotFound as error:
            raise OptionError(
                "pictures need graphviz's program dot: apt install graphviz, brew install graphviz, or "
                "https://graphviz.org/download; drawing.dot needs none"
            ) from error
        except subprocess.CalledProcessError as error:
            said = (error.stderr or b"").decode("utf-8", "replace")
            raise OptionError(f"graphviz's program dot failed: {said or said_by(error)}") from error
        return found


# --- repeated blocks -----------------------------------------------------------------------------


def _folded(
    nodes: Iterable[Node], edges: Iterable[Edge], classes: Mapping[str, str]
) -> tuple[list[Node], list[Edge]]:
    """Returns nodes and edges with one node for each run of modules similar to the one before.

    Modules are similar if their names differ only in a final number, and they have the same class, ops, casts
    and dtypes. Shapes may differ; the node then says so.
    """
    nodes, edges = list(nodes), list(edges)
    inside = _by_module(nodes)
    count = 0
    for family in _families(inside):
        into: dict[str, list[Edge]] = defaultdict(list)
        for edge in edges:
            into[edge.target].append(edge)
        alike = [(_likeness(path, inside[path], into, classes), path) for path in family]
        for like, found in itertools.groupby(alike, lambda each: each[0]):
            run = [path for _, path in found]
            if like is None or len(run) < 2:
                continue
            hidden = _hidden(run, nodes, edges, inside)
            if hidden is not None:
                node = _node_of_run(f"like{count}", run, hidden, inside)
                nodes, edges = _replaced(hidden, node, nodes, edges)
                inside = _by_module(nodes)
                count += 1
    return nodes, edges


def _by_module(nodes: Iterable[Node]) -> dict[str, list[Node]]:
    inside: dict[str, list[Node]] = defaultdict(list)
    for node in nodes:
        for path in itertools.accumulate(filter(None, node.module.split(".")), "{}.{}".format):
            inside[path].append(node)
    return inside


def _families(paths: Iterable[str]) -> list[list[str]]:
    """Returns modules whose names differ only in numbers, in order; the outermost families first."""
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for path in paths:
        numbered = re.fullmatch(r"(.*?)(\d{1,9})", path)
        if numbered is not None:
            found[numbered[1]][int(numbered[2])] = path
    stems = sorted(found, key=lambda each: (each.count("."), each))
    return [[path for _, path in sorted(found[stem].items())] for stem in stems]


def _likeness(
    path: str, nodes: list[Node], into: Mapping[str, list[Edge]], classes: Mapping[str, str]
) -> object:
    """Returns the nodes and edges that similar modules share; None for too small ones."""
    inside: dict[str, tuple[Any, ...]] = {}
    for node in nodes:  # all of a node but its shapes and its module's number
        label, module = node.label.removeprefix(path), node.module.removeprefix(path)
        said = node.kind, label, module, node.dtype, node.reason, node.is_legalized
        inside[node.id] = said
    if len(inside) < 10:
        return None
    passed = Counter(
        (inside.get(edge.source), inside[edge.target], edge.dtype)
        for target in inside
        for edge in into.get(target, ())
    )
    return classes.get(path), frozenset(Counter(inside.values()).items()), frozenset(passed.items())


def _hidden(
    run: list[str], nodes: list[Node], edges: list[Edge], inside: Mapping[str, list[Node]]
) -> dict[str, Node] | None:
    """Returns the nodes of all modules of a run but the first.

    Also hides ops between them without parameters, such as additions of unknown modules. Returns None if other
    ops are between them: folding would create a cycle.
    """
    leaves = {node.id for node in nodes if node.kind in LEAVES}
    casts = {node.id for node in nodes if node.kind == "cast"}
    leaves |= {edge.target for edge in edges if edge.source in leaves and edge.target in casts}
    hidden = {node.id for path in run[1:] for node in inside[path]}
    takers: dict[str, list[str]] = defaultdict(list)
    givers: dict[str, list[str]] = defaultdict(list)
    for edge in edges:
        takers[edge.source].append(edge.target)
        givers[edge.target].append(edge.source)
    between = (_reached(hidden, takers) & _reached(hidden, givers)) - hidden
    if any(edge.target in between and edge.source in leaves for edge in edges):
        return None
    return {node.id: node for node in nodes if node.id in hidden or node.id in between}


def _reached(start: set[str], ways: Mapping[str, list[str]]) -> set[str]:
    found, waiting = set(start), list(start)
    while waiting:
        new = [each for each in ways.get(waiting.pop(), ()) if each not in found]
        found.update(new)
        waiting += new
    return found


def _node_of_run(
    name: str, run: list[str], hidden: Mapping[str, Node], inside: Mapping[str, list[Node]]
) -> Node:
    first, *others = run
    shapes = [Counter(node.shape for node in inside[path]) for path in run]
    kinds = Counter(node.kind for node in hidden.values())
    span = others[0] if len(others) == 1 else f"{others[0]} to {others[-1]}"
    like = f"like {first}" if shapes[1:] == shapes[:-1] else f"like {first}, in other shapes"
    counted = [f"{kinds[kind]:,} {kind}s" for kind in ("op", "cast") if kinds[kind]]
    module = first.rpartition(".")[0]
    return Node(name, "fold", f"{span}\n{like}", module=module, reason=", ".join(counted))


def _replaced(
    hidden: Mapping[str, Node], node: Node, nodes: list[Node], edges: list[Edge]
) -> tuple[list[Node], list[Edge]]:
    """Returns nodes and edges with ``node`` in place of the hidden ones."""
    place = min(position for position, each in enumerate(nodes) if each.id in hidden)
    kept = [each for each in nodes[place:] if each.id not in hidden]
    moved: dict[Edge, None] = {}
    for edge in edges:
        source, target = [node.id if end in hidden else end for end in (edge.source, edge.target)]
        if not source == target == node.id:
            moved[replace(edge, source=source, target=target)] = None
    return [*nodes[:place], node, *kept], list(moved)
