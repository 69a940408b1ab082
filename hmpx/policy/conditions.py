"""The conditions of sections: one row each, from which reading, matching and writing follow.

Those on tensors are about the first floating-point tensor of a call, as it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from .calls import Call
from .files.node_reader import NodeReader
from .module_names import Globs, Regexes

if TYPE_CHECKING:
    import yaml

_PHASES: Final = ("train", "eval")


class Condition(NamedTuple):
    """Something that a section may ask of a call.

    Attributes:
        key: Its name in policy files, and as an argument of `sections.Section`.
        read: Reads its value: from the key's name and the node below it.
        holds: Whether a call meets it: of its value, made into ``patterns`` where it has some, and the call.
        is_placed: It depends on the modules that are running.
        group: Of neighbouring rows with the same group, one that holds is enough; ``""`` for none.
        patterns: For patterns of qualified names: their class.
    """

    key: str
    read: Callable[[NodeReader, str, yaml.Node], Any]
    holds: Callable[[Any, Call], bool]
    is_placed: bool = False
    group: str = ""
    patterns: type[Regexes] | None = None


def _first_floating(call: Call) -> int | None:
    """Returns the position of the first floating-point tensor; None if there is none."""
    return next((i for i, dtype in enumerate(call.dtypes) if dtype.is_floating_point), None)


def _of_first(ask: Callable[[Any, Call, int], bool]) -> Callable[[Any, Call], bool]:
    """Returns a predicate that asks about the first floating-point tensor, and needs one."""

    def holds(value: Any, call: Call) -> bool:
        first = _first_floating(call)
        return first is not None and ask(value, call, first)

    return holds


_ROWS: Final = (
    # Globs, in which ``*`` stands for any characters: the call is in a module with such a
    # qualified name, or inside of one.
    Condition(
        "module",
        NodeReader.texts,
        lambda globs, call: globs.match_around(call.module),
        is_placed=True,
        group="path",
        patterns=Globs,
    ),
    # Regular expressions for the whole of such a name.
    Condition(
        "module_regex",
        NodeReader.regexes,
        lambda regexes, call: regexes.match_around(call.module),
        is_placed=True,
        group="path",
        patterns=Regexes,
    ),
    # Class names: the call is in a module of one, or inside of one.
    Condition(
        "module_class",
        NodeReader.texts,
        lambda classes, call: not set(classes).isdisjoint(call.module_classes),
        is_placed=True,
    ),
    # The mode of the innermost module.
    Condition(
        "phase",
        lambda reader, key, node: reader.choice(key, node, _PHASES),
        lambda phase, call: call.training is (phase == "train"),
        is_placed=True,
    ),
    # The least number of elements, and the greatest.
    Condition(
        "min_numel",
        NodeReader.count,
        _of_first(lambda least, call, first: call.shapes[first].numel() >= least),
    ),
    Condition(
        "max_numel",
        NodeReader.count,
        _of_first(lambda greatest, call, first: call.shapes[first].numel() <= greatest),
    ),
    # Numbers of dimensions.
    Condition(
        "ndim",
        NodeReader.counts,
        _of_first(lambda counts, call, first: len(call.shapes[first]) in counts),
    ),
    # Device types.
    Condition(
        "device",
        NodeReader.devices,
        _of_first(lambda types, call, first: call.devices[first].type in types),
    ),
    Condition(
        "dtype",
        NodeReader.dtypes,
        _of_first(lambda dtypes, call, first: call.dtypes[first] in dtypes),
    ),
)

#: Key -> condition, in the order in which policies are written.
CONDITIONS: Final[Mapping[str, Condition]] = {condition.key: condition for condition in _ROWS}


def contradiction_of(conditions: Mapping[str, Any]) -> str:
    """Returns a message if no call can meet all of these conditions; ``""`` if that is not known."""
    least, greatest = conditions.get("min_numel"), conditions.get("max_numel")
    if least is not None and greatest is not None and least > greatest:
        return f"min_numel {least} is above max_numel {greatest}"
    return ""
