"""Runs a script, a module, a directory or a zip file like ``python``, and shows its errors like it."""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import os
import sys
import traceback
import types
import zipfile
from pathlib import Path
from typing import Any

from ..errors import HmpxError, short


class ScriptError(HmpxError):
    """The program to run does not exist."""


def exists(path: str) -> bool:
    """Whether there is a file or directory at ``path``, which may be any string."""
    return os.path.exists(path)  # noqa: PTH110  # Path's raises an error for some strings


def execute(name: str, is_module: bool) -> None:
    """Runs script or module ``name`` as ``__main__``, and takes its place in `sys.modules`."""
    if is_module:
        module, code = _load_module(name)
    elif _is_container(name):
        spec = importlib.machinery.PathFinder.find_spec("__main__", [name])
        if spec is None:
            raise ScriptError(f"{name}: no __main__.py in it; give the path of a Python script")
        module, code = _load_spec(spec)
    else:
        path = str(Path(name).absolute())
        module = _main_module(path, importlib.machinery.SourceFileLoader("__main__", path))
        code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    sys.modules["__main__"] = module
    exec(code, vars(module))


def prepare(options: argparse.Namespace) -> str:
    """Returns the name of the program to run, and makes the process look as python would start it."""
    program: list[str] = options.program[options.program[:1] == ["--"] :]
    if not program:
        options.parser.error("name a module after -m" if options.is_module else "name a SCRIPT")
    name = program[0]
    if not options.is_module and not exists(name):
        raise ScriptError(f"{short(name)}: no such file; give the path of a Python script")
    sys.argv = program
    if options.is_module:
        directory = Path.cwd()
    else:
        directory = Path(name).absolute() if _is_container(name) else Path(name).resolve().parent
    put_first_on_path(directory)
    return name


def _is_container(name: str) -> bool:
    """Whether ``name`` is a directory or zip file with a ``__main__.py`` to run."""
    path = Path(name)  # zipfile reads the end, which pipes and devices don't have
    return path.is_dir() or (path.is_file() and zipfile.is_zipfile(path))


def put_first_on_path(directory: Path) -> None:
    """Replaces hmpx's directory at the start of `sys.path` by ``directory``."""
    is_safe = getattr(sys.flags, "safe_path", False) or sys.flags.isolated
    if not is_safe:  # else the interpreter put nothing there
        sys.path[:1] = [str(directory)]


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
        raise ScriptError(f"-m {name}: no such module; give a name that python -m can run")
    sys.argv[0] = spec.origin or name
    return _load_spec(spec)


def _load_spec(
    spec: importlib.machinery.ModuleSpec,
) -> tuple[types.ModuleType, types.CodeType]:
    get_code = getattr(spec.loader, "get_code", None)
    code = get_code(spec.name) if get_code is not None else None
    if code is None:
        raise ScriptError(f"{spec.name}: no Python code in it; give the name of a Python module")
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


# --- tracebacks ----------------------------------------------------------------------------------

#: Packages that only pass on the program's calls: their frames are hidden.
_PASSING_ON = {
    f"hmpx.{room}" for room in ("casting", "cli", "compute", "integrations", "torch_state")
}


def show_uncaught(error: BaseException) -> None:
    """Reports an uncaught exception like python, but without hmpx's frames."""
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
        module = str(trace.tb_frame.f_globals.get("__name__"))
        if ".".join(module.split(".")[:2]) not in _PASSING_ON:
            entries.append(trace)
        trace = trace.tb_next
    following = None
    for entry in reversed(entries):
        entry.tb_next = following
        following = entry
    return following
