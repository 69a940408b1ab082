"""The process that `tests.forks.run` starts: imports the modules it is given, then forks.

With hmpx, it does once what is the same in each program: imports hmpx's modules, and converts and reverts,
at which hmpx reads torch's schemas and compiles its wrappers. Reads a line for programs that run together, as a JSON list: of each its arguments, directory,
environment, the files for what it prints, and how many seconds it may take. Prints their exit statuses;
those that wait for one that has failed are killed. Children end without freeing what they share with
this process, which would take seconds.
"""

import atexit
import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import sys
import threading
import types
import warnings
from pathlib import Path
from typing import Any

del sys.path[0]  # this directory
for module in sys.argv[1:]:
    importlib.import_module(module)


#: What programs import only for other libraries.
LEFT_OUT = {"hmpx.__main__", "hmpx.integrations"}


def use_hmpx() -> None:
    """Imports hmpx's modules, converts and reverts; leaves neither threads nor anything in torch."""
    import hmpx

    for room in pkgutil.iter_modules(hmpx.__path__, "hmpx."):
        if room.name not in LEFT_OUT:
            paths = getattr(importlib.import_module(room.name), "__path__", ())
            for module in pkgutil.walk_packages(paths, f"{room.name}."):
                importlib.import_module(module.name)
    hmpx.convert()
    hmpx.revert()
    assert threading.active_count() == 1  # they would be missing in children


if "hmpx" in sys.argv:
    use_hmpx()
gc.freeze()  # else each child's first collection would copy all that they share


def prepare(directory: str, environment: dict[str, str], out: str, err: str, limit_s: int) -> None:
    """Gives the child what a new process would have."""
    signal.alarm(limit_s)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored
    for descriptor, path in ((1, out), (2, err)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(opened, descriptor)
        os.close(opened)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # else it holds the next programs
    os.chdir(directory)
    inherited = os.environ.get("PYTHONPATH")
    os.environ.clear()
    os.environ.update(environment)
    if environment.get("PYTHONPATH") != inherited:
        sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.excepthook = show


def show(kind: type[BaseException], error: BaseException, tb: types.TracebackType | None) -> None:
    """Prints an error without the frames of this file and of runpy."""
    own = {__file__, runpy.__file__, "<frozen runpy>"}
    while tb is not None and tb.tb_frame.f_code.co_filename in own:
        tb = tb.tb_next
    sys.__excepthook__(kind, error.with_traceback(tb), tb)


def follow_options(arguments: list[str]) -> list[str]:
    """Sets the filters of ``-W`` options; returns the other arguments."""
    said = os.environ.get("PYTHONWARNINGS", "")
    options = said.split(",") if said else []
    while arguments[0] == "-W":
        options.append(arguments[1])
        arguments = arguments[2:]
    sys.warnoptions[:] = options
    warnings.resetwarnings()
    for category in (ResourceWarning, ImportWarning, PendingDeprecationWarning, DeprecationWarning):
        warnings.simplefilter("ignore", category)
    warnings.filterwarnings("default", category=DeprecationWarning, module="__main__")
    warnings._processoptions(options)  # type: ignore[attr-defined]
    return arguments


def program(arguments: list[str], directory: str) -> Any:
    """Runs it, as started in ``directory``."""
    how, rest = arguments[0], arguments[1:]
    if how == "-c":
        sys.argv, sys.path[:0] = ["-c", *rest[1:]], [""]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    elif how == "-m":
        sys.argv, sys.path[:0] = [*rest], [directory]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        path = Path(directory, how)
        sys.argv, sys.path[:0] = [*arguments], [str(path.parent)]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        main.__file__ = str(path)
        exec(compile(path.read_bytes(), path, "exec"), vars(main))


def status(arguments: list[str], directory: str) -> int:
    """Returns the exit status of a program, once its threads and exit handlers have ended."""
    found = 0
    sys.orig_argv[:] = [sys.executable, *arguments]
    try:
        program(follow_options(arguments), directory)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        found = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        found = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return found


def started(arguments: list[str], *surroundings: Any) -> int:
    """Returns the process id of the child that runs a program."""
    child = os.fork()
    if not child:
        prepare(*surroundings)
        os._exit(status(arguments, surroundings[0]))
    return child


def ended(children: list[int]) -> list[int]:
    """Returns the exit statuses of children; those that run when one fails are killed."""
    found: dict[int, int] = {}
    while len(found) < len(children):
        child, how = os.wait()
        found[child] = os.waitstatus_to_exitcode(how)
        if found[child]:
            for other in set(children) - found.keys():
                os.kill(other, signal.SIGKILL)
    return [found[child] for child in children]


for line in sys.stdin:
    print(*ended([started(*program) for program in json.loads(line)]), flush=True)
