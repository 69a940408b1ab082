"""The user's functions as arguments of commands: ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION``."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from .. import phases
from ..errors import HmpxError, printable, raised_here, said_by, short, suggestion
from ..places import located
from . import output, scripts


class FunctionError(HmpxError):
    """A function given to a command can't be found."""


def split(text: str, default: str = "") -> tuple[str, str]:
    """Returns the absolute path or the module, by default ``default``, and the function."""
    source, colon, name = text.rpartition(":")
    if not colon:
        source = default
    elif source and _is_file(source):
        source = os.path.abspath(source)  # noqa: PTH100  # any text; the program may change its directory
    if not source or not name:
        raise FunctionError(
            f"{text!r}: name a file and a function in it, as in train.py:build_model"
        )
    return source, name


#: Options that name the functions of a program.
MODEL: Final = """\
model FILE.py:FUNCTION  the function that returns the model
--inputs FUNCTION=inputs  function that returns its inputs, or a batch; default: inputs"""
PROGRAM: Final = f"""\
{MODEL}
--forward-step FUNCTION  function of the model and a batch that returns the output, for training batches
--loss-fn FUNCTION  function of the output and the batch that returns the loss"""

#: What to say of them.
ABOUT_PROGRAM: Final = """\
FUNCTION returns the model. That of --inputs returns its inputs: a tuple of arguments, a dict of arguments by
name, or the only one. Functions of the same file need no FILE.py: or MODULE: of their own. The file is imported,
so its training belongs under `if __name__ == "__main__":`."""


def on_program(
    run: Callable[[argparse.Namespace, dict[str, Any]], int],
) -> Callable[[argparse.Namespace], int]:
    """Has ``run`` get the functions of `PROGRAM` by name; its exit status is 2 if one of them fails."""

    def run_on(options: argparse.Namespace) -> int:
        source, name = split(options.model)
        places = {"model": (source, name)}
        for each in ("inputs", "forward_step", "loss_fn"):
            if getattr(options, each, None):
                places[each] = split(getattr(options, each), source)
        with as_program(source):
            phases.enter(f"import of {printable(short(source))}")
            given = {each: found(*place)[1] for each, place in places.items()}
            try:
                return run(options, given)
            except HmpxError:
                raise
            except Exception as error:  # from the model, or another function of the program
                output.seconds.close()
                scripts.show_uncaught(error)
                return 2

    return run_on


@contextlib.contextmanager
def as_program(source: str) -> Iterator[None]:
    """Makes a file or module see itself as the program, without arguments, inside the block."""
    before = sys.argv
    sys.argv = [short(source)]
    try:
        yield
    finally:
        sys.argv = before


def found(source: str, name: str, *, again: bool = False) -> tuple[types.ModuleType, Any]:
    """Returns a file's module, made once more if ``again``, and its function ``name``, which may be a dotted path."""
    function: Any = (module := imported(source, again=again))
    for part in name.split("."):
        function = getattr(function, part, None)
    if function is None:
        raise FunctionError(
            f"{short(source)} has no {name!r}{suggestion(name, vars(module)) or ': give the name of a function'}"
        )
    return module, function


def imported(source: str, *, again: bool = False) -> types.ModuleType:
    """Imports a file, or a module of a package; ``again`` runs its code again, in a new module."""
    try:
        if _is_file(source):
            return _of_file(source, again)
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        module = importlib.import_module(source)
        spec = module.__spec__
        return _executed(spec, source) if again and spec is not None else module
    except HmpxError:
        raise
    except raised_here(SyntaxError, ModuleNotFoundError, FileNotFoundError) as error:
        raise FunctionError(f"{short(source)} can't be imported: {said_by(error)}") from error
    except raised_here(Exception, SystemExit) as error:
        from ..recording import raised_at  # slow to import

        where = raised_at(error)
        at = f", at {located(where)}" if where else ""
        raise FunctionError(
            f"{short(source)} can't be imported: {said_by(error)}{at}; its training belongs under "
            '`if __name__ == "__main__":`'
        ) from error


def _is_file(source: str) -> bool:
    return source.endswith(".py") or scripts.exists(source)


def _of_file(source: str, again: bool) -> types.ModuleType:
    path = Path(source).resolve()
    name = path.stem
    known = sys.modules.get(name)
    if not again and known is not None and getattr(known, "__file__", None) == str(path):
        return known
    scripts.put_first_on_path(path.parent)
    return _executed(importlib.util.spec_from_file_location(name, path), source)


def _executed(spec: importlib.machinery.ModuleSpec | None, source: str) -> types.ModuleType:
    if spec is None or spec.loader is None:
        raise FunctionError(
            f"{short(source)}: not a Python file; name one that ends in .py, or a module"
        )
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(spec.name)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if before is None:
            del sys.modules[spec.name]
        else:
            sys.modules[spec.name] = before
        raise
    return module
