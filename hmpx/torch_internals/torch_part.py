"""How hmpx relies on private parts of torch: each is looked up, tried, and has a fallback.

The parts themselves are in the other modules of this package: `compiler` has those of torch.compile,
the others those that `import torch` loads. Each states its purpose, the version since which it is
known, a test of its behaviour, and what happens without it. No module elsewhere names anything private
of torch. The tests run once, when hmpx is imported, in about 3 ms. A part that is not as expected is
replaced by something that is correct but slower, or its feature is dropped, and `convert` says so;
where results would be wrong, `convert` refuses.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor

from ..errors import HmpxWarning, TorchError, said_by
from ..version import __version__


def torch_version() -> tuple[int, int]:
    """Returns the installed torch's version: (2, 14) for 2.14.1, its release candidates and nightlies."""
    major, minor = re.match(r"(\d+)\.(\d+)", torch.__version__).groups()  # type: ignore[union-attr]
    return int(major), int(minor)


@dataclass(frozen=True, slots=True)
class Part:
    """A private part of torch that hmpx relies on, as found in the installed torch.

    Attributes:
        feature: What hmpx needs it for.
        names: Where torch has it.
        without: What happens where it is not as expected.
        is_needed: Whether `convert` refuses in that case.
        fault: What is not as expected; ``""`` for nothing.
    """

    feature: str
    names: tuple[str, ...]
    without: str
    is_needed: bool = False
    fault: str = ""


_parts: list[Part] = []


def parts() -> tuple[Part, ...]:
    """Returns the parts that `import torch` loads, in the order in which they were tried."""
    return tuple(_parts)


def check() -> None:
    """Warns, once per process, about features that don't work with this torch.

    Raises:
        TorchError: Results would be wrong with it.
    """
    faults = [part for part in _parts if part.fault]
    refuse([part for part in faults if part.is_needed])
    warn_once(faults)


_warned: set[str] = set()

_REMEDY: Final = (
    f"install a newer hmpx than {__version__}, or a version of torch that it was tested with: "
    "see docs/versions.md"
)


def refuse(faults: Sequence[Part]) -> None:
    """Raises TorchError if there are any ``faults``."""
    if faults:
        what = "\n  ".join(f"{part.feature}: {part.fault}" for part in faults)
        raise TorchError(f"torch {torch.__version__} is not as hmpx needs it:\n  {what}\n{_REMEDY}")


def warn_once(faults: Sequence[Part]) -> None:
    """Warns about those ``faults`` that no warning in this process has named yet."""
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


# --- looking up and trying ----------------------------------------------------------------------


class _AbsentError(Exception):
    """torch has nothing under a name."""


def _look_up(name: str) -> Any:
    """Looks up a dotted name in torch, and imports a small module that is not imported yet."""
    parts = name.split(".")
    path, found = "", cast(Any, None)
    try:
        for part in parts:
            owner, path = found, f"{path}.{part}" if path else part
            if path in sys.modules:  # torch deletes some from the module around
                found = sys.modules[path]
            elif isinstance(owner, type) and part in vars(owner):
                found = vars(owner)[part]
            else:
                if not hasattr(owner, part):
                    with contextlib.suppress(ImportError):
                        importlib.import_module(path)
                found = getattr(owner, part)
    except AttributeError:
        raise _AbsentError(f"torch has no {name}") from None
    return found


def rely_on(
    *names: str,
    feature: str,
    without: str,
    behaves: Callable[..., bool] = lambda *found: True,
    instead: tuple[Any, ...] | None = None,
    is_needed: bool = False,
) -> Any:
    """Looks up ``names`` in torch, and returns them if they behave as expected, else ``instead``.

    Args:
        names: Dotted names.
        feature: See `Part`, also for ``without``.
        without: One clause.
        behaves: Called with what was found, to try it. Otherwise it is enough that it exists.
        instead: One stand-in for each name; None where there are none.
        is_needed: `convert` refuses even though there are stand-ins; those are for use before it.
    """
    fault, found = "", list[Any]()
    try:
        found += map(_look_up, names)
    except _AbsentError as error:
        fault = str(error)
    else:
        did, raised = _tried(lambda: behaves(*found))
        if raised is not None:
            fault = f"trying {' and '.join(names)} raised {said_by(raised)}"
        elif not did:
            fault = f"{' and '.join(names)} did not do what was expected"
    part = Part(feature, names, without, is_needed or instead is None, fault)
    _parts.append(part)
    if not fault:
        return found[0] if len(found) == 1 else tuple(found)
    if instead is None:
        instead = tuple([_Refusing(part) for _ in names])
    return instead[0] if len(instead) == 1 else instead


def one() -> Tensor:
    """Returns a tensor of one element, for tries."""
    return torch.ones(1, dtype=torch.float32, device="cpu")


def do_nothing(*args: object) -> None:
    """Does nothing, in place of a missing part."""


def _tried(run: Callable[[], bool]) -> tuple[bool, Exception | None]:
    """Returns what ``run`` returns when called in a thread of its own, or the error that it raises.

    In a new thread, torch's state is the default. hmpx may be imported inside modes, regions and
    transforms, and where tensors are made on other devices.
    """
    results: list[tuple[bool, Exception | None]] = []

    def catch() -> None:
        try:
            results.append((run(), None))
        except Exception as error:  # another version of torch may raise anything here
            results.append((False, error))

    thread = threading.Thread(target=catch, name="hmpx tries torch")
    try:
        thread.start()
    except RuntimeError:  # no thread can be started
        catch()
    else:
        thread.join()
    return results[0]


class _Refusing:
    """Replaces a part that torch does not have, where nothing else will do."""

    def __init__(self, part: Part) -> None:
        self._part = part

    def __call__(self, *args: object, **kwargs: object) -> Any:
        refuse([self._part])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self
