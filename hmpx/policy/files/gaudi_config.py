"""Reads the ``gaudi_config.json`` of optimum-habana: the parts about casting, for HMP or autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import yaml

from ...errors import PolicyFileError
from ..lists.op_list import Entry, OpList
from ..lists.sets import DEFAULT_SET
from . import json_nodes
from .policy_reader import PolicyReader, format_options
from .sources import PolicySource

#: What else gaudi_config.json may hold, none of which is about casting.
_OTHER_KEYS: Final = (
    "use_fused_adam", "use_fused_clip_norm", "use_torch_autocast", "use_dynamic_shapes",
    "optimum_version", "transformers_version", "_name_or_path", "architectures", "model_type",
)  # fmt: skip

#: Stands for the lines that take all ops out of a shipped list.
_EVERYTHING: Final = (Entry("*", ""),)


def parse(text: str, source: str, faults: list[PolicyFileError] | None = None) -> PolicySource:
    """Returns the lists in a Gaudi configuration, of HMP or of Gaudi's autocast.

    Args:
        text: The whole file.
        source: What error messages call it.
        faults: Gets the errors of single keys and values; None to raise the first.

    Raises:
        PolicyFileError: It is not a Gaudi configuration.
    """
    node = json_nodes.compose(text, source)
    reader = PolicyReader(source, faults)

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
            "low_precision_type": reader.low_type,
            **reader.of_formats,
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
    base: str | None = "hmp" if is_hmp else DEFAULT_SET
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
        low_precision_type=found.get("low_precision_type"),
        formats=format_options(found),
        is_verbose=found.get("hmp_is_verbose", False),
        notes=tuple(notes),
        where=source,
    )
