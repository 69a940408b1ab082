"""`convert` and `revert`, and queries of the conversion in force."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import torch
from torch import nn

from .. import torch_internals, torch_state
from ..casting import Options, all_rules
from ..errors import OptionError, end_contexts_left_open, shown, suggestion, to_the_end, warn
from ..observers import ATTACHED, LEFT_OUT, LOGGER, Attached, announce_conversion, show_log
from ..policy import (
    UNNAMED,
    CastPolicy,
    Decision,
    LowType,
    Policy,
    PolicySource,
    made_policy,
    options_of_lists,
    policy_line,
    reading_options,
)
from ..registry import exclusive
from ..tensors import default_device_types, is_present, parse_device_types
from ..torch_internals import mode_stack, restore_modes
from ..version import __version__
from .session import Session
from .switching import current, forget_left, left_one, switch_to, without_collections

if TYPE_CHECKING:
    from ..number_formats import Format

_F = TypeVar("_F", bound=Callable[..., Any])


def restoring(function: _F) -> _F:
    """Makes ``function`` restore what it has changed in torch if it raises an error.

    A signal handler's may come before a context inside of it can restore it: the conversion, observers, dispatch
    modes, whether gradients are recorded.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        session, attached = current(), ATTACHED.value
        before = session, 0 if session is None else session.converts, attached
        state = torch.is_grad_enabled(), mode_stack()
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            end_contexts_left_open(error)
            to_the_end(functools.partial(_restore, *before, *state))
            raise

    return wrapper  # type: ignore[return-value]


@exclusive
def _restore(
    session: Session | None,
    converts: int,
    attached: tuple[Attached, ...],
    learns: bool,
    modes: list[Any],
) -> None:
    torch.set_grad_enabled(learns)
    restore_modes(modes)
    for each in ATTACHED.value:
        if each not in attached and each.thread == threading.get_ident():
            each.detach()
    if session is not None:
        session.converts = converts
    if current() is not session:
        switch_to(session)


