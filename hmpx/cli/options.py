"""Makes parsers of the commands' texts, and has the options that commands share."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Final, NamedTuple

from .. import policy
from ..casting import Options


class Command(NamedTuple):
    """A command."""

    # Five parts between lines of ``---``: help, usage, description, options for `add_options`, epilog
    text: str
    run: Callable[[argparse.Namespace], int]  # Returns the exit status
    settings: Mapping[str, dict[str, Any]] = {}  # Those of `add_options`
    writes: tuple[str, ...] = ()  # Options that name files which it writes at its end
    extend: Callable[[argparse.ArgumentParser], None] | None = None  # Adds more options


def add_command(commands: Any, name: str, command: Command) -> None:
    """Adds the parser of a command."""
    help_text, usage, description, options, epilog = command.text.split("\n---\n")
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        help=help_text,
        usage=usage,
        description=description,
        epilog=epilog,
    )
    parser.set_defaults(command=command, parser=parser)
    if command.extend is not None:
        command.extend(parser)
    add_options(parser, options, command.settings)


#: Metavars of arguments that name files or directories.
PATHS: Final = ("DIR", "FILE", "FILE_OR_DIR", "NAME_OR_DIR", "OUT")


def _path(name: str) -> str:
    """Returns a path that holds after the program has changed its directory."""
    return os.path.abspath(name) if name else ""  # noqa: PTH100  # any text


def _set_or_path(name: str) -> str:
    is_path = os.path.isdir(name) and name not in policy.set_names()  # noqa: PTH112  # any text
    return _path(name) if is_path else name


_TYPES: Final[dict[str, Any]] = {
    **dict.fromkeys(PATHS, _path),
    "NAME_OR_DIR": _set_or_path,
    "N": int,
    "SECONDS": float,
}


def add_options(
    group: Any, text: str, settings: Mapping[str, dict[str, Any]] | None = None
) -> None:
    """Adds options, each on a line, with two spaces before its help; lines that begin with spaces go on.

    ``--runs N=10`` takes an int, ``--by op|module`` one of these, ``--quiet`` nothing; ``files FILE*`` is
    positional, with any number of values. ``program ...`` is the rest; ``list options`` are those of op lists.
    ``settings`` are more of argparse's arguments, by the option's name.
    """
    for line in re.sub(r"\n +", " ", text).splitlines():
        if line == "list options":
            lists = group.add_argument_group("list options, as in hmpx.convert")
            own = ("bf16", "fp32", "fp16")
            add_options(lists, _LISTS, {n: {"dest": f"{n}_file_path"} for n in own})
            continue
        spec, _, help_text = line.partition("  ")
        names, _, default = spec.partition("=")
        words = names.split()
        flags = [word for word in words if word[0] == "-"] or words[:1]
        given: dict[str, Any] = {"help": help_text or None}
        metavars = words[len(flags) :]
        if metavars == ["..."]:
            given.update(nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
        elif not metavars:
            given["action"] = "store_true"
        elif "|" in metavars[0]:
            given["choices"] = tuple(metavars[0].split("|"))
        else:
            metavar = metavars[0].rstrip("*+?")
            given |= {"metavar": metavar, "type": _TYPES.get(metavar)}
            given["nargs"] = metavars[0][len(metavar) :] or (
                len(metavars) if metavars[1:] else None
            )
        if default:
            given["default"] = default
        group.add_argument(*flags, **given | (settings or {}).get(flags[-1].lstrip("-"), {}))


#: List options other than the lists themselves.
LIST_SETTINGS: Final = f"""\
--policy FILE  a policy file, instead of all lists
--lists NAME_OR_DIR  a set of lists: a shipped one, or a directory that holds {", ".join(policy.FILE_NAMES.values())}
--exclude NAME[,NAME]  modules to keep in fp32, by names as in model.named_modules()
--opt-level O1|O2  O1, the default, follows the lists; O2 runs GEMMs and convolutions in the low type, other
  ops in fp32
--low-precision-type TYPE  bfloat16, the default, float16, or a number format such as float8_e4m3fn (hmpx ops
  --formats)
--strict  make an unknown name an error"""
_LISTS: Final = f"""\
--bf16 FILE  ops to run in the low type
--fp32 FILE  ops to run in float32
--fp16 FILE  ops to run in float16
{LIST_SETTINGS}"""
#: Arguments of `hmpx.convert` that these options give.
_LIST_OPTIONS: Final = (
    *("bf16_file_path", "fp32_file_path", "fp16_file_path", "lists", "policy", "opt_level"),
    *("low_precision_type", "strict"),
)


def add_computing_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options for how ops compute, like the arguments of `hmpx.convert`."""
    group = parser.add_argument_group("options of number formats, as in hmpx.convert")
    for each in fields(Options):
        if each.metadata["flag"]:
            place = group if each.metadata["is_of_formats"] else parser
            place.add_argument(f"--{each.name.replace('_', '-')}", **each.metadata["flag"])


def computing_options(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the given options for how ops compute, as arguments of `hmpx.convert`."""
    given = only_given(**{each.name: getattr(options, each.name, None) for each in fields(Options)})
    return {name: {"yes": True, "no": False}.get(value, value) for name, value in given.items()}


def list_options(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the given list options, as arguments of `hmpx.convert`."""
    given = only_given(**{name: getattr(options, name) for name in _LIST_OPTIONS})
    return {**given, "exclude": options.exclude.split(",")} if options.exclude else given


#: The option of the devices.
DEVICE_TYPES: Final = "--device-types T[,T]  cast tensors on these devices, such as cuda; default: the accelerator's, else cpu"


def device_options(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the given devices, as an argument of `hmpx.convert`."""
    return {"device_types": options.device_types.split(",")} if options.device_types else {}


def only_given(**arguments: Any) -> dict[str, Any]:
    """Returns the arguments that the user gave: those that are neither empty nor False."""
    return {name: value for name, value in arguments.items() if value}
