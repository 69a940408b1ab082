"""The command line: ``hmpx run``, ``hmpx check``, ``hmpx ops``, ``hmpx doctor``, ``hmpx kernels``.

Turns arguments into calls and results into text; the only module that prints. Decides nothing
about casting.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import importlib.machinery
import importlib.util
import math
import os
import platform
import sys
import traceback
import types
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from .. import (
    __version__,
    compute,
    formats,
    gaudi,
    number_formats,
    ops,
    policy,
    session,
    torch_internals,
)
from ..compute import LEGALIZE_MODES
from ..errors import HmpxError, HmpxWarning, KernelsError, said_by, short, shown, suggestion
from ..policy import CastPolicy, Decision
from ..tensors import parse_device_types, short_name
from ..torch_internals import VF_NAMESPACE

#: Rooms whose functions merely pass the program's calls on; tracebacks are shown without their frames.
_PASSING_ON = {f"hmpx.{room}" for room in ("cli", "compute", "gaudi", "torch_state", "wrappers")}


class _NotFoundError(HmpxError):
    """The program to run is not there."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status of the command that ``argv`` holds, ``sys.argv[1:]`` if None.

    ``run`` takes over the process as ``python SCRIPT`` would: `sys.argv`, `sys.path` and
    ``__main__`` stay those of the script.

    Raises:
        SystemExit: The arguments are wrong, ``--help`` was asked for, or the script raised it.
        KeyboardInterrupt: The script was interrupted.
    """
    options = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except (HmpxError, HmpxWarning) as error:  # a warning is raised under `python -W error`
        _complain(str(error))
        return 2


# --- arguments ---------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hmpx",
        description="Mixed precision for PyTorch, op by op, from plain-text op lists.",
        epilog="Each command explains itself: hmpx run --help",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hmpx {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_run(commands)
    _add_check(commands)
    _add_ops(commands)
    _add_doctor(commands)
    _add_kernels(commands)
    return parser


def _add_command(
    commands: Any, name: str, command: Callable[[argparse.Namespace], int], **texts: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        **texts,
    )
    parser.set_defaults(command=command, parser=parser)
    return parser


def _add_run(commands: Any) -> None:
    parser = _add_command(
        commands,
        "run",
        _run,
        help="convert torch, then run an unmodified script",
        usage="hmpx run [options] SCRIPT [ARGS...]\n       hmpx run [options] -m MODULE [ARGS...]",
        description="Converts torch, then runs SCRIPT as `python SCRIPT ARGS` would.\n"
        "Options of hmpx stand before SCRIPT; all that follows it belongs to the script.",
        epilog="""\
With --habana-shim nothing is cast before the script's own hmp.convert(): the options above are what
that call uses where it does not say otherwise. Processes that the script starts are converted as it is.

exit status:
  that of the script: 0, what it gives to sys.exit, 1 after an uncaught exception;
  2 if the script is missing, or the op lists or options are wrong

examples:
  hmpx run train.py --epochs 3
  hmpx run --bf16 my_bf16.txt --verbose-once train.py --epochs 3
  hmpx run --policy policy.yaml train.py
  hmpx run --habana-shim train_on_gaudi.py --device hpu
  torchrun --nproc-per-node 2 -m hmpx run train.py""",
    )
    _add_list_options(parser)
    parser.add_argument(
        "--device-types",
        metavar="T[,T]",
        help="cast tensors on these devices, such as cuda; default: the accelerator's, else cpu",
    )
    verbosity = parser.add_mutually_exclusive_group()
    verbosity.add_argument("--verbose", action="store_true", help="log each call of a listed op")
    verbosity.add_argument(
        "--verbose-once",
        action="store_true",
        help="log each distinct decision once, with its reason and line",
    )
    verbosity.add_argument(
        "--verbose-hmp", action="store_true", help="print the lines that HMP printed"
    )
    parser.add_argument(
        "--legalize",
        choices=LEGALIZE_MODES,
        help="which low-precision ops compute in fp32 and round: those slow on this machine (auto, the "
        "default), all, none, or auto without rounding fp32 inputs (fast)",
    )
    parser.add_argument(
        "--habana-shim",
        action="store_true",
        help="stand in for habana_frameworks where it isn't installed: what the script places on "
        '"hpu" lands on cuda, or else on the cpu, and is cast from its own hmp.convert(...) on',
    )
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="run a module, as python -m does"
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _add_check(commands: Any) -> None:
    parser = _add_command(
        commands,
        "check",
        _check,
        help="find the faults of op lists and policy files",
        usage="hmpx check [--bf16 FILE] [--fp16 FILE] [--fp32 FILE] [FILES...]",
        description="Prints every fault of op lists and policy files as FILE:LINE: MESSAGE: names that"
        "\ntorch does not know, lines that stand there twice, ops that two lists claim, unknown keys.",
        epilog="""\