@reading_options
@restoring
@exclusive
@without_collections
def convert(
    bf16_file_path: str | os.PathLike[str] = "",
    fp32_file_path: str | os.PathLike[str] = "",
    isVerbose: bool | str | None = None,  # noqa: N803  # HMP's name
    *_too_many: NoReturn,  # arguments in HMP's old order get an error with their names
    verbose: bool | str | None = None,
    fp16_file_path: str | os.PathLike[str] = "",
    opt_level: str = "O1",
    low_precision_type: LowType | str = torch.bfloat16,
    lists: str | os.PathLike[str] | None = None,
    policy: Policy | PolicySource | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    exclude: str | Iterable[str] = (),
    device_types: Iterable[str] | None = None,
    strict: bool = False,
    legalize: str = "auto",
    keep_weight_casts: bool | str = "auto",
    rounding: str = "nearest",
    overflow: str | None = None,
    round_gradients: bool | str | Format = False,
    hardware: str = "auto",
    within: nn.Module | None = None,
    **_unknown: NoReturn,  # get an error with the nearest name
) -> Session:
    """Patches torch so that every op casts its inputs as the op lists say.

    Applies to the whole process. A second call with an equal policy does nothing; with a different policy
    it replaces the first.

    Args:
        bf16_file_path: Ops that run in ``low_precision_type``; ``""`` for the shipped list.
        fp32_file_path: Ops that run in float32; ``""`` for the shipped list.
        isVerbose: HMP's name for ``verbose``.
        verbose: ``"once"`` logs each distinct decision, True each call. Both also log functions
            that models stored before, which stay uncast. ``"hmp"`` prints HMP's lines.
        fp16_file_path: Ops that always run in float16, whatever ``low_precision_type`` is.
        opt_level: ``"O1"`` follows the lists; ``"O2"`` runs GEMMs and convolutions in
            ``low_precision_type`` and every other op in float32.
        low_precision_type: ``torch.bfloat16``, ``torch.float16``, or a number format or its name,
            such as ``"float8_e4m3fn"``, emulated in float32.
        lists: Name of a shipped set, or a directory with ``bf16.txt``, ``fp32.txt``,
            ``widest.txt``; an ``options.yaml`` there sets ``low_precision_type``, ``device_types``
            and others, unless the call does. None: ``"hmpx"``. Others: ``"lean"``, ``"hmp"``,
            ``"autocast-cuda"``, ``"autocast-cpu"``, ``"o2"``.
        policy: Replaces all the lists above: a `Policy`, the path of a policy file (YAML, or a
            ``gaudi_config.json``), or a dict like such a file.
        exclude: Names of modules, as in ``model.named_modules()``, whose ops run in float32: ``["head"]``. A
            ``*`` stands for any characters.
        device_types: Types of the devices whose tensors are cast, such as ``{"cuda"}``. None: the
            accelerator's if there is one (logged at level INFO), else ``{"cpu"}``.
        strict: Makes an unknown name in a list an error instead of a warning.
        legalize: Which low-precision ops compute in float32, with inputs and outputs rounded, like
            low-precision hardware. ``"auto"``: those that are slow on this machine; ``"always"``:
            all; ``"never"``: none. ``"fast"`` is ``"auto"`` without rounding float32 inputs: faster
            and more accurate, unlike such hardware.
        keep_weight_casts: Whether autograd keeps the casts of parameters. False: the backward of
            products casts them again, to the same bits, which saves 2 bytes for each weight.
            ``"auto"``: False on CPUs where that takes little time, else True.
        rounding: How values are rounded to a number format, as for `formats.quantize`. torch's own
            dtypes always round to nearest.
        overflow: The result for values beyond a number format's largest, as for `formats.quantize`.
        round_gradients: Whether gradients of ops in a number format are rounded to it; or a format
            for all of them, such as ``"float8_e5m2"``.
        hardware: Which products in float8 formats the device's kernels compute. ``"auto"``: those that
            they can, on GPUs with float8; ``"never"``: none, all are emulated; ``"require"``: all, else an
            error, also by torch's kernels for CPUs, which are slow.
        within: A module: only calls inside of its forward are cast, also those that a checkpoint
            repeats. None: all calls.

    Returns:
        The session in force: ``.revert()`` undoes it, and so does leaving a ``with`` block on it.

    Raises:
        OpListError: A list can't be read, or an op is in two lists.
        PolicyFileError: ``policy`` can't be read, or is not a policy.
        OptionError: An argument has an invalid value. Nothing is patched then.

    Example:
        >>> x, weight = torch.ones(1, 2), torch.ones(3, 2)
        >>> with hmpx.convert(device_types={"cpu"}):
        ...     torch.nn.functional.linear(x, weight).dtype
        torch.bfloat16
        >>> torch.nn.functional.linear(x, weight).dtype
        torch.float32
    """
    given = dict(locals())
    torch_internals.check()
    made, found_types, options, verbose = _checked(given)
    if verbose == "hmp":
        announce_conversion(opt_level)
    is_named = device_types is not None
    session = _put_in_force(made, found_types, options, verbose, is_named=is_named)
    if device_types is None and "cpu" not in found_types:
        LOGGER.info(
            "casting on %s: tensors on the CPU are not cast; "
            'convert(device_types={"cpu"}) casts those',
            " and ".join(sorted(found_types)),
        )
    return session


def _warn_of_absent(device_types: Collection[str]) -> None:
    """Warns if this machine has no device of these types, unless a FakeTensorMode stands in for them."""
    by_default = default_device_types()
    if any(each in by_default or is_present(each) for each in device_types):
        return
    if isinstance(torch.empty(0), torch_internals.FakeTensor):
        return
    here = " and ".join(sorted(by_default))
    warn(
        f"nothing will be cast: torch finds no {' or '.join(sorted(device_types))} device on this "
        f"machine; leave out device_types to cast tensors on {here}, or name the types of the devices "
        "that tensors are on"
    )


# --- arguments ---------------------------------------------------------------------------------


