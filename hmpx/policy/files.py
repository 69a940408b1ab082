"""Policy files: YAML, and the JSON that optimum-habana's users have, to lists and conditions.

Everything is checked here, with file and line; nothing in a file is ever evaluated. Knows no
precedence: that is settled in `policy`.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import yaml

from .. import arguments, ops, tensors
from ..arguments import is_a
from ..errors import OpListError, OptionError, PolicyFileError, short, shown, suggestion
from ..number_formats import FORMATS
from . import json_nodes, text_files, yaml_nodes
from . import op_lists as oplists
from .decisions import YIELDING, CastPolicy, Decision, LowType, parse_low_type
from .op_lists import OpList
from .sections import PHASES, Section

#: How the files' names end.
SUFFIXES: Final = (".yaml", ".yml", ".json")

#: The lists that a file, and each section in it, may hold.
LISTS: Final = ("low", "fp32", "widest", "first", "follow", "pass")

_FILE: Final = text_files.TextKind("a policy file", 1 << 20, PolicyFileError)
_MOST_LINES: Final = 100_000

#: A policy has four: itself, its sections, a section, a list in it.
_MOST_LEVELS: Final = 16


@dataclass(frozen=True)
class SectionSource:
    """One section as it is written.

    Attributes:
        lists: Name in `LISTS` -> op list.
        conditions: Those of `sections.Section`, by name.
        low_precision_type: Of its lists; None for that of the file.
        where: ``"policy.yaml:12"``.
    """

    lists: Mapping[str, OpList]
    conditions: Mapping[str, Any]
    low_precision_type: LowType | None
    where: str


@dataclass(frozen=True)
class PolicySource:
    """A policy file after reading.

    Attributes:
        lists: Name in `LISTS` -> ops added to that list.
        removed: Name in `LISTS` -> the lines that take ops out of the shipped list.
        base: The shipped set, or a directory; None for none.
        low_precision_type: None if the file names none.
        sections: In their order.
        is_verbose: What the file says of logging.
        notes: What the user should hear of.
        where: The file.
    """

    lists: Mapping[str, OpList] = field(default_factory=dict)
    removed: Mapping[str, tuple[oplists.Entry, ...]] = field(default_factory=dict)
    base: str | None = oplists.DEFAULT_SET
    low_precision_type: LowType | None = None
    sections: tuple[SectionSource, ...] = ()
    is_verbose: bool = False
    notes: tuple[str, ...] = ()
    where: str = ""

    def op_lists(self) -> list[OpList]:
        """Returns all the lists in it."""
        return [*self.lists.values(), *[o for each in self.sections for o in each.lists.values()]]


def is_policy_file(path: object) -> bool:
    """Whether ``path`` is named as policy files are."""
    return is_a(path, str) and str.endswith(path, SUFFIXES)  # type: ignore[arg-type]


def read_policy_file(path: str | os.PathLike[str]) -> PolicySource:
    """Returns what the file holds.

    Raises:
        PolicyFileError: It can't be read, or is no policy.
        OptionError: ``path`` is no path.
    """
    plain = arguments.path("policy", path)
    name = short(plain)
    if not is_policy_file(plain):
        raise PolicyFileError(f"{name}: a policy file ends in {', '.join(SUFFIXES)}")
    text = text_files.read(plain, _FILE)
    if plain.endswith(".json"):
        return _parse_json(text, name)
    return parse(text, name, Path(plain).parent)


def from_mapping(mapping: Mapping[str, Any]) -> PolicySource:
    """Returns what a policy file of these keys and values would hold.

    Raises:
        PolicyFileError: It is no policy.
    """
    content = _Plain().mapping("", mapping, 0)
    return parse(yaml.safe_dump(content, sort_keys=False), _MAPPING, Path())


_MAPPING: Final = "<policy>"


class _Plain:
    """Makes of what users give the values that YAML has; errors name the keys on the way."""

    def __init__(self) -> None:
        self._count = 0

    def mapping(self, path: str, value: Mapping[Any, Any], level: int) -> dict[Any, Any]:
        found = {}
        try:
            given = arguments.mapping("it", value)
        except OptionError as error:
            raise _error(path, str(error)) from error
        for key, each in given.items():
            if not is_a(key, (str, int, float, type(None))):
                raise _error(path, f"a key must be a string, not {shown(key)}")
            plain_key = self.value(path, key, level)
            found[plain_key] = self.value(f"{path}[{shown(plain_key)}]", each, level + 1)
        return found

    def value(self, path: str, value: Any, level: int) -> Any:
        self._count += 1
        if self._count > _MOST_LINES:
            raise _error(path, f"more than {_MOST_LINES:,} items in one policy")
        if level > _MOST_LEVELS:
            raise PolicyFileError(f"{_MAPPING}: nested too deep to be a policy")
        if is_a(value, Mapping):
            return self.mapping(path, value, level)
        if is_a(value, (list, tuple, set, frozenset)):
            items = arguments.items(path, value, "a list")
            return [
                self.value(f"{path}[{index}]", each, level + 1) for index, each in enumerate(items)
            ]
        if is_a(value, (torch.dtype, *FORMATS)):
            return tensors.long_name(value)
        if is_a(value, str):
            return str.__str__(value)
        if value is None or type(value) in (bool, float):
            return value
        if type(value) is int and value.bit_length() <= 200:
            return value
        raise _error(path, f"a policy holds strings, numbers, dtypes and lists, not {shown(value)}")


def _error(path: str, message: str) -> PolicyFileError:
    where = f"{_MAPPING}{path}" if len(path) <= 200 else _MAPPING
    return PolicyFileError(f"{where}: {message}")


# --- YAML --------------------------------------------------------------------------------------


class _Reader:
    """Reads the nodes of one file; errors name its lines."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._lines = 0

    def where(self, node: yaml.Node) -> str:
        return f"{self._source}:{node.start_mark.line + 1}"

    def error(self, node: yaml.Node, message: str) -> PolicyFileError:
        return PolicyFileError(f"{self.where(node)}: {message}")

    def mapping(
        self, node: yaml.Node, readers: Mapping[str, Callable[[str, yaml.Node], Any]], what: str
    ) -> dict[str, Any]:
        """Returns key -> what the key's reader makes of its name and its value."""
        self._check_tag(node)
        if not isinstance(node, yaml.MappingNode):
            raise self.error(node, f"{what} must be a mapping of keys to values")
        found: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value in node.value:
            key = self.text("a key", key_node)
            if key in found:
                raise self.error(key_node, f"{shown(key)} is given twice, at line {lines[key]} too")
            if key not in readers:
                hint = suggestion(key, readers) or f" ({', '.join(readers)})"
                raise self.error(key_node, f"unknown key {shown(key)} of {what}{hint}")
            found[key] = readers[key](key, value)
            lines[key] = key_node.start_mark.line + 1
        return found

    def _check_tag(self, node: yaml.Node) -> None:
        if not node.tag.startswith("tag:yaml.org,2002:") or ":python" in node.tag:
            raise self.error(node, f"the tag {shown(node.tag)} has no meaning here; leave it out")

    def items(self, key: str, node: yaml.Node) -> list[yaml.Node]:
        """Returns the items of a list; a single value is one."""
        self._check_tag(node)
        if isinstance(node, yaml.MappingNode):
            raise self.error(node, f"{key} must be a list")
        nodes: list[yaml.Node] = node.value if isinstance(node, yaml.SequenceNode) else [node]
        self._lines += len(nodes)
        if self._lines > _MOST_LINES:
            raise self.error(node, f"more than {_MOST_LINES:,} items in one file")
        return nodes

    def text(self, key: str, node: yaml.Node) -> str:
        self._check_tag(node)
        if not isinstance(node, yaml.ScalarNode) or node.tag.endswith(":null"):
            raise self.error(node, f"{key} must be a text")
        return str(node.value)

    def texts(self, key: str, node: yaml.Node) -> tuple[str, ...]:
        return tuple([self.text(key, item) for item in self.items(key, node)])

    def count(self, key: str, node: yaml.Node) -> int:
        text = self.text(key, node)
        if node.tag != "tag:yaml.org,2002:int" or not re.fullmatch(r"[0-9][0-9_]{0,30}", text):
            shown = text if len(text) <= 40 else f"{text[:40]}..."
            raise self.error(node, f"{key} must be a whole number, not {shown!r}")
        return int(text.replace("_", ""))

    def counts(self, key: str, node: yaml.Node) -> tuple[int, ...]:
        return tuple([self.count(key, item) for item in self.items(key, node)])

    def choice(self, key: str, node: yaml.Node, known: Iterable[str]) -> str:
        text, known = self.text(key, node), tuple(known)
        if text not in known:
            raise self.error(
                node,
                f"{key} must be one of {', '.join(known)}, not {shown(text)}{suggestion(text, known)}",
            )
        return text

    def truth(self, key: str, node: yaml.Node) -> bool:
        return self.choice(key, node, ("true", "false")) == "true"

    def dtype(self, key: str, node: yaml.Node) -> torch.dtype:
        try:
            return tensors.parse_name(self.text(key, node))
        except OptionError as error:
            raise self.error(node, f"{key}: {error}") from None

    def low_type(self, key: str, node: yaml.Node) -> LowType:
        try:
            return parse_low_type(self.text(key, node))
        except OptionError as error:
            raise self.error(node, str(error)) from None

    def dtypes(self, key: str, node: yaml.Node) -> tuple[torch.dtype, ...]:
        return tuple([self.dtype(key, item) for item in self.items(key, node)])

    def devices(self, key: str, node: yaml.Node) -> tuple[str, ...]:
        try:
            return tuple(sorted(tensors.parse_device_types(self.texts(key, node))))
        except OptionError as error:
            raise self.error(node, str(error).replace("device_types", key)) from None

    def regexes(self, key: str, node: yaml.Node) -> tuple[str, ...]:
        for item in self.items(key, node):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", FutureWarning)
                    re.compile(self.text(key, item))
            except (re.error, OverflowError, RecursionError) as error:
                raise self.error(item, f"{key}: no regular expression: {error}") from None
        return self.texts(key, node)

    def lines(self, node: yaml.Node, kind: str) -> OpList:
        nodes = self.items(kind, node)
        lines = [(self.text(f"an op of {kind}", item), self.where(item)) for item in nodes]
        try:
            return oplists.from_lines(lines, kind)
        except OpListError as error:
            raise PolicyFileError(str(error)) from None

    def op_list(self, kind: str, node: yaml.Node) -> tuple[OpList, tuple[oplists.Entry, ...]]:
        """Returns what is added to a list, and what is removed."""
        if not isinstance(node, yaml.MappingNode):
            return self.lines(node, kind), ()
        readers = {
            "add": lambda key, each: self.lines(each, kind),
            "remove": lambda key, each: self._removed(each, kind),
        }
        found = self.mapping(node, readers, kind)
        return found.get("add", oplists.NOTHING), found.get("remove", ())

    def _removed(self, node: yaml.Node, kind: str) -> tuple[oplists.Entry, ...]:
        items = self.items(kind, node)
        return tuple([oplists.Entry(self.text("an op", item), self.where(item)) for item in items])

    def section(self, node: yaml.Node) -> SectionSource:
        readers: dict[str, Callable[[str, yaml.Node], Any]] = {
            "module": self.texts,
            "module_regex": self.regexes,
            "module_class": self.texts,
            "phase": lambda key, each: self.choice(key, each, PHASES),
            "min_numel": self.count,
            "max_numel": self.count,
            "ndim": self.counts,
            "device": self.devices,
            "dtype": self.dtypes,
        }
        own: dict[str, Callable[[str, yaml.Node], Any]] = {
            "low_precision_type": self.low_type,
            **{kind: lambda key, each: self.lines(each, key) for kind in LISTS},
        }
        found = self.mapping(node, {**readers, **own}, "a section")
        conditions = {key: value for key, value in found.items() if key in readers}
        empty = [key for key, value in conditions.items() if value == ()]
        if empty:
            raise self.error(node, f"{empty[0]} is empty; name at least one, or leave it out")
        lists = {key: value for key, value in found.items() if key in LISTS}
        if not lists:
            raise self.error(node, f"a section decides nothing; give it {' or '.join(LISTS)}")
        if not conditions:
            raise self.error(
                node, f"a section holds for every call; give it {' or '.join(readers)}"
            )
        least, greatest = conditions.get("min_numel"), conditions.get("max_numel")
        if least is not None and greatest is not None and least > greatest:
            raise self.error(node, f"min_numel {least} is above max_numel {greatest}")
        return SectionSource(lists, conditions, found.get("low_precision_type"), self.where(node))