exit status:
  0 no fault; 1 faults; 2 wrong arguments

example:
  hmpx check my_bf16.txt my_fp32.txt
  hmpx check policy.yaml gaudi_config.json""",
    )
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILES",
        help="policy files (.yaml, .yml, .json), or op lists: a file whose name contains fp32 or fp16 holds ops for that type, "
        f"{policy.FILE_NAMES['widest']} the ops that follow their widest input, "
        "any other name is the low-precision list",
    )
    for kind in ("bf16", "fp16", "fp32"):
        parser.add_argument(
            f"--{kind}",
            action="append",
            default=[],
            metavar="FILE",
            help=f"an op list for {kind}, whatever its name; may be repeated",
        )


def _add_ops(commands: Any) -> None:
    parser = _add_command(
        commands,
        "ops",
        _ops,
        help="show what a list may name, and what is done with it",
        usage="hmpx ops [list options] [PATTERN]\n       hmpx ops --formats",
        description="Prints every op that a list may hold, what the policy does with it, the line\n"
        "that says so, and the places in torch where it is called.",
        epilog="""\
what is done:
  LOW bf16  inputs are cast to bf16        FIRST  ... to the type of the first one
  FP32      ... to fp32                    -      nothing
  WIDEST    ... to the widest type among them
  FOLLOW    ... to fp32, unless all have one low type already
  Lines without an op's name are what sections of the policy file do with it.

exit status:
  0; 1 if no op matches; 2 wrong arguments or op lists

examples:
  hmpx ops softmax
  hmpx ops torch.nn.functional.gelu
  hmpx ops --fp32 my_fp32.txt 'conv*'
  hmpx ops --formats""",
    )
    _add_list_options(parser)
    parser.add_argument(
        "--formats",
        action="store_true",
        help="list the number formats that may stand for the low type instead",
    )
    parser.add_argument(
        "pattern",
        nargs="?",
        metavar="PATTERN",
        help="part of a name, a glob such as 'conv*', or any spelling: truediv, F.gelu, Tensor.add",
    )


def _add_doctor(commands: Any) -> None:
    parser = _add_command(
        commands,
        "doctor",
        _doctor,
        help="what hmpx finds on this machine, and what it can't reach",
        usage="hmpx doctor [options] [MODULES...]",
        description="Prints the versions and devices that count. Then imports MODULES, converts, and"
        "\nprints where they keep functions of torch that were taken before and stay uncast.",
        epilog="""\
exit status:
  0 all is reached; 1 something stays uncast, or torch is not as expected; 2 wrong arguments, or a
  module can't be imported

examples:
  hmpx doctor
  hmpx doctor --torch
  hmpx doctor my_package.model transformers.models.bert.modeling_bert""",
    )
    parser.add_argument(
        "modules", nargs="*", metavar="MODULES", help="modules to import, by dotted name"
    )
    parser.add_argument(
        "--torch",
        action="store_true",
        help="try each part of torch that hmpx relies on and torch does not document, and exit",
    )
    _add_list_options(parser)


def _add_kernels(commands: Any) -> None:
    parser = _add_command(
        commands,
        "kernels",
        _kernels,
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


def _add_list_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("list options, as in hmpx.convert")
    group.add_argument("--policy", metavar="FILE", help="a policy file, instead of all lists")
    group.add_argument("--bf16", default="", metavar="FILE", help="ops to run in the low type")
    group.add_argument("--fp32", default="", metavar="FILE", help="ops to run in float32")
    group.add_argument("--fp16", default="", metavar="FILE", help="ops to run in float16")
    group.add_argument(
        "--lists",
        metavar="NAME_OR_DIR",
        help="a set of lists: a shipped one, or a directory that holds "
        + ", ".join(policy.FILE_NAMES.values()),
    )
    group.add_argument(
        "--opt-level",
        choices=("O1", "O2"),
        help="O1, the default, follows the lists; O2 runs GEMMs and convolutions in the low type, all "
        "else in fp32",
    )
    group.add_argument(
        "--low-precision-type",
        metavar="TYPE",
        help="bfloat16, the default, float16, or a number format such as float8_e4m3fn (hmpx ops --formats)",
    )
    group.add_argument("--strict", action="store_true", help="an unknown name is an error")


def _list_options(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the list options that were given, as arguments of `hmpx.convert`."""
    return _given(
        bf16_file_path=options.bf16,
        fp32_file_path=options.fp32,
        fp16_file_path=options.fp16,
        lists=options.lists,
        policy=options.policy,
        opt_level=options.opt_level,
        low_precision_type=options.low_precision_type,
        strict=options.strict,
    )


