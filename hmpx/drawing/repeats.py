"""Repeated blocks: of modules that are alike and follow each other, a picture shows the first."""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from .graph import LEAVES, Edge, Node

#: Blocks of fewer nodes are drawn each.
_LEAST_NODES: Final = 10


def folded(
    nodes: Iterable[Node], edges: Iterable[Edge], classes: Mapping[str, str]
) -> tuple[list[Node], list[Edge]]:
    """Returns nodes and edges with one node for each run of modules like the one before them.

    Modules are alike if their names differ in a number at the end only, and they have the same class,
    ops, casts and dtypes; shapes may differ, and the node then says so.
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
    """Returns qualified name of a module -> the nodes in it."""
    inside: dict[str, list[Node]] = defaultdict(list)
    for node in nodes:
        for path in itertools.accumulate(filter(None, node.module.split(".")), "{}.{}".format):
            inside[path].append(node)
    return inside


def _families(paths: Iterable[str]) -> list[list[str]]:
    """Returns modules whose names differ in their numbers, in order; the outermost families first."""
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
    """Returns what is the same of modules that are alike: nodes and edges; None for too small ones."""
    inside: dict[str, tuple[Any, ...]] = {}
    for node in nodes:  # all of a node but its shapes and what tells its module from those like it
        label, module = node.label.removeprefix(path), node.module.removeprefix(path)
        said = node.kind, label, module, node.dtype, node.reason, node.is_legalized, node.times
        inside[node.id] = said
    if len(inside) < _LEAST_NODES:
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

    Ops between them that take no parameters, such as additions of unknown modules, are hidden, too; None
    where other ops are between them: their folding would create a cycle.
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
