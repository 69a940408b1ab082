"""Repeated blocks: of modules that are alike and follow each other, a picture shows the first."""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from .graph import LEAVES, Edge, Node

#: Blocks of fewer nodes are drawn each.
_LEAST_NODES: Final = 10

#: What two blocks have in common that are alike: nodes, and edges between them and from outside.
_Likeness = tuple[Any, ...]


def folded(
    nodes: Iterable[Node], edges: Iterable[Edge], classes: Mapping[str, str]
) -> tuple[list[Node], list[Edge]]:
    """Returns nodes and edges with one node for each run of modules like the one before them.

    Modules are alike if their names differ in a number at the end only, and they have the same class,
    ops, casts and dtypes; shapes may differ, and the node then says so.

    Args:
        nodes: The nodes.
        edges: The edges between them.
        classes: Qualified name of a module -> name of its class.
    """
    graph = _Graph(list(nodes), list(edges))
    count = 0
    for family in [*_families(graph)]:
        paths = [path for path in family if path in graph.inside]
        for run in [*_runs(paths, graph, classes)]:
            found = _with_run_as_node(run, graph, f"like{count}")
            if found is not None:
                graph = found
                count += 1
    return graph.nodes, graph.edges


class _Graph:
    """Nodes and edges.

    Attributes:
        nodes: The nodes.
        edges: The edges between them.
        inside: Qualified name of a module -> the nodes in it.
        into: ``id`` of a node -> the edges to it.
    """

    def __init__(self, nodes: list[Node], edges: list[Edge]) -> None:
        self.nodes, self.edges = nodes, edges
        self.inside: dict[str, list[Node]] = defaultdict(list)
        self.into: dict[str, list[Edge]] = defaultdict(list)
        for node in nodes:
            parts = node.module.split(".") if node.module else []
            for path in itertools.accumulate(parts, "{}.{}".format):
                self.inside[path].append(node)
        for edge in edges:
            self.into[edge.target].append(edge)


def _families(graph: _Graph) -> Iterator[list[str]]:
    """Yields modules whose names differ in their numbers, in order; the outermost families first."""
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for path in graph.inside:
        numbered = re.fullmatch(r"(.*?)(\d{1,9})", path)
        if numbered is not None:
            found[numbered[1]][int(numbered[2])] = path
    for stem in sorted(found, key=lambda each: (each.count("."), each)):
        members = found[stem]
        if len(members) > 1:
            yield [members[number] for number in sorted(members)]


def _runs(paths: Iterable[str], graph: _Graph, classes: Mapping[str, str]) -> Iterator[list[str]]:
    """Yields two modules or more, one after the other, that are alike."""
    run: list[str] = []
    before: _Likeness | None = None
    for path in paths:
        like = _likeness(path, graph, classes)
        if run and like != before:
            if len(run) > 1:
                yield run
            run = []
        before = like
        if like is not None:
            run.append(path)
    if len(run) > 1:
        yield run


def _likeness(path: str, graph: _Graph, classes: Mapping[str, str]) -> _Likeness | None:
    """Returns what is the same of modules that are alike; None for too small ones."""
    inside = {node.id: _described(node, path) for node in graph.inside[path]}
    if len(inside) < _LEAST_NODES:
        return None
    passed = Counter(
        (inside.get(edge.source), inside[edge.target], edge.dtype)
        for target in inside
        for edge in graph.into.get(target, ())
    )
    return classes.get(path), frozenset(Counter(inside.values()).items()), frozenset(passed.items())


def _described(node: Node, path: str) -> tuple[Any, ...]:
    """Returns all of a node but its shapes and what tells its module from those like it."""
    label, module = node.label.removeprefix(path), node.module.removeprefix(path)
    return node.kind, label, module, node.dtype, node.reason, node.is_legalized, node.times


def _with_run_as_node(run: list[str], graph: _Graph, name: str) -> _Graph | None:
    """Returns the graph with all modules of a run but the first as one node.

    Ops between them that take no parameters, such as additions of unknown modules, are hidden, too; None
    where other ops are between them.
    """
    first, *others = run
    nodes, edges = graph.nodes, graph.edges
    leaves = {node.id for node in nodes if node.kind in LEAVES}
    casts = {node.id for node in nodes if node.kind == "cast"}
    leaves |= {edge.target for edge in edges if edge.source in leaves and edge.target in casts}
    hidden = {node.id: node for path in others for node in graph.inside[path]}
    between = _between(set(hidden), edges)
    if any(edge.target in between and edge.source in leaves for edge in edges):
        return None
    hidden |= {node.id: node for node in nodes if node.id in between}
    shapes = [Counter(node.shape for node in graph.inside[path]) for path in run]
    kinds = Counter(node.kind for node in hidden.values())
    span = others[0] if len(others) == 1 else f"{others[0]} to {others[-1]}"
    like = f"like {first}" if shapes[1:] == shapes[:-1] else f"like {first}, in other shapes"
    counted = [f"{kinds[kind]:,} {kind}s" for kind in ("op", "cast") if kinds[kind]]
    above = first.rpartition(".")[0]
    node = Node(name, "fold", f"{span}\n{like}", module=above, reason=", ".join(counted))
    place = min(position for position, each in enumerate(nodes) if each.id in hidden)
    kept = [each for each in nodes if each.id not in hidden]
    before = sum(each.id not in hidden for each in nodes[:place])
    kept.insert(before, node)

    def end(at: str) -> str:
        return name if at in hidden else at

    moved = [replace(each, source=end(each.source), target=end(each.target)) for each in edges]
    passing = [each for each in moved if not each.source == each.target == name]
    return _Graph(kept, list(dict.fromkeys(passing)))


def _between(hidden: set[str], edges: list[Edge]) -> set[str]:
    """Returns what is on ways from ``hidden`` nodes back to them: arrows would go round in circles."""
    takers: dict[str, list[str]] = defaultdict(list)
    givers: dict[str, list[str]] = defaultdict(list)
    for edge in edges:
        takers[edge.source].append(edge.target)
        givers[edge.target].append(edge.source)
    return (_reached(hidden, takers) & _reached(hidden, givers)) - hidden


def _reached(start: set[str], ways: Mapping[str, list[str]]) -> set[str]:
    found, waiting = set(start), list(start)
    while waiting:
        new = [each for each in ways.get(waiting.pop(), ()) if each not in found]
        found.update(new)
        waiting += new
    return found
