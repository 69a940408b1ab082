"""How hmpx relies on private parts of torch: each is looked up, and has a fallback.

``parts.ini`` lists those that `import torch` loads, ``compiler.ini`` those of torch.compile. No module outside
this package names anything private of torch. If a part is missing, a correct but slower fallback replaces it, or
its feature is dropped, and `convert` warns. If results would be wrong, `convert` raises an error.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor

from ..errors import HmpxWarning, TorchError
from ..files import read_sections
from ..version import __version__


def torch_version() -> tuple[int, int]:
    """Returns the installed torch's version: (2, 14) for 2.14.1, its release candidates and nightlies."""
    major, minor = re.match(r"(\d+)\.(\d+)", torch.__version__).groups()  # type: ignore[union-attr]
    return int(major), int(minor)


@dataclass(frozen=True, slots=True)
class TorchPart:
    """A private part of torch that hmpx relies on, as found in the installed torch."""

    feature: str  # The feature of hmpx that needs it
    names: tuple[str, ...]  # Its dotted names in torch
    without: str  # The effect, as one clause, if it is not as expected
    is_needed: bool = False  # `convert` then raises an error
    fault: str = ""  # The difference from what is expected


_parts: list[TorchPart] = []


def parts() -> tuple[TorchPart, ...]:
    """Returns the parts that `import torch` loads, in the order in which they were tried."""
    return tuple(_parts)


def check() -> None:
    """Warns, once per process, about features that don't work with this torch; raises if results would be wrong."""
    if faults := [part for part in _parts if part.fault]:
        refuse([part for part in faults if part.is_needed])
        warn_once(faults)


_warned: set[str] = set()

_REMEDY: Final = (
    f"install a newer hmpx than {__version__}, or a version of torch that it was tested with: "
    "see docs/evidence/versions.md"
)


def refuse(faults: Sequence[TorchPart]) -> None:
    """Raises TorchError if there are any ``faults``."""
    if faults:
        what = "\n  ".join(f"{part.feature}: {part.fault}" for part in faults)
        raise TorchError(f"torch {torch.__version__} is not as hmpx needs it:\n  {what}\n{_REMEDY}")


def warn_once(faults: Sequence[TorchPart]) -> None:
    """Warns about ``faults`` that no earlier warning in this process has named."""
    faults = [part for part in faults if part.feature not in _warned]
    if not faults:
        return
    _warned.update([part.feature for part in faults])
    what = "\n  ".join(f"{part.feature}: {part.fault}; {part.without}" for part in faults)
    warnings.warn(
        f"torch {torch.__version__} is not as hmpx knows it:\n  {what}\n{_REMEDY}",
        HmpxWarning,
        stacklevel=2,
    )


def _look_up(name: str) -> Any:
    """Looks up a dotted name in torch; imports its module if needed."""
    parts = name.split(".")
    path, found = "", cast(Any, None)
    try:
        for part in parts:
            owner, path = found, f"{path}.{part}" if path else part
            if path in sys.modules:  # torch deletes some from their parent module
                found = sys.modules[path]
            elif isinstance(owner, type) and part in vars(owner):
                found = vars(owner)[part]
            else:
                if not hasattr(owner, part):
                    with contextlib.suppress(ImportError):
                        importlib.import_module(path)
                found = getattr(owner, part)
    except AttributeError:
        raise AttributeError(f"torch has no {name}") from None
    return found


_RELIED_ON: Final = read_sections(str(__package__), "parts.ini")


def rely_on(
    feature: str, *more: str, instead: tuple[Any, ...] | None = None, is_needed: bool = False
) -> Any:
    """Returns the parts of torch that ``parts.ini`` lists for a feature, and ``more``, else ``instead``.

    Without ``instead``, or with ``is_needed``, `convert` raises an error if one is missing.
    """
    listed = dict(_RELIED_ON[feature])
    without = listed.pop("without")
    names = (*more, *listed.values())
    fault, found = "", (None,) * len(names) if instead is None else instead
    try:
        found = tuple(map(_look_up, names))
    except AttributeError as error:
        fault = str(error)
    _parts.append(TorchPart(feature, names, without, is_needed or instead is None, fault))
    return found[0] if len(found) == 1 else found


def one() -> Tensor:
    return torch.ones(1, dtype=torch.float32, device="cpu")


def do_nothing(*args: object) -> None:
    """Does nothing, in place of a missing part."""