def parse(text: str, source: str, folder: Path) -> PolicySource:
    """Returns what the YAML ``text`` holds.

    Args:
        text: The whole file.
        source: What error messages call it.
        folder: What ``lists``, where that is a directory, is relative to.

    Raises:
        PolicyFileError: It is no policy.
    """
    node = yaml_nodes.compose(text, source)
    if node is None:
        return PolicySource(where=source)
    reader = _Reader(source)

    def base(key: str, each: yaml.Node) -> str | None:
        name = reader.text(key, each)
        if name == "none":
            return None
        known = oplists.set_names()
        if name not in known and not _is_directory(folder / name):
            hint = suggestion(name, known)
            raise reader.error(
                each,
                f"lists {shown(name)} is no shipped set ({', '.join(known)}), no directory and not none{hint}",
            )
        return name if name in known else os.fspath(folder / name)

    found = reader.mapping(
        node,
        {
            "low_precision_type": reader.low_type,
            "lists": base,
            **dict.fromkeys(LISTS, reader.op_list),
            "sections": lambda key, each: tuple(map(reader.section, reader.items(key, each))),
        },
        "a policy",
    )
    lists = {key: value for key, value in found.items() if key in LISTS}
    return PolicySource(
        lists={key: added for key, (added, _) in lists.items()},
        removed={key: removed for key, (_, removed) in lists.items() if removed},
        base=found.get("lists", oplists.DEFAULT_SET),
        low_precision_type=found.get("low_precision_type"),
        sections=found.get("sections", ()),
        where=source,
    )


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # too long, or no path at all
        return False


