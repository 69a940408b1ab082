"""Reads policy files, in YAML or JSON, and dicts like them; nothing in them is ever evaluated."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

import yaml

from .. import arguments, files, number_formats
from ..errors import OpListError, OptionError, PolicyFileError, short, shown, suggestion
from ..number_formats import OVERFLOWS, ROUNDING_MODES
from . import nodes
from .decisions import LowType, parse_format, parse_low_type
from .lists import from_lines, set_names, shipped_set
from .op_lists import (
    DEFAULT_SET,
    HARDWARE_MODES,
    KEYS,
    LEGALIZE_MODES,
    POLICY_SUFFIXES,
    Entry,
    OpList,
    PolicySource,
    SectionSource,
    is_policy_file,
)
from .sections import CONDITIONS


def read_policy_file(
    path: str | os.PathLike[str], faults: list[PolicyFileError] | None = None
) -> PolicySource:
    """Returns the content of the file; ``faults`` collects errors of keys and values, None raises the first."""
    plain = arguments.path("policy", path)
    name = short(plain)
    if not is_policy_file(plain):
        raise PolicyFileError(f"{name}: a policy file ends in {', '.join(POLICY_SUFFIXES)}")
    text = files.read_text(plain, files.POLICY)
    reader = _PolicyReader(name, Path(plain).parent)
    if plain.endswith(".json"):
        source = reader.gaudi_config(nodes.of_json(text, name))
    else:
        source = reader.policy(nodes.of_yaml(text, name))
    if faults is None:
        reader.check()
    else:
        faults += reader.faults
    return source


def read_options(path: str) -> dict[str, Any]:
    """Returns the arguments of `convert` in a file beside lists."""
    name = short(path)
    reader = _PolicyReader(name, Path(path).parent)
    node = nodes.of_yaml(files.read_text(path, files.OPTIONS), name)
    if node is None:
        raise PolicyFileError(
            f"{name}: is empty; delete it, or say how the lists are meant: legalize: auto"
        )
    found = reader.mapping(node, _OPTION_KEYS, "the options of lists")
    reader.check()
    return found


def from_mapping(mapping: Mapping[str, Any]) -> PolicySource:
    """Returns the content of a policy file with these keys and values."""
    reader = _PolicyReader(nodes.DICT, Path())
    source = reader.policy(nodes.of_mapping(mapping))
    reader.check()
    return source


class _PolicyReader(nodes.Reader):
    other_keys: ClassVar = {
        **dict.fromkeys(("bf16", "fp16", "bfloat16", "float16", "allow"), "low"),
        **dict.fromkeys(("float32", "deny"), "fp32"),
        **dict.fromkeys(("dtype", "precision"), "low_precision_type"),
        **dict.fromkeys(("modules", "layers", "skip", "ignore"), "exclude"),
        **dict.fromkeys(("name", "layer"), "module"),
        **dict.fromkeys(("phase", "training"), "mode"),
    }

    def low_type(self, key: str, node: yaml.Node) -> LowType:
        return self.parsed(key, node, parse_low_type)

    def truth_or_format(self, key: str, node: yaml.Node) -> bool | number_formats.Format:
        text = self.text(key, node)
        if text in ("true", "false"):
            return text == "true"
        return self.parsed(key, node, lambda name: parse_format(key, name))

    # --- lists, sections and files

    def ops(self, kind: str, node: yaml.Node) -> OpList:
        lines = [
            (self.text(f"an op of {kind}", item), self.where(item))
            for item in self.items(kind, node)
        ]
        refused: list[OpListError] = []
        found = from_lines(lines, kind, faults=refused)
        self.faults += [PolicyFileError(str(each)) for each in refused]
        return found

    def op_list(self, kind: str, node: yaml.Node) -> tuple[OpList, tuple[Entry, ...]]:
        """Returns the ops that are added to a list, and those that are removed."""
        if not isinstance(node, yaml.MappingNode):
            return self.ops(kind, node), ()

        def removed(reader: _PolicyReader, key: str, each: yaml.Node) -> tuple[Entry, ...]:
            items = reader.items(kind, each)
            return tuple(Entry(reader.text("an op", item), reader.where(item)) for item in items)

        readers = {"add": lambda reader, key, each: reader.ops(kind, each), "remove": removed}
        found = self.mapping(node, readers, kind)
        return found.get("add", OpList({})), found.get("remove", ())

    def base(self, key: str, node: yaml.Node) -> str | None:
        """Returns the shipped set or the directory of that name; None for ``none``."""
        name = self.text(key, node)
        if name == "none":
            return None
        try:
            if shipped_set(name):
                return name
        except OptionError as error:
            raise self.error(node, error) from None
        known = set_names()
        folder = os.fspath(self._folder / name)
        if os.path.isdir(folder):  # noqa: PTH112  # it takes any text
            return folder
        raise self.error(
            node,
            f"lists {shown(name)} is neither a shipped set ({', '.join(known)}), nor a directory, nor "
            f"none{suggestion(name, known)}",
        )

    def section(self, node: yaml.Node) -> SectionSource:
        known = len(self.faults)
        found = self.mapping(node, _SECTION_KEYS, "a section")
        conditions = {key: value for key, value in found.items() if key in CONDITIONS}
        lists = {key: value for key, value in found.items() if key in KEYS}
        source = SectionSource(lists, conditions, found.get("low_precision_type"), self.where(node))
        if len(self.faults) > known:
            return source  # a condition may be missing because of its error
        empty = [key for key, value in conditions.items() if value == ()]
        if empty:
            raise self.error(node, f"{empty[0]} is empty; name at least one, or leave it out")
        if not lists:
            raise self.error(node, f"a section decides nothing; give it {' or '.join(KEYS)}")
        if not conditions:
            raise self.error(
                node, f"a section holds for every call; give it {' or '.join(CONDITIONS)}"
            )
        least, greatest = conditions.get("min_numel"), conditions.get("max_numel")
        if least is not None and greatest is not None and least > greatest:
            raise self.error(node, f"min_numel {least} is above max_numel {greatest}")
        return source

    def sections(self, key: str, node: yaml.Node) -> tuple[SectionSource, ...]:
        found = []
        for each in self.items(key, node):
            try:
                found.append(self.section(each))
            except PolicyFileError as error:
                self.faults.append(error)
        return tuple(found)

    def exclude(self, key: str, node: yaml.Node) -> SectionSource:
        """Returns the section that keeps these modules in float32."""
        stars = from_lines([("*", self.where(node))], "fp32")
        return SectionSource(
            {"fp32": stars}, {"module": self.texts(key, node)}, None, self.where(node)
        )

    def policy(self, node: yaml.Node | None) -> PolicySource:
        if node is None:
            return PolicySource(where=self._source)
        found = self.mapping(node, _POLICY_KEYS, "a policy")
        lists = {key: value for key, value in found.items() if key in KEYS}
        excluded = found.get("exclude")
        return PolicySource(
            lists={key: added for key, (added, _) in lists.items()},
            removed={key: removed for key, (_, removed) in lists.items() if removed},
            base=found.get("lists", DEFAULT_SET),
            low_precision_type=found.get("low_precision_type"),
            formats={key: value for key, value in found.items() if key in _FORMAT_KEYS},
            sections=(*([excluded] if excluded else []), *found.get("sections", ())),
            where=self._source,
        )

    def gaudi_config(self, node: yaml.Node | None) -> PolicySource:
        assert node is not None  # JSON is never empty
        found = self.mapping(node, _GAUDI_KEYS, "a Gaudi configuration")
        is_autocast = any(found.get(f"autocast_{name}_ops") for name in ("bf16", "fp32"))
        is_hmp = found.get("use_habana_mixed_precision", not is_autocast)
        prefix = "hmp" if is_hmp else "autocast"
        given = {"low": found.get(f"{prefix}_bf16_ops"), "fp32": found.get(f"{prefix}_fp32_ops")}
        lists = {kind: op_list for kind, op_list in given.items() if op_list is not None}
        notes: list[str] = []
        base: str | None = "hmp" if is_hmp else DEFAULT_SET
        if not is_hmp and not lists:
            base = None
            notes.append(f"{self._source}: use_habana_mixed_precision is false: nothing is cast")
        elif is_hmp and found.get("hmp_opt_level") == "O2":
            base = "o2"
            if lists:
                notes.append(
                    f"{self._source}: hmp_opt_level 'O2' ignores its op lists; use 'O1' to read them"
                )
                lists = {}
        return PolicySource(
            lists=lists,
            # As with HMP's files, a given list replaces the shipped one.
            removed=dict.fromkeys(lists, (Entry("*", ""),)),
            base=base,
            low_precision_type=found.get("low_precision_type"),
            formats={key: value for key, value in found.items() if key in _FORMAT_KEYS},
            is_verbose=found.get("hmp_is_verbose", False),
            notes=tuple(notes),
            where=self._source,
        )


# --- the keys of files -------------------------------------------------------------------------

_FORMAT_KEYS: Final[nodes.Readers] = {
    "rounding": lambda reader, key, node: reader.choice(key, node, ROUNDING_MODES),
    "overflow": lambda reader, key, node: reader.choice(key, node, OVERFLOWS),
    "round_gradients": _PolicyReader.truth_or_format,
}

_OPTION_KEYS: Final[nodes.Readers] = {
    "low_precision_type": _PolicyReader.low_type,
    "device_types": nodes.Reader.devices,
    "legalize": lambda reader, key, node: reader.choice(key, node, LEGALIZE_MODES),
    "hardware": lambda reader, key, node: reader.choice(key, node, HARDWARE_MODES),
    "keep_weight_casts": nodes.Reader.truth,
    **_FORMAT_KEYS,
}

_POLICY_KEYS: Final[nodes.Readers] = {
    "low_precision_type": _PolicyReader.low_type,
    **_FORMAT_KEYS,
    "lists": _PolicyReader.base,
    **dict.fromkeys(KEYS, _PolicyReader.op_list),
    "exclude": _PolicyReader.exclude,
    "sections": _PolicyReader.sections,
}

_SECTION_KEYS: Final[nodes.Readers] = {
    **{key: getattr(_PolicyReader, condition.kind) for key, condition in CONDITIONS.items()},
    "low_precision_type": _PolicyReader.low_type,
    **dict.fromkeys(KEYS, _PolicyReader.ops),
}


def _ops_or_null(kind: str) -> Callable[[_PolicyReader, str, yaml.Node], OpList | None]:
    return lambda reader, key, node: None if node.tag.endswith(":null") else reader.ops(kind, node)


_GAUDI_KEYS: Final[nodes.Readers] = {
    "use_habana_mixed_precision": _PolicyReader.truth,
    "hmp_is_verbose": _PolicyReader.truth,
    "hmp_opt_level": lambda reader, key, node: reader.choice(key, node, ("O1", "O2")),
    "hmp_bf16_ops": _ops_or_null("low"),
    "hmp_fp32_ops": _ops_or_null("fp32"),
    "autocast_bf16_ops": _ops_or_null("low"),
    "autocast_fp32_ops": _ops_or_null("fp32"),
    "low_precision_type": _PolicyReader.low_type,
    **_FORMAT_KEYS,
    **dict.fromkeys(  # keys unrelated to casting
        (
            *("use_fused_adam", "use_fused_clip_norm", "use_torch_autocast", "use_dynamic_shapes"),
            *("optimum_version", "transformers_version", "_name_or_path", "architectures"),
            "model_type",
        ),
        lambda reader, key, node: None,
    ),
}
