"""The lines of a contract, and their file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import yaml

from .. import files, ops
from ..errors import PolicyFileError, raised_here, short
from ..policy import CONDITIONS, Call, Reader, Section, matches, of_mapping, of_yaml
from ..tensors import long_name

#: Key -> what it says of a call, or of a tensor. In the order in which contracts are written.
KEYS: Final = {
    "compute": "computed in",
    "output": "has an output of",
    "contents": "has contents of",
    "saved": "saves for the backward",
    "gradient": "has a gradient of",
}

_PHASES: Final = ("forward", "backward")

#: The name of a contract that is not in a file, in messages.
_GIVEN: Final = "<contract>"

#: The keys that a line about tensors may have.
_OF_TENSORS: Final = ("contents", "gradient")


@dataclass(frozen=True, eq=False)
class ContractLine:
    """One line of a contract.

    Attributes:
        where: ``"contract.yaml:3"``.
        section: The conditions on a call.
        ops: Op names; () for every op.
        tensors: Globs of parameters' and buffers' qualified names; () if the line is about calls.
        optimizer: Globs of names in the optimizer's state, such as ``exp_avg``.
        phase: ``"forward"`` or ``"backward"``: only calls in it; ``""`` for all. Gradients are in both.
        expected: Key -> the dtypes allowed.
    """

    where: str
    section: Section
    ops: tuple[str, ...]
    tensors: tuple[str, ...]
    optimizer: tuple[str, ...]
    phase: str
    expected: Mapping[str, tuple[torch.dtype, ...]]

    @property
    def is_about_calls(self) -> bool:
        """Whether the line is about calls, not about tensors by name."""
        return not (self.tensors or self.optimizer)

    @property
    def is_about_modules(self) -> bool:
        """Whether its ``output`` and ``gradient`` are those of whole modules."""
        return not self.ops and any(key.startswith("module") for key, _ in self.section.conditions)

    def is_about_call(self, call: Call) -> bool:
        """Whether the line's conditions hold for ``call``, whatever its phase."""
        return (not self.ops or call.op in self.ops) and self.section.holds_for(call)

    def is_module(self, call: Call) -> bool:
        """Whether the line is about the innermost running module itself, not only one around it."""
        given = dict(self.section.conditions)
        return (
            any(
                matches(key, each, call.module)
                for key in ("module", "module_regex")
                for each in given.get(key, ())
            )
            or call.module_class in given.get("module_class", ())
        ) and self.section.holds_for(call)

    def is_about(self, name: str, *, of_optimizer: bool = False) -> bool:
        """Whether the line is about the tensor of that name."""
        globs = self.optimizer if of_optimizer else self.tensors
        return any(matches("module", glob, name) for glob in globs)


def is_contract(path: str | os.PathLike[str]) -> bool:
    """Whether a file looks like a contract: YAML named so, or with a line that begins with ``expect:``."""
    name = os.fspath(path)
    if not name.endswith((".yaml", ".yml")):
        return False
    if Path(name).stem.lower().endswith("contract"):
        return True
    try:
        text = files.read_text(name, files.CONTRACT)
    except raised_here(PolicyFileError):  # reading it as a policy says why
        return False
    return any(line.startswith("expect:") for line in text.splitlines())


def read(contract: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[ContractLine, ...]:
    """Returns the lines of a contract: a YAML file, the text of one, or a mapping with its keys.

    Raises:
        PolicyFileError: It can't be read, or is not a contract.
    """
    if isinstance(contract, Mapping):
        return _lines(Reader(_GIVEN, Path()), of_mapping(contract, _GIVEN))
    path = os.fspath(contract)
    is_text = "\n" in path
    name = _GIVEN if is_text else short(path)
    node = of_yaml(path if is_text else files.read_text(path, files.CONTRACT), name)
    if node is None:
        raise PolicyFileError(f"{name}: empty; a contract has a list under 'expect:'")
    return _lines(Reader(name, Path(path).parent), node)


def _lines(reader: Reader, node: yaml.Node) -> tuple[ContractLine, ...]:
    readers = {
        "expect": lambda reader, key, node: reader.each(
            lambda _, each: _line(reader, each), key, node
        )
    }
    lines: tuple[ContractLine, ...] = reader.mapping(node, readers, "a contract").get("expect", ())
    reader.check()
    if not lines:
        raise reader.error(node, "a contract without lines; list them under 'expect:'")
    return lines


def _line(reader: Reader, node: yaml.Node) -> ContractLine:
    found = reader.mapping(node, _READERS, "a line of a contract")
    reader.check()
    expected = {key: found[key] for key in KEYS if key in found}
    if not expected:
        raise reader.error(node, f"this line expects nothing; give it {' or '.join(KEYS)}")
    conditions = {key: value for key, value in found.items() if key in CONDITIONS}
    line = ContractLine(
        reader.where(node),
        Section({}, **conditions),
        found.get("op", ()),
        found.get("tensor", ()),
        found.get("optimizer", ()),
        found.get("phase", ""),
        expected,
    )
    if line.is_about_calls and line.ops and "saved" in expected:
        raise reader.error(
            node,
            "a line with an op can't have saved, which is known by module; name a module instead",
        )
    if not line.is_about_calls:
        wrong = [*conditions, *(["op"] if line.ops else [])]
        wrong += [key for key in expected if key not in _OF_TENSORS]
        if wrong:
            raise reader.error(
                node, f"a line about tensors has no {wrong[0]}; it has {' and '.join(_OF_TENSORS)}"
            )
    return line


def _ops(reader: Reader, key: str, node: yaml.Node) -> tuple[str, ...]:
    names = reader.texts(key, node)
    found = [ops.resolve(name) for name in names]
    if None in found:
        raise reader.error(node, ops.unknown(names[found.index(None)]))
    return tuple(filter(None, found))


_READERS: Final = {
    **{key: getattr(Reader, condition.kind) for key, condition in CONDITIONS.items()},
    "phase": lambda reader, key, node: reader.choice(key, node, _PHASES),
    "op": _ops,
    "tensor": Reader.texts,
    "optimizer": Reader.texts,
    **dict.fromkeys(KEYS, Reader.dtypes),
}


def written(dtypes: tuple[torch.dtype, ...]) -> str:
    """Returns dtypes as messages name them: ``"float32 or float64"``."""
    return " or ".join(map(long_name, dtypes))


def real(dtype: Any) -> Any:
    """Returns the dtype of the parts of complex numbers; other dtypes and formats as they are."""
    return dtype.to_real() if isinstance(dtype, torch.dtype) and dtype.is_complex else dtype
