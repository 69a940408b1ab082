"""``hmpx run``: converts torch, then runs an unmodified program."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import secrets
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from .. import integrations, patching, policy, session
from ..arguments import POLICY_VARIABLE, REPORT_VARIABLE
from ..checking import expect
from ..errors import raised_here, said_by, short
from ..files import unwritable
from ..patching import Patch
from ..recording import record
from ..reports import Report, merged, read_json, written
from ..tensors import parse_device_types
from ..tracing import trace
from ..watching import watch
from . import output, scripts
from .options import (
    DEVICE_TYPES,
    Command,
    add_computing_options,
    add_options,
    computing_options,
    device_options,
    list_options,
    only_given,
)
from .scripts import ScriptError

_TEXT: Final = f"""\
convert torch, then run an unmodified script
---
hmpx run [options] SCRIPT [ARGS...]
       hmpx run [options] -m MODULE [ARGS...]
---
Converts torch, then runs SCRIPT as `python SCRIPT ARGS` would.
Options of hmpx go before SCRIPT; everything after it belongs to the script.
---
list options
{DEVICE_TYPES}
--report FILE  record the run, and write each op's dtype, reason and cost to FILE: .html, .json, .csv or
  .txt; each rank writes its own
--watch raise|log  name the first op that turns finite values into NaN or infinity: as an error before the
  optimizer steps, or in the log
--expect FILE  a contract: the first call or tensor without the precision that it says is an error
--trace FILE  write numbers of each call to FILE, which hmpx diff-runs compares with those of another run
--trace-every N=1  trace one optimizer step in N; default: 1
--trace-steps A:B  trace steps A, ..., B - 1, counted from 0; default: all
--trace-modules GLOBS  trace calls in these modules only: head,blocks.3
--no-convert  leave torch as it is, for --expect, --trace and torch.autocast
--habana-shim  stand in for habana_frameworks where it isn't installed: tensors on "hpu" go to cuda, or
  else to the cpu; casts begin with the script's hmp.convert(...)
-m  run a module, as python -m does
program ...
---
With --habana-shim, casts begin with the script's own hmp.convert(). The options above fill in what that
call leaves out. Python processes that the script starts are converted too.

environment variables, which hmpx tune sets:
  HMPX_POLICY  a policy file that overrides the list options
  HMPX_REPORT  like --report FILE, but each program writes a file of its own

exit status:
  that of the script: 0, its argument of sys.exit, or 1 after an uncaught exception;
  2 if the script is missing, or the op lists or options are wrong