def _run_options(options: argparse.Namespace) -> dict[str, Any]:
    """Returns all options of ``run`` that were given, as arguments of `hmpx.convert`."""
    verbose = "once" if options.verbose_once else "hmp" if options.verbose_hmp else options.verbose
    types = options.device_types.split(",") if options.device_types else None
    more = _given(isVerbose=verbose, device_types=types, legalize=options.legalize)
    return {**_list_options(options), **more}


def _given(**arguments: Any) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value}


# --- run ---------------------------------------------------------------------------------------


def _run(options: argparse.Namespace) -> int:
    program: list[str] = options.program
    if program[:1] == ["--"]:
        program = program[1:]
    if not program:
        options.parser.error("name a module after -m" if options.is_module else "name a SCRIPT")
    name = program[0]
    if not options.is_module and not _exists(name):
        raise _NotFoundError(f"{short(name)}: no such file; give the path of a Python script")
    sys.argv = program
    _set_script_directory(_script_directory(name, options.is_module))
    given = _run_options(options)
    has_shim = options.habana_shim and _install_shim(options, given)
    if not options.habana_shim:
        _warned(session.convert, **given)
    end_following = gaudi.follow()
    uncaught = None
    try:
        _execute(name, options.is_module)
    except _NotFoundError:
        end_following()
        raise
    except SystemExit:
        if has_shim:
            _complain_of_unused(given)
        raise
    except BaseException as error:
        uncaught = error
    if uncaught is None:
        if has_shim:
            _complain_of_unused(given)
        return 0
    _show_uncaught(uncaught)  # outside the handler, lest the script's excepthook see it as context
    if isinstance(uncaught, KeyboardInterrupt):
        sys.excepthook = lambda *_: None  # python sets the exit status, and has nothing to add
        raise uncaught
    return 1


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # too long, or no path at all
        return False


def _install_shim(options: argparse.Namespace, given: dict[str, Any]) -> bool:
    with warnings.catch_warnings():  # given by the script's hmp.convert()
        warnings.simplefilter("ignore")
        policy.load_policy(**_list_options(options))
    parse_device_types(given.get("device_types"))
    if gaudi.install(given):
        return True
    print(
        "hmpx: the real habana_frameworks is installed; it is used instead of --habana-shim, and hmpx "
        "casts nothing; leave out --habana-shim to have it cast by hmpx",
        file=sys.stderr,
    )
    return False


def _complain_of_unused(given: dict[str, Any]) -> None:
    if given and not gaudi.has_converted():
        _complain(
            "the script never called hmp.convert(): nothing was cast, and the options before its name "
            "were not used; call it in the script, or leave out --habana-shim"
        )


def _execute(name: str, is_module: bool) -> None:
    """Runs script or module ``name`` as ``__main__``, whose place in `sys.modules` it keeps."""
    if is_module:
        module, code = _load_module(name)
    elif _is_container(name):
        module, code = _load_container(name)
    else:
        module, code = _load_script(str(Path(name).absolute()))
    sys.modules["__main__"] = module
    exec(code, vars(module))


def _script_directory(name: str, is_module: bool) -> Path:
    """Returns what python makes the first entry of `sys.path`."""
    if is_module:
        return Path.cwd()
    return Path(name).absolute() if _is_container(name) else Path(name).resolve().parent


def _is_container(name: str) -> bool:
    """Whether ``name`` is a directory or zip file, whose ``__main__.py`` is run."""
    path = Path(name)  # a pipe or a device has no end to look for the zip file's directory at
    return path.is_dir() or (path.is_file() and zipfile.is_zipfile(path))


def _set_script_directory(directory: Path) -> None:
    """Puts ``directory`` where the interpreter put that of hmpx."""
    is_safe = getattr(sys.flags, "safe_path", False) or sys.flags.isolated
    if not is_safe:  # else the interpreter put nothing there
        sys.path[:1] = [str(directory)]