def _checked(given: Mapping[str, Any]) -> tuple[Policy, frozenset[str], Options, bool | str]:
    """Checks `convert`'s arguments as a whole, before anything is patched."""
    for name in given["_unknown"]:
        raise _unknown_argument("convert", name, [each for each in given if each[0] != "_"])
    if given["_too_many"]:
        raise OptionError(
            "convert takes three positional arguments, bf16_file_path, fp32_file_path and isVerbose, "
            f"not {3 + len(given['_too_many'])}; pass the others by name: opt_level=..."
        )
    verbose = _verbosity(given["verbose"], given["isVerbose"])
    options = Options.checked(given)
    found_types = parse_device_types(given["device_types"])
    made, is_logged = made_policy(given)
    of_formats = [each for each in fields(Options) if each.metadata["is_of_formats"]]
    named = [each.name for each in of_formats if getattr(options, each.name) != each.default]
    if named and not (made.formats() or all_rules()):  # rules may give ops a format
        raise OptionError(
            f"{named[0]} has no effect: no op runs in a number format; name one as low_precision_type "
            f"or on an op's line, register the rule that does before, or leave {named[0]} out"
        )
    return made, found_types, options, verbose or is_logged


#: Other names of arguments -> those of `convert`.
_OTHER_NAMES: Final = {
    **dict.fromkeys(("dtype", "precision", "low_dtype"), "low_precision_type"),
    **dict.fromkeys(("low", "bf16", "bf16_file", "bf16_list"), "bf16_file_path"),
    **dict.fromkeys(("fp32", "fp32_file", "fp32_list"), "fp32_file_path"),
    **dict.fromkeys(("device", "devices", "device_type"), "device_types"),
    **dict.fromkeys(("skip", "ignore", "modules", "layers"), "exclude"),
}


def _unknown_argument(function: str, name: str, known: Iterable[str]) -> OptionError:
    """Returns the error that ``function`` has no argument ``name``, with the nearest name."""
    hint = suggestion(name, known, _OTHER_NAMES)
    if name == "enabled":
        hint = "; hmpx.disable_casts() is a block without casts"
    return OptionError(f"hmpx.{function} has no argument {shown(name)}{hint}")


def _verbosity(verbose: object, of_hmp: object) -> bool | str:
    if verbose is not None and of_hmp is not None:
        raise OptionError("isVerbose is HMP's name for verbose: give one of the two")
    name, value = ("verbose", verbose) if of_hmp is None else ("isVerbose", of_hmp)
    if value is None:
        return False
    if isinstance(value, str):
        text = str.__str__(value)
        if text in ("once", "hmp"):
            return text
    elif isinstance(value, (bool, int)) and value in (0, 1):
        return bool(value)
    raise OptionError(f"{name} must be True, False, 'once' or 'hmp', not {shown(value)}")


def checked_policy(**options: Any) -> Policy:
    """Returns the policy of a conversion with these arguments of `convert`; changes nothing."""
    check_names(convert, options)
    options = options_of_lists(options.get("lists")) | options
    known = inspect.signature(convert).parameters
    given = {name: options.get(name, each.default) for name, each in known.items()}
    return _checked({**given, "_too_many": (), "_unknown": {}})[0]


