"""Parsers of the command line: adding commands and options, and options shared by commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Final

from .. import policy
from ..casting import Options


def add_command(
    commands: Any, name: str, command: Callable[[argparse.Namespace], int], **texts: str
) -> argparse.ArgumentParser:
    """Adds a command, run by ``command``, and returns its parser; ``texts`` are argparse's."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        **texts,
    )
    parser.set_defaults(command=command, parser=parser)
    return parser


def option(group: Any, names: str, help: str, **settings: Any) -> None:
    """Adds an option: ``"--runs N"`` takes a value, as does one with ``choices``; ``"--quiet"`` is a flag."""
    words = names.split()
    flags = [word for word in words if word.startswith("-")]
    metavars = [word for word in words if not word.startswith("-")]
    if metavars:
        settings["metavar"] = metavars[0]
    elif "choices" not in settings:
        settings["action"] = "store_true"
    group.add_argument(*flags, help=help, **settings)


#: Arguments of `hmpx.convert` that `add_list_options` adds.
_LIST_OPTIONS: Final = (
    *("bf16_file_path", "fp32_file_path", "fp16_file_path", "lists", "policy", "opt_level"),
    *("low_precision_type", "strict"),
)


def add_list_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that choose op lists, like the arguments of `hmpx.convert`."""
    group = parser.add_argument_group("list options, as in hmpx.convert")
    files = ", ".join(policy.FILE_NAMES.values())
    option(group, "--policy FILE", "a policy file, instead of all lists")
    option(group, "--bf16 FILE", "ops to run in the low type", dest="bf16_file_path")
    option(group, "--fp32 FILE", "ops to run in float32", dest="fp32_file_path")
    option(group, "--fp16 FILE", "ops to run in float16", dest="fp16_file_path")
    option(
        group,
        "--lists NAME_OR_DIR",
        f"a set of lists: a shipped one, or a directory that holds {files}",
    )
    modules = "modules to keep in fp32, by names as in model.named_modules()"
    option(group, "--exclude NAME[,NAME]", modules)
    option(
        group,
        "--opt-level",
        "O1, the default, follows the lists; O2 runs GEMMs and convolutions in the low type, other ops in "
        "fp32",
        choices=("O1", "O2"),
    )
    option(
        group,
        "--low-precision-type TYPE",
        "bfloat16, the default, float16, or a number format such as float8_e4m3fn (hmpx ops --formats)",
    )
    option(group, "--strict", "make an unknown name an error")


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


def only_given(**arguments: Any) -> dict[str, Any]:
    """Returns the arguments that the user gave: those that are neither empty nor False."""
    return {name: value for name, value in arguments.items() if value}