def _load_script(path: str) -> tuple[types.ModuleType, types.CodeType]:
    """Returns the module, as python makes it for a script, and its code."""
    module = _main_module(path, importlib.machinery.SourceFileLoader("__main__", path))
    with Path(path).open("rb") as file:  # may be a pipe, as with python
        source = file.read(_MOST_SOURCE + 1)
    if len(source) > _MOST_SOURCE:
        raise _NotFoundError(f"{path}: more than {_MOST_SOURCE >> 20} MB is no Python script")
    return module, compile(source, path, "exec", dont_inherit=True)


#: Bytes of a script: a device may have no end.
_MOST_SOURCE: Final = 1 << 26


def _load_module(name: str) -> tuple[types.ModuleType, types.CodeType]:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"
            spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        spec = None
    if spec is None:
        raise _NotFoundError(f"-m {name}: no such module; give a name that python -m can run")
    sys.argv[0] = spec.origin or name
    return _load_spec(spec)


def _load_container(path: str) -> tuple[types.ModuleType, types.CodeType]:
    """Loads the ``__main__`` module of a directory or zip file."""
    spec = importlib.machinery.PathFinder.find_spec("__main__", [path])
    if spec is None:
        raise _NotFoundError(f"{path}: no __main__.py in it; give the path of a Python script")
    return _load_spec(spec)


def _load_spec(
    spec: importlib.machinery.ModuleSpec,
) -> tuple[types.ModuleType, types.CodeType]:
    get_code = getattr(spec.loader, "get_code", None)
    code = get_code(spec.name) if get_code is not None else None
    if code is None:
        raise _NotFoundError(f"{spec.name}: no Python code in it; give the name of a Python module")
    module = _main_module(spec.origin, spec.loader)
    module.__spec__ = spec
    module.__package__ = spec.parent
    module.__cached__ = spec.cached  # type: ignore[attr-defined]
    return module, code


def _main_module(path: str | None, loader: Any) -> types.ModuleType:
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = loader
    vars(module).update(__builtins__=sys.modules["builtins"], __cached__=None)
    return module


def _show_uncaught(error: BaseException) -> None:
    """Does what python does with an exception that nothing caught, and hides hmpx's frames."""
    _hide_frames(error)
    kind, trace = type(error), error.__traceback__
    sys.last_type, sys.last_value, sys.last_traceback = kind, error, trace
    try:
        sys.excepthook(kind, error, trace)
    except SystemExit:
        raise
    except BaseException as failure:
        _hide_frames(failure)
        print("Error in sys.excepthook:", file=sys.stderr)
        traceback.print_exception(failure)
        print("\nOriginal exception was:", file=sys.stderr)
        traceback.print_exception(error)


def _hide_frames(error: BaseException | None) -> None:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = _without_hmpx(error.__traceback__)
        if error.__cause__ is not None:
            _hide_frames(error.__context__)
        error = error.__cause__ or error.__context__


def _without_hmpx(trace: types.TracebackType | None) -> types.TracebackType | None:
    entries = []
    while trace is not None:
        if not _is_passing_on(trace.tb_frame.f_globals.get("__name__")):
            entries.append(trace)
        trace = trace.tb_next
    following = None
    for entry in reversed(entries):
        entry.tb_next = following
        following = entry
    return following


def _is_passing_on(module: object) -> bool:
    return ".".join(str(module).split(".")[:2]) in _PASSING_ON


# --- check -------------------------------------------------------------------------------------


def _check(options: argparse.Namespace) -> int:
    files: dict[str, list[str]] = {"low": [], "fp16": [], "fp32": [], "widest": [], "policy": []}
    files["low"] += options.bf16
    files["fp16"] += options.fp16
    files["fp32"] += options.fp32
    for path in options.files:
        files[_kind(path)].append(path)
    count = sum(map(len, files.values()))
    if not count:
        options.parser.error("name at least one op list or policy file")
    faults = policy.check_files({kind: tuple(paths) for kind, paths in files.items()})
    if faults:
        return _show(faults, status=1)
    op_count = sum(
        len(each.ops)
        for kind, paths in files.items()
        for path in paths
        for each in (
            policy.read_policy_file(path).op_lists()
            if kind == "policy"
            else [policy.read_list(path, kind)]
        )
    )
    return _show([f"{_counted(count, 'file')}, {_counted(op_count, 'op')}: no faults"])