def _named(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    found = inspect.signature(function).parameters.items()
    return {n: p for n, p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def check_names(function: Callable[..., Any], options: Iterable[str]) -> None:
    """Raises OptionError, with the nearest name, for arguments that neither ``function`` nor `convert` has."""
    taken = _named(convert)
    del taken["within"]  # they convert all of their model
    for name in options:
        if name not in taken:
            names = {**_named(function), **taken}
            raise _unknown_argument(function.__name__, name, names)


#: The signature that help() shows.
convert.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [*_named(convert).values()], return_annotation=Session
)


@exclusive
def restore(
    policy: Policy, device_types: frozenset[str], options: Options, verbose: bool | str
) -> Session:
    """Converts like a session with these `Session.arguments`, for example in another process."""
    torch_internals.check()
    return _put_in_force(policy, device_types, options, verbose)


def _put_in_force(
    policy: Policy,
    device_types: frozenset[str],
    options: Options,
    verbose: bool | str,
    *,
    is_named: bool = False,
) -> Session:
    before = current()
    session = Session(policy, device_types, options, verbose, before)
    if verbose:
        show_log()
    if before is not None and before.equals(session):
        before.converts += 1
        return before
    left = left_one(session)
    if left is None and is_named:
        _warn_of_absent(device_types)  # first: if this becomes an error, nothing is converted
    session = left or session
    try:
        switch_to(session)
    except BaseException:
        if current() is session:
            to_the_end(functools.partial(switch_to, before))
        raise
    return session


def observable(policy: Policy | None = None) -> AbstractContextManager[object]:
    """Lets observers see calls in a block: wraps torch without a cast, unless it is converted.

    Ops that ``policy`` decides are seen as a conversion with it sees them: ``softmin``, not what it calls.
    """
    nothing = _following(tuple(policy.decisions) if policy else ())
    return (
        contextlib.nullcontext()
        if is_converted()
        else restore(nothing, frozenset(), Options(), False)
    )


@functools.cache
def _following(ops: tuple[str, ...]) -> Policy:
    """Returns the policy under which torch, or torch.autocast, decides on ``ops``."""
    return Policy(dict.fromkeys(ops, Decision(CastPolicy.FIRST, reason=UNNAMED)))


@exclusive
def revert() -> None:
    """Undoes `convert` and restores torch. Does nothing if torch is not converted.

    Example:
        >>> session = hmpx.convert(device_types={"cpu"})
        >>> hmpx.revert()
        >>> torch.nn.functional.linear(torch.ones(1, 2), torch.ones(3, 2)).dtype
        torch.float32
    """
    session = current()
    if session is not None:
        session.revert()
    forget_left()


@contextlib.contextmanager
def unconverted() -> Iterator[None]:
    """Suspends the conversion in force, in the whole process, until the end of the block."""
    before = current()
    if before is None:
        yield
        return
    switch = exclusive(switch_to)
    try:
        switch(None)
        yield
    finally:
        to_the_end(functools.partial(switch, before))


def is_converted() -> bool:
    """Whether a `convert` is in force.

    Example:
        >>> hmpx.is_converted()
        False
        >>> with hmpx.convert():
        ...     hmpx.is_converted()
        True
    """
    return current() is not None


def casts_enabled() -> bool:
    """Whether ops cast here and now: torch is converted, and casts are not switched off.

    `disable_casts`, or a disabled region of torch.autocast, switches them off; outside of ``convert(within=model)``
    they are off, too.

    Example:
        >>> with hmpx.convert(), hmpx.disable_casts():
        ...     hmpx.casts_enabled()
        False
    """
    return current() is not None and not (torch_state.is_off() or torch_state.is_outside())


def refuse_where_off(tool: str) -> None:
    """Raises OptionError if casts are off here: the tool would find none."""
    if torch_state.is_off():
        raise OptionError(
            f"{tool} was called where casts are off; call it outside of hmpx.disable_casts() and of "
            "torch.autocast(enabled=False)"
        )


#: Longer command lines are cut.
_LONGEST: Final = 300


def about_run(policy: Policy | None = None) -> dict[str, str]:
    """Returns the command, date, device, versions, policy (None: that in force) and its digest, and the rank.

    Equal digests mean equal decisions.
    """
    session = current()
    threads = torch.get_num_threads()
    command = [Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]]
    found = {
        "command": shlex.join(command)[:_LONGEST],
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "device": f"cpu, {torch.backends.cpu.get_cpu_capability()}, {threads} thread{'s' * (threads > 1)}",
        "torch": str(torch.__version__),
        "hmpx": __version__,
    }
    # Naming a device that nobody used would initialize CUDA.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["device"] = f"{torch.cuda.get_device_name()}; {found['device']}"
    if policy is None and session is not None:
        policy = session.policy
        found["device types"] = ", ".join(sorted(session.device_types))
        found["legalize"] = session.options.legalize
        if session.options.within is not None:
            found["within"] = type(session.options.within()).__name__
    if policy is not None:
        found["policy"] = policy_line(policy)
        found["digest of the policy"] = policy.fingerprint()[:12]
    if LEFT_OUT:
        found["not looked at"] = "; ".join(LEFT_OUT)
    if "RANK" in os.environ:
        found["rank"] = os.environ["RANK"]
    return found
