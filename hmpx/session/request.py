"""What `convert` is asked for, checked as a whole before anything is patched."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from .. import arguments
from ..arguments import is_a
from ..casting import Options
from ..compute import LEGALIZE_MODES
from ..errors import OptionError, shown
from ..number_formats import OVERFLOWS, is_format, spellings
from ..number_formats import ROUNDING_MODES as ROUNDINGS
from ..policy import (
    Policy,
    parse_format,
    path_and_policy,
    policy_request,
    read_source,
    requested_policy,
    set_names,
)
from ..rules import all_rules
from ..tensors import parse_device_types

if TYPE_CHECKING:
    from ..number_formats import Format


@dataclass(frozen=True, kw_only=True)
class Request:
    """A conversion that can be made.

    Attributes:
        policy: The decision for every op.
        device_types: The device types whose tensors are cast.
        verbose: Whether calls are logged; ``"once"``: each distinct decision once.
        options: How ops compute.
    """

    policy: Policy
    device_types: frozenset[str]
    verbose: bool | str
    options: Options


def checked(
    bf16_file_path: object,
    fp32_file_path: object,
    verbose: object,
    too_many: tuple[object, ...],
    *,
    fp16_file_path: object,
    opt_level: object,
    low_precision_type: object,
    lists: object,
    policy: object,
    device_types: Iterable[str] | None,
    strict: object,
    legalize: object,
    reuse_casts: object,
    keep_weight_casts: object,
    rounding: object,
    overflow: object,
    round_gradients: object,
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
    options = Options(
        legalize=arguments.choice("legalize", legalize, LEGALIZE_MODES),
        reuse_casts=arguments.truth("reuse_casts", reuse_casts),
        keep_weight_casts=_kept_casts(keep_weight_casts),
        rounding=arguments.choice("rounding", rounding, ROUNDINGS, spellings("rounding")),
        overflow=None if overflow is None else arguments.choice("overflow", overflow, OVERFLOWS),
        round_gradients=_rounded_gradients(round_gradients),
    )
    found_types = parse_device_types(device_types)
    bf16_path, policy = path_and_policy(bf16_file_path, policy)
    if policy is not None and not isinstance(policy, Policy):
        policy = source = read_source(policy)
        is_verbose = is_verbose or source.is_verbose
    asked = policy_request(
        bf16_path,
        fp32_file_path,
        fp16_file_path=fp16_file_path,
        opt_level=opt_level,
        low_precision_type=low_precision_type,
        lists=lists,
        policy=policy,
        strict=strict,
    )
    made = requested_policy(asked)
    _check_effect(options, made)
    return Request(
        policy=made,
        device_types=found_types,
        verbose=is_verbose,
        options=options,
    )


def plain(given: Mapping[str, object]) -> dict[str, object] | None:
    """Returns `convert`'s arguments, to be compared with later ones; None if they don't say all.

    They don't where they name files, or formats that are registered, whose content may change.
    """
    said = dict(given)
    if type(said["device_types"]) is set:
        said["device_types"] = frozenset(said["device_types"])
    may_change = any(
        type(value) not in _PLAIN or (type(value) is str and value and name in _NAMES)
        for name, value in said.items()
        if not (name == "lists" and type(value) is str and value in _sets())
    )
    return None if may_change or said["too_many"] else said


_sets: Final = functools.cache(set_names)
_PLAIN: Final = {str, bool, type(None), frozenset, tuple, torch.dtype, Policy}
#: Arguments whose strings name files, or formats that are registered.
_NAMES: Final = {
    *("bf16_file_path", "fp32_file_path", "fp16_file_path", "lists", "policy"),
    *("low_precision_type", "round_gradients"),
}


def _rounded_gradients(value: object) -> bool | Format:
    if is_a(value, str) or is_format(value):
        return parse_format("round_gradients", value)
    if is_a(value, (bool, int)) and value in (0, 1):
        return bool(value)
    raise OptionError(
        f"round_gradients must be True, False, or a number format or its name, not {shown(value)}"
    )


def _check_effect(options: Options, policy: Policy) -> None:
    """Checks that there are ops for the options of number formats; rules may give some a format.

    Raises:
        OptionError: There are none.
    """
    unset = Options()
    given = [name for name in _OF_FORMATS if getattr(options, name) != getattr(unset, name)]
    if given and not policy.formats() and not all_rules():
        raise OptionError(
            f"{given[0]} has no effect: no op runs in a number format; name one as low_precision_type "
            f"or on an op's line, register the rule that does before, or leave {given[0]} out"
        )


#: The options that only ops in number formats have.
_OF_FORMATS: Final = ("rounding", "overflow", "round_gradients")


_EXPECTED: Final = "True, False, 'once' or 'hmp'"


def _verbosity(value: object) -> bool | str:
    if is_a(value, str):
        name = str.__str__(value)
        if name in ("once", "hmp"):
            return name
    elif is_a(value, (bool, int)) and value in (0, 1):
        return bool(value)
    raise OptionError(f"isVerbose must be {_EXPECTED}, not {shown(value)}")


def _kept_casts(value: object) -> bool | str:
    if is_a(value, str) and str.__str__(value) == "auto":
        return "auto"
    if is_a(value, (bool, int)) and value in (0, 1):
        return bool(value)
    raise OptionError(f"keep_weight_casts must be 'auto', True or False, not {shown(value)}")


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