# --- JSON --------------------------------------------------------------------------------------

#: What else gaudi_config.json may hold, none of which is about casting.
_OTHER_KEYS: Final = (
    "use_fused_adam", "use_fused_clip_norm", "use_torch_autocast", "use_dynamic_shapes",
    "optimum_version", "transformers_version", "_name_or_path", "architectures", "model_type",
)  # fmt: skip


def _parse_json(text: str, source: str) -> PolicySource:
    """Returns what a ``gaudi_config.json`` says of casting, to HMP or to Gaudi's autocast."""
    node = json_nodes.compose(text, source)
    reader = _Reader(source)

    def ops_of(kind: str) -> Callable[[str, yaml.Node], OpList | None]:
        def read_ops(key: str, each: yaml.Node) -> OpList | None:
            return None if each.tag.endswith(":null") else reader.lines(each, kind)

        return read_ops

    found = reader.mapping(
        node,
        {
            "use_habana_mixed_precision": reader.truth,
            "hmp_is_verbose": reader.truth,
            "hmp_opt_level": lambda key, each: reader.choice(key, each, ("O1", "O2")),
            "hmp_bf16_ops": ops_of("low"),
            "hmp_fp32_ops": ops_of("fp32"),
            "autocast_bf16_ops": ops_of("low"),
            "autocast_fp32_ops": ops_of("fp32"),
            **dict.fromkeys(_OTHER_KEYS, lambda key, each: None),
        },
        "a Gaudi configuration",
    )
    is_autocast = any(found.get(f"autocast_{name}_ops") is not None for name in ("bf16", "fp32"))
    is_hmp = found.get("use_habana_mixed_precision", not is_autocast)
    prefix = "hmp" if is_hmp else "autocast"
    lists = {
        kind: found[key]
        for kind, key in (("low", f"{prefix}_bf16_ops"), ("fp32", f"{prefix}_fp32_ops"))
        if found.get(key) is not None
    }
    notes: list[str] = []
    base: str | None = "hmp" if is_hmp else oplists.DEFAULT_SET
    if not is_hmp and not lists:
        base = None
        notes.append(f"{source}: use_habana_mixed_precision is false: nothing is cast")
    elif is_hmp and found.get("hmp_opt_level") == "O2":
        base = "o2"
        if lists:
            notes.append(
                f"{source}: hmp_opt_level 'O2' ignores its op lists; use 'O1' to read them"
            )
            lists = {}
    return PolicySource(
        lists=lists,
        # As with HMP's files, a list that is given takes the place of the shipped one.
        removed=dict.fromkeys(lists, _EVERYTHING),
        base=base,
        is_verbose=found.get("hmp_is_verbose", False),
        notes=tuple(notes),
        where=source,
    )


