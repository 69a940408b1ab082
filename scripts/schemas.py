"""Writes the JSON Schemas of policy files, contracts and options beside lists, from the readers of these files.

python scripts/schemas.py

A `Shape` takes the place of a reader: its methods return what the reader's accept. They use the keywords that
draft 7 has, too, which is what most editors know.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml

from hmpx import number_formats, policy, tensors
from hmpx.checking import contract_lines
from hmpx.policy import files, nodes, op_lists

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "hmpx" / "checking" / "schemas"

_Schema = dict[str, Any]

#: What YAML reads as a text, a number or a truth value is a text to hmpx.
TEXT: _Schema = {"type": ["string", "number", "boolean"]}


class FoundError(Exception):
    """Ends a reader, with the schema of its value."""

    def __init__(self, schema: _Schema) -> None:
        self.schema = schema


def found(read: Callable[[], Any]) -> _Schema:
    """Returns what a reader's call returns, or ends with."""
    try:
        schema: _Schema = read()
    except FoundError as end:
        return end.schema
    return schema


def several(item: _Schema) -> _Schema:
    """Returns the schema of a list, of which a single value is one."""
    return {"anyOf": [item, {"type": "array", "items": item}]}


def known(names: Iterable[str]) -> _Schema:
    """Returns the schema of names that editors complete; others are valid, too."""
    return {"anyOf": [{"enum": [*dict.fromkeys(names)]}, TEXT]}


def one_of(keys: Iterable[str]) -> _Schema:
    """Returns the schema of objects that have one of these keys, at least."""
    return {"anyOf": [{"required": [key]} for key in keys]}


class Shape:
    """A reader whose methods return schemas."""

    def __init__(self) -> None:
        self.faults: list[Exception] = []

    def mapping(self, node: object, readers: nodes.Readers, what: str) -> _Schema:
        properties = {key: self.of(readers[key], key) for key in readers}
        raise FoundError(
            {"type": "object", "additionalProperties": False, "properties": properties}
        )

    def of(self, read: Callable[..., Any], key: str) -> _Schema:
        """Returns the schema of a key's value: that of a method of the same name here, or of what it calls."""
        own = getattr(self, read.__name__, None)
        return found(lambda: own(key, None) if own else read(self, key, None))

    def each(self, read: Callable[..., Any], key: str, node: object) -> _Schema:
        return several(found(lambda: read(key, None)))

    def items(self, key: str, node: object) -> Any:
        raise FoundError(several(TEXT))

    def choice(self, key: str, node: object, names: Iterable[str]) -> _Schema:
        return {"enum": [*names]}

    def truth(self, key: str, node: object) -> _Schema:
        return {"type": "boolean"}

    def texts(self, key: str, node: object) -> _Schema:
        return several(TEXT)

    exclude = regexes = devices = ops = _ops = texts

    def count(self, key: str, node: object) -> _Schema:
        return {"type": "integer", "minimum": 0}

    def counts(self, key: str, node: object) -> _Schema:
        return several(self.count(key, node))

    def dtypes(self, key: str, node: object) -> _Schema:
        names = [
            name for d in tensors.COMPUTED for name in (tensors.long_name(d), tensors.short_name(d))
        ]
        return several({"enum": [*names, *map(str, tensors.COMPUTED)]})

    def low_type(self, key: str, node: object) -> _Schema:
        return known([*map(tensors.long_name, tensors.LOW_PRECISION), *number_formats.names()])

    def truth_or_format(self, key: str, node: object) -> _Schema:
        return {"anyOf": [{"type": "boolean"}, *known(number_formats.names())["anyOf"]]}

    def base(self, key: str, node: object) -> _Schema:
        return known(["none", *policy.set_names()])

    def op_list(self, key: str, node: object) -> _Schema:
        mapping = yaml.MappingNode("tag:yaml.org,2002:map", [])
        changes = found(lambda: files._PolicyReader.op_list(self, key, mapping))  # type: ignore[arg-type]
        return {"anyOf": [*several(TEXT)["anyOf"], changes]}

    def sections(self, key: str, node: object) -> _Schema:
        section = found(lambda: files._PolicyReader.section(self, None))  # type: ignore[arg-type]
        section["allOf"] = [one_of(op_lists.KEYS), one_of(policy.CONDITIONS)]
        return several(section)


def contract() -> _Schema:
    """Returns the schema of contracts: a line expects something, of calls or of tensors by name."""
    whole = found(lambda: contract_lines._lines(Shape(), None))  # type: ignore[arg-type]
    array = whole["properties"]["expect"]["anyOf"][1]
    line = array["items"]
    others = {*contract_lines.KEYS} - {*contract_lines._OF_TENSORS}
    never = [key for key in line["properties"] if key in {*policy.CONDITIONS, "op", *others}]
    line["allOf"] = [one_of(contract_lines.KEYS)]
    line["if"] = one_of(["tensor", "optimizer"])
    line["then"] = {"properties": dict.fromkeys(never, False)}
    return {**whole, "required": ["expect"]}


def schemas() -> dict[str, str]:
    """Returns name of a file -> its text."""
    made = {
        "policy": found(lambda: files._PolicyReader.policy(Shape(), yaml.Node)),  # type: ignore[arg-type]
        "contract": contract(),
        "options": found(lambda: Shape().mapping(None, files._OPTION_KEYS, "")),
    }
    draft = "https://json-schema.org/draft/2020-12/schema"
    titles = {
        "policy": "A policy of hmpx",
        "contract": "A contract of hmpx.expect",
        "options": "Options of hmpx beside op lists",
    }
    return {
        f"{name}.json": json.dumps({"$schema": draft, "title": titles[name], **schema}, indent=1)
        + "\n"
        for name, schema in made.items()
    }


def main() -> None:
    """Writes the files."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in schemas().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
