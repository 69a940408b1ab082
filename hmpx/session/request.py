"""What `convert` is asked for, checked as a whole before anything is patched."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from .. import arguments
from ..arguments import is_a
from ..compute import LEGALIZE_MODES
from ..errors import OptionError, shown
from ..number_formats import ROUNDING_MODES as ROUNDINGS
from ..policy import LowType, Policy, PolicySource, is_policy_file, load_policy, read_source
from ..tensors import parse_device_types


@dataclass(frozen=True, kw_only=True)
class Request:
    """A conversion that can be made.

    Attributes:
        policy: The decision for every op.
        device_types: The device types whose tensors are cast.
        verbose: Whether calls are logged; ``"once"``: each distinct decision once.
        legalize: See `convert`, and
        reuse_casts: there, and
        rounding: there, and
        round_gradients: there.
    """

    policy: Policy
    device_types: frozenset[str]
    verbose: bool | str
    legalize: str
    reuse_casts: bool
    rounding: str
    round_gradients: bool


def checked(
    bf16_file_path: object,
    fp32_file_path: object,
    verbose: object,
    too_many: tuple[object, ...],
    *,
    fp16_file_path: str | os.PathLike[str],
    opt_level: str,
    low_precision_type: LowType | str,
    lists: str | os.PathLike[str] | None,
    policy: Policy | PolicySource | Mapping[str, Any] | str | os.PathLike[str] | None,
    device_types: Iterable[str] | None,
    strict: bool,
    legalize: str,
    reuse_casts: bool,
    rounding: str,
    round_gradients: bool,
) -> Request:
    """Returns the request that `convert`'s arguments make; ``too_many`` are positional ones.

    Raises:
        OpListError: A list can't be read, or an op stands in two lists.
        PolicyFileError: ``policy`` can't be read, or is not a policy.
        OptionError: An argument has a value that it can't have.
    """
    if too_many:
        raise OptionError(_too_many((bf16_file_path, fp32_file_path, verbose, *too_many)))
    is_verbose = _verbosity(verbose)
    options = {
        "legalize": arguments.choice("legalize", legalize, LEGALIZE_MODES),
        "reuse_casts": arguments.truth("reuse_casts", reuse_casts),
        "rounding": arguments.choice("rounding", rounding, ROUNDINGS),
        "round_gradients": arguments.truth("round_gradients", round_gradients),
    }
    found_types = parse_device_types(device_types)
    bf16_path = arguments.path("bf16_file_path", bf16_file_path)
    if policy is None and is_policy_file(bf16_path):
        policy, bf16_path = bf16_path, ""
    if policy is not None and not isinstance(policy, Policy):
        policy = source = read_source(policy)
        is_verbose = is_verbose or source.is_verbose
    loaded = load_policy(
        bf16_path,
        fp32_file_path,  # type: ignore[arg-type]  # checked there
        fp16_file_path=fp16_file_path,
        opt_level=opt_level,
        low_precision_type=low_precision_type,
        lists=lists,
        policy=policy,
        strict=strict,
    )
    return Request(policy=loaded, device_types=found_types, verbose=is_verbose, **options)  # type: ignore[arg-type]


_EXPECTED: Final = "True, False, 'once' or 'hmp'"


def _verbosity(value: object) -> bool | str:
    if is_a(value, str):
        name = str.__str__(value)
        if name in ("once", "hmp"):
            return name
    elif is_a(value, (bool, int)) and value in (0, 1):
        return bool(value)
    raise OptionError(f"isVerbose must be {_EXPECTED}, not {shown(value)}")


#: HMP's first order of arguments.
_OLD_ORDER: Final = ("opt_level", "bf16_file_path", "fp32_file_path", "isVerbose")


def _too_many(given: tuple[object, ...]) -> str:
    given = tuple([str.__str__(each) if is_a(each, str) else each for each in given])
    message = (
        "convert takes three positional arguments, bf16_file_path, fp32_file_path and isVerbose, "
        f"not {len(given)}"
    )
    if len(given) == len(_OLD_ORDER) and is_a(given[0], str) and given[0] in ("O1", "O2"):
        named = ", ".join(
            f"{name}={shown(each)}" for name, each in zip(_OLD_ORDER, given, strict=True)
        )
        return f"{message}; in HMP's old order these are convert({named}): pass them by name"
    return f"{message}; pass the others by name"
