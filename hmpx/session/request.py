"""The arguments of `convert`, checked as a whole before anything is patched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, Final

from ..arguments import is_a
from ..casting import Options
from ..errors import OptionError, shown, suggestion
from ..policy import Policy, made_policy
from ..rules import all_rules
from ..tensors import parse_device_types

#: The decision for every op, the device types whose tensors are cast, how ops compute, and the logging.
Request = tuple[Policy, frozenset[str], Options, bool | str]


def checked(given: Mapping[str, Any]) -> Request:
    """Returns the request from `convert`'s arguments.

    Raises:
        OpListError: A list can't be read, or an op is in two lists.
        PolicyFileError: ``policy`` can't be read, or is not a policy.
        OptionError: An argument has an invalid value.
    """
    for name in given["_unknown"]:
        raise unknown_argument("convert", name, [each for each in given if each[0] != "_"])
    if given["_too_many"]:
        raise OptionError(
            "convert takes three positional arguments, bf16_file_path, fp32_file_path and isVerbose, "
            f"not {3 + len(given['_too_many'])}; pass the others by name: opt_level=..."
        )
    verbose = _verbosity(given["verbose"], given["isVerbose"])
    options = Options.checked(given)
    found_types = parse_device_types(given["device_types"])
    made, is_logged = made_policy(given)
    _check_effect(options, made)
    return made, found_types, options, verbose or is_logged


def _check_effect(options: Options, policy: Policy) -> None:
    """Checks that options of number formats apply to some op; rules may give ops a format."""
    unset = Options()
    of_formats = [each.name for each in fields(Options) if each.metadata["is_of_formats"]]
    given = [name for name in of_formats if getattr(options, name) != getattr(unset, name)]
    if given and not policy.formats() and not all_rules():
        raise OptionError(
            f"{given[0]} has no effect: no op runs in a number format; name one as low_precision_type "
            f"or on an op's line, register the rule that does before, or leave {given[0]} out"
        )


#: Other names of arguments -> those of `convert`.
_OTHER_NAMES: Final = {
    **dict.fromkeys(("dtype", "precision", "low_dtype"), "low_precision_type"),
    **dict.fromkeys(("low", "bf16", "bf16_file", "bf16_list"), "bf16_file_path"),
    **dict.fromkeys(("fp32", "fp32_file", "fp32_list"), "fp32_file_path"),
    **dict.fromkeys(("device", "devices", "device_type"), "device_types"),
    **dict.fromkeys(("skip", "ignore", "modules", "layers"), "exclude"),
}


def unknown_argument(function: str, name: str, known: Iterable[str]) -> OptionError:
    """Returns the error that ``function`` has no argument ``name``, with the nearest name."""
    hint = suggestion(name, known, _OTHER_NAMES)
    if name == "enabled":
        hint = "; hmpx.disable_casts() is a block without casts"
    return OptionError(f"hmpx.{function} has no argument {shown(name)}{hint}")


_EXPECTED: Final = "True, False, 'once' or 'hmp'"


def _verbosity(verbose: object, of_hmp: object) -> bool | str:
    if verbose is not None and of_hmp is not None:
        raise OptionError("isVerbose is HMP's name for verbose: give one of the two")
    name, value = ("verbose", verbose) if of_hmp is None else ("isVerbose", of_hmp)
    if value is None:
        return False
    if is_a(value, str):
        text = str.__str__(value)
        if text in ("once", "hmp"):
            return text
    elif is_a(value, (bool, int)) and value in (0, 1):
        return bool(value)
    raise OptionError(f"{name} must be {_EXPECTED}, not {shown(value)}")