def _kind(path: str) -> str:
    name = Path(path).name.lower()
    if policy.is_policy_file(name):
        return "policy"
    if name == policy.FILE_NAMES["widest"]:
        return "widest"
    return "fp32" if "fp32" in name else "fp16" if "fp16" in name else "low"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


# --- ops ---------------------------------------------------------------------------------------


def _ops(options: argparse.Namespace) -> int:
    if options.formats:
        return _show(_format_lines())
    loaded = _warned(policy.load_policy, **_list_options(options))
    names = [name for name in ops.table() if ops.is_castable(name)]
    by_section = loaded.section_rules()
    names += dict.fromkeys(filter(ops.is_foreign, (*loaded.decisions, *by_section)))
    names.sort(key=lambda name: (name.startswith("_"), name.lower()))
    if options.pattern is not None:
        matching = _matching(options.pattern, names)
        if not matching:
            _complain(_why_no_match(options.pattern, names))
            return 1
        names = matching
    rows = [("op", "policy", "reason", "call sites")]
    for name in names:
        decision = loaded[name]
        rows.append((name, _what(decision), decision.reason, ", ".join(_call_sites(name))))
        rows += [("", _what(each.decision), str(each), "") for each in by_section.get(name, ())]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return _show(
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]])
        for row in rows
    )


def _format_lines() -> Iterator[str]:
    rows: list[tuple[str, ...]] = [
        ("format", "bits", "largest", "epsilon", "smallest normal", "smallest")
    ]
    for name in formats.names():
        known = formats.get(name)
        if isinstance(known, formats.Custom):
            rows.append((name, "-", "-", "-", "-", "-"))
            continue
        values = (known.max, known.epsilon, known.smallest_normal, known.smallest_subnormal)
        rows.append((name, f"{known.bits:g}", *[f"{value:.6g}" for value in values]))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for name, *cells in rows:
        shown = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        yield "  ".join([name.ljust(widths[0]), *shown])


def _matching(pattern: str, names: list[str]) -> list[str]:
    """Returns the ``names`` that ``pattern`` means: one by any spelling first, then the others."""
    if any(character in pattern for character in "*?["):
        return [
            name
            for name in names
            if fnmatch.fnmatchcase(name, pattern)
            or any(fnmatch.fnmatchcase(site, pattern) for site in _call_sites(name))
        ]
    resolved = ops.resolve(pattern)
    first = [resolved] if resolved in names else []
    return first + [name for name in names if pattern in name and name != resolved]


def _why_no_match(pattern: str, names: list[str]) -> str:
    resolved = ops.resolve(pattern)
    if resolved is not None and ops.is_foreign(resolved):
        return f"{shown(pattern)}, an op of another library, is in no list"
    if resolved is not None:
        return f"{shown(pattern)} computes nothing from tensors, so there is nothing to cast"
    spellings = [spelling for spelling, name in ops.names().items() if name in names]
    hint = suggestion(pattern, spellings) or "; hmpx ops without a pattern shows all"
    return f"no op matches {shown(pattern)}{hint}"


def _what(decision: Decision) -> str:
    if decision.cast_policy is CastPolicy.PASS:
        return "-"
    words = [decision.cast_policy.name]
    if decision.cast_policy is CastPolicy.LOW and decision.dtype is not None:
        words.append(short_name(decision.dtype))
    if decision.accumulate_dtype is not None:
        words.append(f"accumulate={short_name(decision.accumulate_dtype)}")
    if decision.output_dtype is not None:
        words.append(f"output={short_name(decision.output_dtype)}")
    return " ".join(words)


def _call_sites(name: str) -> list[str]:
    if ops.is_foreign(name):
        return [name]
    op = ops.table()[name]
    sites = [site.qualified for site in (*op.sites, *op.followers)]
    return [site for site in sites if not site.startswith(f"{VF_NAMESPACE}.")] or sites


# --- doctor ------------------------------------------------------------------------------------


