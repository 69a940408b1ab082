"""``hmpx kernels``: builds the kernels that round to number formats, or shows where they are."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import number_formats
from ..errors import KernelsError
from . import output
from .options import add_command


def add_parser(commands: Any) -> None:
    """Adds the parser of ``hmpx kernels``."""
    parser = add_command(
        commands,
        "kernels",
        run,
        help="build the kernels that round to number formats, or show where they are",
        usage="hmpx kernels [--build [--output PATH]]",
        description="Prints where the compiled kernels are that round to number formats on the CPU,\n"
        "and whether they can be used. They are built when something is rounded for the first time, or\n"
        "by --build: before many processes start, or for machines that have no compiler.",
        epilog="""\
A library that --output wrote is used where HMPX_KERNELS is its absolute path. It runs on other
machines of the same architecture, too (x86-64: those with AVX2), and is for this version of hmpx.

exit status:
  0 the kernels can be used; 1 they can't, or can't be built; 2 wrong arguments or HMPX_KERNELS

examples:
  hmpx kernels
  hmpx kernels --build
  hmpx kernels --build --output /opt/hmpx/kernels.so""",
    )
    parser.add_argument(
        "--build", action="store_true", help="build them, whether or not they are there"
    )
    parser.add_argument(
        "--output", metavar="PATH", help="write them to this file instead of the user's cache"
    )


def run(options: argparse.Namespace) -> int:
    """Prints the state of the kernels, having built them if asked to; status 1 if they can't be used."""
    if options.build:
        try:
            return output.show(_build_kernels(options.output))
        except KernelsError as error:
            output.complain(str(error))
            return 1
    if options.output is not None:
        options.parser.error("--output says where --build writes; add --build")
    state = number_formats.kernels_state()
    try:
        compiler = " ".join(number_formats.find_compiler())
    except KernelsError as error:
        compiler = str(error)
    lines = [
        f"library: {state.path or 'none'}",
        f"state: {state.fault or 'ready'}",
        f"compiler: {number_formats.shown_command(compiler)}",
    ]
    return output.show(lines, status=1 if state.fault else 0)


def _build_kernels(output: str | None) -> Iterator[str]:
    if output is not None:
        path = Path(output).absolute()
        number_formats.build_portable(path)
        yield f"library: {path}"
        yield f"to use it: HMPX_KERNELS={path}"
        return
    built = number_formats.build_kernels()
    if built.fault:
        raise KernelsError(built.fault)
    yield f"library: {number_formats.kernels_path()}"
