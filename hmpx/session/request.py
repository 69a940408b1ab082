"""What `convert` is asked for, checked as a whole before anything is patched."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from .. import arguments
from ..arguments import is_a
from ..casting import Options
from ..compute import LEGALIZE_MODES
from ..errors import OptionError, shown
from ..number_formats import ROUNDING_MODES as ROUNDINGS
from ..number_formats import spellings
from ..policy import Policy, path_and_policy, policy_request, read_source, requested_policy
from ..tensors import parse_device_types


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
        round_gradients=arguments.truth("round_gradients", round_gradients),
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
    return Request(
        policy=requested_policy(asked),
        device_types=found_types,
        verbose=is_verbose,
        options=options,
    )


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