def _doctor(options: argparse.Namespace) -> int:
    if options.torch:
        return _doctor_of_torch()
    sys.path.insert(0, "")  # as `python -m` does
    for name in options.modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever the module raises
            reason = str(error) if isinstance(error, ImportError) else said_by(error)
            _complain(f"can't import {shown(name)}: {reason}")
            return 2
    with _warned(session.convert, **_list_options(options)) as active:
        lines = [
            f"hmpx {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
            _summary(torch_internals.parts()),
            f"casts tensors on: {', '.join(sorted(active.device_types))}",
        ]
        missed = sorted(active.missed())
        low_type = active.policy.low_precision_type
        for device_type in sorted(active.device_types):
            if isinstance(low_type, torch.dtype):
                lines += _capability_lines(device_type, low_type)
            else:
                lines.append(f"{low_type.name} on {device_type}: emulated")
    for path, function in missed:
        lines.append(f"{path} keeps {function!r}, which is not cast")
    if missed:
        lines.append(
            "take these functions from torch where they are called, or after hmpx.convert()"
        )
    elif options.modules:
        lines.append(f"{_counted(len(options.modules), 'module')}: nothing stays uncast")
    return _show(lines, status=1 if missed else 0)


def _summary(parts: Sequence[torch_internals.Part]) -> str:
    faults = sum(1 for part in parts if part.fault)
    known = "all as expected" if not faults else f"{faults} not as expected; see doctor --torch"
    return f"relies on {len(parts)} parts of torch that it does not document: {known}"


def _doctor_of_torch() -> int:
    """Shows each undocumented part of torch that hmpx relies on, after trying it."""
    imported, later = torch_internals.parts(), [*torch_internals.later_parts()]
    parts = [*imported, *later, *torch_internals.tries()]
    lines = [f"hmpx {__version__}, torch {torch.__version__}", _summary(parts)]
    width = max(len(part.feature) for part in parts)
    for part in parts:
        said = f"{part.fault}; {part.without}" if part.fault else "as expected"
        lines.append(f"  {part.feature:{width}}  {said}")
    return _show(lines, status=1 if any(part.fault for part in parts) else 0)


def _capability_lines(device_type: str, dtype: torch.dtype) -> Iterator[str]:
    """Yields what the device reports and was measured to do in ``dtype``, and what follows."""
    name = str(dtype).removeprefix("torch.")
    said = {
        True: "torch reports that the hardware has it",
        False: "torch reports that the hardware lacks it",
        None: "torch does not report whether the hardware has it",
    }
    yield f"{name} on {device_type}: {said[compute.reported(device_type, dtype)]}"
    found = {kind: compute.capability(kind, device_type, dtype) for kind in compute.KINDS}
    if all(known.inference is None for known in found.values()):
        yield "  not measured: every op runs in its native kernel"
        return
    yield "  time of the native kernel divided by that of fp32 with casts; slow kernels are not used"
    yield f"  {'ops':14}{'inference':>13}{'training':>13}"
    for kind, known in found.items():
        cells = [_measured(known, training=training) for training in (False, True)]
        yield f"  {kind:14}{cells[0]:>13}{cells[1]:>13}".rstrip()


def _measured(known: compute.Capability, *, training: bool) -> str:
    """Returns a cell; numbers are padded so that those with and without a remark line up."""
    ratio = known.training if training else known.inference
    if ratio is None:
        return f"{'-':6}"
    if math.isinf(ratio):
        return "no kernel"
    return f"{ratio:.1f}{' slow' if known.is_slow(training=training) else '':5}"


# --- kernels -----------------------------------------------------------------------------------


def _kernels(options: argparse.Namespace) -> int:
    if options.build:
        try:
            return _show(_build_kernels(options.output))
        except KernelsError as error:
            _complain(str(error))
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
    return _show(lines, status=1 if state.fault else 0)


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


# --- output ------------------------------------------------------------------------------------


def _show(lines: Iterable[str], status: int = 0) -> int:
    """Prints ``lines`` to stdout and returns ``status``; a reader that has seen enough is no fault."""
    try:
        for line in lines:
            try:
                print(line)
            except UnicodeEncodeError:  # names of files may be any bytes
                print(line.encode("utf-8", "backslashreplace").decode("ascii", "backslashreplace"))
        sys.stdout.flush()
    except BrokenPipeError:
        # what is still buffered goes nowhere, or the interpreter complains when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


def _complain(message: str) -> None:
    for line in message.splitlines():
        print(f"hmpx: {line}", file=sys.stderr)


def _warned(function: Callable[..., Any], **arguments: Any) -> Any:
    """Calls ``function`` and prints what it warns of as messages of the command line."""
    with warnings.catch_warnings(record=True) as caught:
        result = function(**arguments)
    for warning in caught:
        _complain(f"warning: {warning.message}")
    return result