#: Stands for the lines that take all ops out of a shipped list.
_EVERYTHING: Final = (oplists.Entry("*", ""),)


# --- writing -----------------------------------------------------------------------------------


def dump(
    decisions: Mapping[str, Decision], low_dtype: LowType, sections: tuple[Section, ...]
) -> str:
    """Returns the policy file that makes these decisions, spelled out one by one."""
    content: dict[str, Any] = {
        "low_precision_type": tensors.long_name(low_dtype),
        "lists": "none",
        **_lists(decisions, low_dtype),
    }
    if sections:
        content["sections"] = [
            {
                **{key: _written(value) for key, value in section.conditions()},
                **_lists(section.decisions, low_dtype),
            }
            for section in sections
        ]
    return yaml.safe_dump(content, sort_keys=False)  # escaped: U+0085 would be a space


def _lists(decisions: Mapping[str, Decision], low_dtype: LowType) -> dict[str, list[str]]:
    kinds = {CastPolicy[kind.upper()]: kind for kind in LISTS}
    found: dict[str, list[str]] = {}
    for op, decision in sorted(decisions.items()):
        covering = ops.covering(op)
        if covering is not None and decisions.get(covering) == decision:
            continue
        words = [op]
        if decision.cast_policy is CastPolicy.LOW and decision.dtype not in (None, low_dtype):
            words.append(tensors.long_name(decision.dtype))
        for word, dtype in (
            ("accumulate", decision.accumulate_dtype),
            ("output", decision.output_dtype),
        ):
            words += [f"{word}={tensors.long_name(dtype)}"] if dtype is not None else []
        lines = found.setdefault(kinds[decision.cast_policy], [])
        lines.append(" ".join(words))
        lines += [
            f"-{each}"
            for each in sorted(_operators(op))
            if each not in decisions or _gives_way(decisions[each], decision)
        ]
    return {kind: found[kind] for kind in LISTS if kind in found}


def _gives_way(decision: Decision, other: Decision) -> bool:
    """Whether a list of ``decision`` gives way to one of ``other``."""
    return decision.cast_policy in YIELDING and other.cast_policy not in YIELDING


def _operators(op: str) -> frozenset[str]:
    """Returns the operators that a line of ``op`` covers."""
    return ops.covered(op) - {op}


def _written(value: Any) -> Any:
    return (
        [_written(each) for each in value]
        if isinstance(value, tuple)
        else (tensors.long_name(value) if isinstance(value, torch.dtype) else value)
    )
