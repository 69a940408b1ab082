"""Repeated blocks: of modules that are alike and follow each other, a picture shows the first."""

from __future__ import annotations

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
    nodes, edges = list(nodes), list(edges)
    done: set[str] = set()
    count = 0
    while True:
        family = next((each for each in _families(nodes) if each[0] not in done), None)
        if family is None:
            return nodes, edges
        done.add(family[0])
        for run in [*_runs(family[1], nodes, edges, classes)]:
            found = _with_run_as_node(run, nodes, edges, f"like{count}")
            if found is not None:
                nodes, edges = found
                count += 1


def _families(nodes: list[Node]) -> Iterator[tuple[str, list[str]]]:
    """Yields modules whose names differ in their numbers, in order; the outermost families first.

    With each goes what its names begin with: ``"layer."`` of ``"layer.0"`` and ``"layer.1"``.
    """
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for node in nodes:
        path = ""
        for part in node.module.split(".") if node.module else ():
            path = f"{path}.{part}" if path else part
            numbered = re.fullmatch(r"(.*?)(\d{1,9})", path)
            if numbered is not None:
                found[numbered[1]][int(numbered[2])] = path
    for stem in sorted(found, key=lambda each: (each.count("."), each)):
        members = found[stem]
        if len(members) > 1:
            yield stem, [members[number] for number in sorted(members)]


def _runs(
    paths: list[str], nodes: list[Node], edges: list[Edge], classes: Mapping[str, str]
) -> Iterator[list[str]]:
    """Yields two modules or more, one after the other, that are alike."""
    run: list[str] = []
    before: _Likeness | None = None
    for path in paths:
        like = _likeness(path, nodes, edges, classes)
        if run and like != before:
            if len(run) > 1:
                yield run
            run = []
        before = like
        run = [*run, path] if like is not None else []
    if len(run) > 1:
        yield run


def _likeness(
    path: str, nodes: list[Node], edges: list[Edge], classes: Mapping[str, str]
) -> _Likeness | None:
    """Returns what is the same of modules that are alike; None for too small ones."""
    inside = {node.id: _described(node, path) for node in nodes if _is_in(node, path)}
    if len(inside) < _LEAST_NODES:
        return None
    passed = Counter(
        (inside.get(edge.source), inside[edge.target], edge.dtype)
        for edge in edges
        if edge.target in inside
    )
    return classes.get(path), frozenset(Counter(inside.values()).items()), frozenset(passed.items())


def _described(node: Node, path: str) -> tuple[Any, ...]:
    """Returns all of a node but its shapes and what tells its module from those like it."""
    label, module = node.label.removeprefix(path), node.module.removeprefix(path)
    return node.kind, label, module, node.dtype, node.reason, node.is_legalized, node.times


def _is_in(node: Node, path: str) -> bool:
    return node.module == path or node.module.startswith(f"{path}.")


def _with_run_as_node(
    run: list[str], nodes: list[Node], edges: list[Edge], name: str
) -> tuple[list[Node], list[Edge]] | None:
    """Returns nodes and edges with all modules of a run but the first as one node.

    Ops between them that take no parameters, such as additions of unknown modules, are hidden, too; None
    where other ops are between them.
    """
    first, *others = run
    leaves = {node.id for node in nodes if node.kind in LEAVES}
    casts = {node.id for node in nodes if node.kind == "cast"}
    leaves |= {edge.target for edge in edges if edge.source in leaves and edge.target in casts}
    hidden = {node.id: node for node in nodes if any(_is_in(node, path) for path in others)}
    between = _between(set(hidden), edges)
    if any(edge.target in between and edge.source in leaves for edge in edges):
        return None
    hidden |= {node.id: node for node in nodes if node.id in between}
    shapes = [Counter(n.shape for n in nodes if _is_in(n, path)) for path in run]
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
    return kept, list(dict.fromkeys(passing))


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