examples:
  hmpx run train.py --epochs 3
  hmpx run --bf16 my_bf16.txt --verbose train.py --epochs 3
  hmpx run --policy policy.yaml train.py
  hmpx run --report report.html train.py
  hmpx run --watch raise train.py
  hmpx run --no-convert --expect contract.yaml train.py
  hmpx run --trace bf16.hmpx --trace-steps 0:3 train.py
  hmpx run --habana-shim train_on_gaudi.py --device hpu
  torchrun --nproc-per-node 2 -m hmpx run train.py"""

_VERBOSITY: Final = """\
--verbose  log each distinct decision once, with its reason and line
--verbose-each  log every call of a listed op
--verbose-hmp  print the lines that HMP printed"""


def _extend(parser: argparse.ArgumentParser) -> None:
    verbosity = parser.add_mutually_exclusive_group()
    add_options(verbosity, _VERBOSITY)
    former = "--verbose-once"
    verbosity.add_argument(former, dest="verbose", action="store_true", help=argparse.SUPPRESS)
    add_computing_options(parser)


def _run(options: argparse.Namespace) -> int:
    """Converts torch and runs the program; returns its exit status."""
    name = scripts.prepare(options)
    report = options.report or os.environ.get(REPORT_VARIABLE)
    report_path = _checked(report) if report else None
    given = _run_options(options)
    has_shim = options.habana_shim and _install_shim(options, given)
    contract = expect(options.expect) if options.expect else contextlib.nullcontext()
    traced = _trace(options) if options.trace else contextlib.nullcontext()
    if not options.habana_shim and not options.no_convert:
        output.with_warnings_shown(session.convert, **given)
    end_following = integrations.follow()
    uncaught = None
    watched = watch(options.watch) if options.watch else contextlib.nullcontext()
    try:
        with (
            contract,
            traced,
            watched,
            _recorded(report_path, replaces=bool(options.report)),
        ):
            scripts.execute(name, options.is_module)
    except ScriptError:
        end_following()
        raise
    except SystemExit:
        _complain_of_unused(given, has_shim)
        raise
    except BaseException as error:
        uncaught = error
    if uncaught is None:
        _complain_of_unused(given, has_shim)
        return 0
    # Outside the handler, so that the script's excepthook does not see it as context.
    scripts.show_uncaught(uncaught)
    if isinstance(uncaught, ModuleNotFoundError) and "habana_frameworks" in str(uncaught.name):
        output.complain(f"to run it without habana_frameworks: hmpx run --habana-shim {name}")
    if isinstance(uncaught, KeyboardInterrupt):
        sys.excepthook = lambda *_: None  # python sets the exit status, and need not print anything
        raise uncaught
    return 1


RUN: Final = Command(_TEXT, _run, {"m": {"dest": "is_module"}}, writes=("trace",), extend=_extend)


def _trace(options: argparse.Namespace) -> trace:
    steps = None
    if options.trace_steps:
        first, colon, last = options.trace_steps.partition(":")
        if not (colon and first.isdigit() and last.isdigit()):
            options.parser.error(f"--trace-steps {options.trace_steps}: write two numbers, as 0:10")
        steps = range(int(first), int(last))
    modules = [*filter(None, (options.trace_modules or "").split(","))]
    return trace(options.trace, steps=steps, every=options.trace_every, modules=modules)


def _run_options(options: argparse.Namespace) -> dict[str, Any]:
    verbose = "once" if options.verbose else "hmp" if options.verbose_hmp else options.verbose_each
    more = only_given(isVerbose=verbose) | device_options(options) | computing_options(options)
    tried = os.environ.get(POLICY_VARIABLE)
    if not tried:
        return {**list_options(options), **more}
    if options.habana_shim:
        raise ScriptError(
            f"{POLICY_VARIABLE} is set, as by hmpx tune, but under --habana-shim the script's own lists "
            "decide; tune it without --habana-shim"
        )
    return {"policy": tried, **more}


def _install_shim(options: argparse.Namespace, given: dict[str, Any]) -> bool:
    with warnings.catch_warnings():  # shown by the script's hmp.convert()
        warnings.simplefilter("ignore")
        policy.load_policy(**list_options(options))
    parse_device_types(given.get("device_types"))
    if integrations.install(given):
        return True
    print(
        "hmpx: the real habana_frameworks is installed; it is used instead of --habana-shim, and hmpx "
        "casts nothing; leave out --habana-shim to have it cast by hmpx",
        file=sys.stderr,
    )
    return False


def _complain_of_unused(given: dict[str, Any], has_shim: bool) -> None:
    if has_shim and given and not integrations.has_converted():
        output.complain(
            "the script never called hmp.convert(): nothing was cast, and the options before its name "
            "were not used; call it in the script, or leave out --habana-shim"
        )


# --- the report ----------------------------------------------------------------------------------

#: Extension of the report's path -> its writer.
_WRITERS: Final[dict[str, Callable[[Report, Path], object]]] = {
    ".json": Report.to_json,
    ".html": Report.to_html,
    ".csv": Report.to_csv,
    ".txt": lambda report, path: written(f"{report}\n", path),
}


def _checked(name: str) -> Path:
    """Returns the path for a report; each of several processes has its own."""
    path = Path(name)
    if path.suffix.lower() not in _WRITERS:
        *names, last = _WRITERS
        raise ScriptError(
            f"--report {short(name)}: unknown format; end the name in {', '.join(names)} or {last}"
        )
    output.check_writable("--report", name)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        path = path.with_suffix(f".rank{os.environ.get('RANK', '0')}{path.suffix}")
    return path.absolute()  # the program may change its directory


#: Functions that end a process at once, and signals by which schedulers and others end processes.
_ENDS: Final = ("_exit", "abort", "execv", "execve")
_SIGNALS: Final = ("SIGTERM", "SIGHUP")


@contextlib.contextmanager
def _recorded(path: Path | None, *, replaces: bool = True) -> Iterator[None]:
    """Records the block, and writes the report to ``path``, however the process ends.

    A forked process writes its part to a temporary folder. This process merges it into the report. Without
    ``replaces`` an existing file stays: one command may run several programs, each with its report.
    """
    if path is None:
        yield
        return
    recording, process = record(), os.getpid()
    is_taken = path.exists() and not replaces
    target = path.with_suffix(f".{process}{path.suffix}") if is_taken else path
    try:
        folder = Path(tempfile.mkdtemp(prefix="hmpx-report-"))
    except raised_here(OSError) as error:
        raise unwritable(tempfile.gettempdir(), error) from error

    def write(error: str | None = None) -> None:
        # Without raising, since the program's exit status must not change.
        try:
            if os.getpid() == process:
                _write(recording, target, folder, error)
            elif folder.exists():  # else the report has been written
                # `os._exit`, by which forks always end, is not an error.
                part = _report(recording, None if error == "os._exit" else error)
                if part.rows:
                    part.to_json(folder / f"{os.getpid()}-{secrets.token_hex(8)}.json")
        except Exception as failure:
            output.complain(f"the report can't be written: {said_by(failure)}")

    def forget() -> None:
        if folder.exists():
            recording.forget()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=forget)
    ends = patching.apply([Patch(os, name, _writing(name, write)) for name in _ENDS])
    with _signals_followed(write):
        try:
            with recording:
                yield
        finally:
            patching.undo(ends)
            write()


def _writing(name: str, write: Callable[[str], None]) -> Callable[..., Any]:
    function = getattr(os, name)

    @functools.wraps(function)
    def end(*args: Any, **kwargs: Any) -> Any:
        write(f"os.{name}")
        return function(*args, **kwargs)

    end.__module__ = os.__name__  # where pickle looks it up
    return end


@contextlib.contextmanager
def _signals_followed(write: Callable[[str], None]) -> Iterator[None]:
    """Writes the report before a signal ends the process."""
    numbers = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
    followed = [each for each in numbers if signal.getsignal(each) is signal.SIG_DFL]

    def end(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)  # so that another signal ends the process at once
        write(signal.Signals(number).name)
        os.kill(os.getpid(), number)

    for each in followed:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each in followed:
            if signal.getsignal(each) is end:
                signal.signal(each, signal.SIG_DFL)


def _report(recording: record, error: str | None) -> Report:
    report = recording.report()
    return dataclasses.replace(report, error=error) if error else report


def _write(recording: record, path: Path, folder: Path, error: str | None) -> None:
    try:
        report = _report(recording, error)
        if parts := [read_json(each) for each in sorted(folder.glob("*.json"))]:
            report = merged([report, *parts])
        _WRITERS[path.suffix.lower()](report, path)
        verdict = str(report).splitlines()[0]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(ValueError):  # the program may have closed it
        sys.stdout.flush()
    output.complain(f"{verdict}\nreport: {path}")
