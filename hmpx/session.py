"""`convert` and `revert`: wires lists, policy, patches and observers together, and owns undo."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from . import (
    choosing,
    compiled,
    foreign_ops,
    foreign_sites,
    log,
    lowering,
    missing_kernels,
    modules,
    numpy_values,
    oplists,
    ops,
    patching,
    pickling,
    policy_tables,
    rebinding,
    regions,
    request,
    reuse,
    rules,
    switch,
    torch_parts,
    wrappers,
)
from .casting import CallPlan
from .decisions import CastPolicy, Decision, LowType
from .errors import HmpxWarning, OptionError
from .number_formats import Format
from .patching import Change, Draft, Patch
from .policy import Policy
from .policy_files import PolicySource
from .records import Observer
from .registry import exclusive

_current: Session | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """How ops compute: see `convert`."""

    legalize: str = "auto"
    reuse_casts: bool = False
    rounding: str = "nearest"
    round_gradients: bool = False


@dataclass(frozen=True, slots=True)
class Installation:
    """What a session has put into torch.

    Attributes:
        applied: The patches, in the order in which they were applied.
        wrappers: The wrappers in them.
        rules: The rules that the wrappers ask.
        observers: What is told of calls.
        notes_modules: Whether the running modules are noted.
    """

    applied: tuple[patching.Applied, ...] = ()
    wrappers: tuple[Callable[..., Any], ...] = ()
    rules: tuple[rules.Registered, ...] = ()
    notes_modules: bool = False
    observers: tuple[Observer, ...] = ()


class Session:
    """One conversion of torch, in force until it is reverted or replaced.

    As a context manager it restores on exit what was in force before its `convert`.

    Attributes:
        policy: The decision for every op.
        device_types: The device types whose tensors are cast.
        options: How ops compute.
    """

    def __init__(
        self,
        policy: Policy,
        device_types: frozenset[str],
        options: Options,
        verbose: bool | str,
        previous: Session | None,
    ) -> None:
        """Is called by `convert` only."""
        self.policy = policy
        self.device_types = device_types
        self.options = options
        self._verbose = verbose
        self._installation = Installation(rules=rules.state())
        self._has_warned = False
        self._said: list[str] = []  # of ops of other libraries
        self._previous = previous
        self._is_entered = self._is_left = False
        self._converts = 1  # `convert` calls that this session answers

    @property
    def rules(self) -> tuple[rules.Registered, ...]:
        """The rules that are asked, in the order of their registration."""
        return self._installation.rules

    @exclusive
    def revert(self) -> None:
        """Undoes the conversion; does nothing if it is no longer in force."""
        self._leave_to(None)

    def missed(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        """Yields where loaded modules keep functions of torch from before `convert`, uncast.

        Yields:
            A dotted path such as ``package.module.Block.forward(activation=)``, and the function.
        """
        return rebinding.missed(self._originals())

    def _originals(self) -> list[Callable[..., Any]]:
        return [vars(wrapper)["__wrapped__"] for wrapper in self._installation.wrappers]

    def __enter__(self) -> Session:
        self._is_entered, self._is_left = True, False
        return self

    @exclusive
    def __exit__(self, *exc_info: object) -> None:
        if self._converts > 1:
            self._converts -= 1
            return
        self._is_left = True
        previous = self._previous
        while (
            previous is not None and previous._is_left
        ):  # blocks may overlap, as those of tasks do
            previous = previous._previous
        self._leave_to(previous)

    def _leave_to(self, session: Session | None) -> None:
        """Puts ``session`` in force instead of this one; what interrupts that is raised afterwards."""
        try:
            if self is _current:
                _switch_to(session)
        except BaseException:
            if self is _current:
                _switch_to(session)
            raise

    def __repr__(self) -> str:
        state = "in force" if self is _current else "not in force"
        made = policy_tables.line(
            self.policy.decisions, self.policy.low_precision_type, self.policy.sections
        )
        devices = sorted(self.device_types)
        more = f" and {len(devices) - 3} more" if len(devices) > 3 else ""
        return f"<hmpx.Session {state}: {made} on {', '.join(devices[:3])}{more}>"

    def _is_equal_to(self, other: Session) -> bool:
        return self._settings() == other._settings()

    def _settings(self) -> tuple[object, ...]:
        return self.policy, self.device_types, self.options, self._verbose, self.rules

    def _draft(self, draft: Draft, replaced: Installation) -> Installation:
        """Drafts all patches of this session; changes nothing.

        Args:
            draft: Where torch is as it would be without a conversion.
            replaced: What the session before has put into torch.
        """
        observers: tuple[Observer, ...] = ()
        if self._verbose:
            observers = (log.VerboseOnceLog() if self._verbose == "once" else log.VerboseLog(),)
        asked = rules.state()
        patches, made = _patches(self, observers, draft)
        foreign = _Foreign(self, observers, draft)
        foreign.take(_foreign_names(self.policy))
        patches += foreign.patches
        made += foreign.made
        self._said = foreign.said
        applied = draft.apply(patches)
        applied += draft.apply(regions.patches(draft, self._add, self._run_suspended))
        applied += draft.apply(numpy_values.patches(draft))
        if self.options.reuse_casts:
            applied += draft.apply(reuse.patches(draft))
        originals = [vars(wrapper)["__wrapped__"] for wrapper in made]
        applied += draft.apply([pickling.patch(originals, draft)])
        # Names may also have been taken during a conversion: this list keeps those wrappers' ids.
        earlier = [*pickling.retired(), *replaced.wrappers]
        applied += draft.apply(rebinding.patches(_replacements(made, earlier)))
        applied += draft.apply(
            foreign_sites.following(_foreign_names(self.policy), draft, self._follow)
        )
        applied += draft.apply([modules.asked_by(self._note_modules), wrappers.in_force(made)])
        notes_modules = bool(observers) or _asks_for_modules(self.policy, asked)
        if notes_modules:  # on top of the patch of the same slot for reused casts
            applied += draft.apply(modules.patches(draft, self._warn_of_unmatched))
        applied += draft.apply(
            compiled.patches(
                draft,
                self.policy,
                self.device_types,
                self.options,
                asked,
                self.options.legalize,
                self._add,
            )
        )
        return Installation(tuple(applied), tuple(made), asked, notes_modules, observers)

    def _extend(
        self,
        draft: Draft,
        patches: Iterable[Change],
        *,
        notes_modules: bool,
        made: Iterable[Callable[..., Any]] = (),
    ) -> None:
        """Applies more patches, with the wrappers ``made`` in them, while the session is in force."""
        installed = self._installation
        extended = dataclasses.replace(
            installed,
            applied=(*installed.applied, *draft.apply(patches)),
            wrappers=(*installed.wrappers, *made),
            notes_modules=notes_modules,
        )
        draft.apply([Patch(self, "_installation", extended)])
        draft.make()

    @exclusive
    def _add(self, patch: Patch) -> None:
        if self is _current:
            self._extend(Draft(), [patch], notes_modules=self._installation.notes_modules)

    @exclusive
    def _follow(self, names: Collection[str], module: object) -> None:
        """Wraps those ops of other libraries that have come with ``module``."""
        if self is not _current:
            return
        draft, installed = Draft(), self._installation
        foreign = _Foreign(self, installed.observers, draft, installed.wrappers)
        foreign.take(names, module)
        if foreign.made:
            patches: list[Change] = [*foreign.patches]
            earlier = [*pickling.retired(), *installed.wrappers]
            patches += rebinding.patches(_replacements(foreign.made, earlier))
            patches.append(wrappers.in_force([*installed.wrappers, *foreign.made]))
            made = foreign.made
            self._extend(draft, patches, notes_modules=installed.notes_modules, made=made)
        _say([each for each in foreign.said if each not in self._said])
        self._said += foreign.said

    @exclusive
    def _note_modules(self) -> None:
        if self is _current and not self._installation.notes_modules:
            draft = Draft()
            patches = modules.patches(draft, self._warn_of_unmatched)
            self._extend(draft, patches, notes_modules=True)

    @exclusive
    def _run_suspended(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls ``function`` while all patches are taken away, in the whole process."""
        applied, draft = self._installation.applied, Draft()
        covered = set(map(id, draft.undo(applied)))  # these stay beneath somebody else's
        taken = [done.patch for done in applied if id(done.patch) not in covered]
        kept = tuple(done for done in applied if id(done.patch) in covered)
        emptied = dataclasses.replace(self._installation, applied=kept)
        draft.apply([Patch(self, "_installation", emptied)])

        def put_back() -> None:
            if self._installation is emptied:
                self._extend(Draft(), taken, notes_modules=emptied.notes_modules)

        try:
            try:
                draft.make()
                return function(*args, **kwargs)
            finally:
                put_back()
        finally:  # in case that an exception came right before
            put_back()

    def _warn_of_unmatched(self, root: torch.nn.Module) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        unmatched = self.policy.unmatched([name for name, _ in modules.named_modules(root)])
        if unmatched:
            warnings.warn(
                f"no module of {type(root).__name__} is called so:\n  " + "\n  ".join(unmatched),
                HmpxWarning,
                stacklevel=4,
            )


def convert(
    bf16_file_path: str | os.PathLike[str] = "",
    fp32_file_path: str | os.PathLike[str] = "",
    isVerbose: bool | str = False,  # noqa: N803  # HMP's name
    *too_many: NoReturn,  # so that what is passed in HMP's old order is told its names
    fp16_file_path: str | os.PathLike[str] = "",
    opt_level: str = "O1",
    low_precision_type: LowType | str = torch.bfloat16,
    lists: str | os.PathLike[str] | None = None,
    policy: Policy | PolicySource | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    device_types: Iterable[str] | None = None,
    strict: bool = False,
    legalize: str = "auto",
    reuse_casts: bool = False,
    rounding: str = "nearest",
    round_gradients: bool = False,
) -> Session:
    """Patches torch so that every op casts its inputs as the op lists say.

    Holds for the whole process. A second call with an equal policy does nothing, one with another
    policy replaces the first.

    Args:
        bf16_file_path: Ops that run in ``low_precision_type``; ``""`` for the shipped list.
        fp32_file_path: Ops that run in float32; ``""`` for the shipped list.
        isVerbose: True logs each call, ``"once"`` each distinct decision.
        *too_many: Nothing: other arguments are passed by name.
        fp16_file_path: Ops that run in float16, whatever ``low_precision_type`` is.
        opt_level: ``"O1"`` follows the lists; ``"O2"`` runs GEMMs and convolutions in
            ``low_precision_type`` and every other op in float32.
        low_precision_type: ``torch.bfloat16``, ``torch.float16``, or a number format of
            `hmpx.formats` or its name, such as ``"float8_e4m3fn"``, which is emulated in float32.
        lists: Name of a shipped set, or a directory that holds ``bf16.txt``, ``fp32.txt``,
            ``widest.txt``. None: ``"hmpx"``, which is HMP's lists less ``mul`` and ``t``. Others:
            ``"hmp"``, ``"autocast-cuda"``, ``"autocast-cpu"``, ``"o2"``.
        policy: Instead of all the lists above a ready `Policy`, or the path of a policy file (YAML, or
            a ``gaudi_config.json``), or a dict like such a file.
        device_types: Types of the devices whose tensors are cast, such as ``{"cuda"}``. None: the
            accelerator's if there is one, else ``{"cpu"}``.
        strict: Makes an unknown name in a list an error instead of a warning.
        legalize: Which low-precision ops compute in float32, with inputs and outputs rounded to the
            low-precision type, as hardware does that has it: ``"auto"`` those that this machine
            computes slowly in that type, ``"always"`` all, ``"never"`` none. ``"fast"`` is
            ``"auto"`` without rounding inputs that are float32: faster and more accurate, but not
            what such hardware gives.
        reuse_casts: Whether a parameter that is used several times within one call of the outermost
            module, by recurrent cells or under tied weights, is cast once. Writes to it past its
            version counter end that, where they go through torch's Python methods.
        rounding: How values are rounded to a number format, as `formats.quantize` takes it. Those
            of torch's own dtypes are always rounded to nearest.
        round_gradients: Whether gradients through a number format are rounded, too.

    Returns:
        The session in force: ``.revert()`` undoes it, and so does leaving a ``with`` block on it.

    Raises:
        OpListError: A list can't be read, or an op stands in two lists.
        PolicyFileError: ``policy`` can't be read, or is no policy.
        OptionError: An argument has a value that it can't have. Nothing is patched then.
    """
    torch_parts.check()
    asked = request.checked(
        bf16_file_path,
        fp32_file_path,
        isVerbose,
        too_many,
        fp16_file_path=fp16_file_path,
        opt_level=opt_level,
        low_precision_type=low_precision_type,
        lists=lists,
        policy=policy,
        device_types=device_types,
        strict=strict,
        legalize=legalize,
        reuse_casts=reuse_casts,
        rounding=rounding,
        round_gradients=round_gradients,
    )
    options = Options(asked.legalize, asked.reuse_casts, asked.rounding, asked.round_gradients)
    return _put_in_force(asked.policy, asked.device_types, options, asked.verbose)


@exclusive
def _put_in_force(
    policy: Policy, device_types: frozenset[str], options: Options, verbose: bool | str
) -> Session:
    """Returns the session in force, a new one if there is none that is equal."""
    session = Session(policy, device_types, options, verbose, _current)
    if verbose:
        log.show()
    if _current is not None and _current._is_equal_to(session):
        _current._converts += 1
        return _current
    _switch_to(session)
    if verbose:
        for path, function in rebinding.held_by_models(session._originals()):
            log.LOGGER.warning("not cast  %r  kept since before convert() by %s", function, path)
    return session


@exclusive
def revert() -> None:
    """Undoes `convert`: torch is as it was. Does nothing if torch is not converted."""
    if _current is not None:
        _current.revert()


def is_converted() -> bool:
    """Whether a `convert` is in force."""
    return _current is not None


def casts_enabled() -> bool:
    """Whether ops cast here and now: torch is converted, and casts are not switched off.

    By `disable_casts`, or by a region of torch.autocast that is off.
    """
    return _current is not None and not switch.is_off()


def current() -> Session | None:
    """Returns the session in force, or None."""
    return _current


def _switch_to(session: Session | None) -> None:
    """Puts ``session`` in force instead of the current one, which may be the same; or changes nothing.

    All that changes is drafted first. Wrappers of the session before are retired last, so that calls
    in other threads find the old ones or the new ones, and never torch without any.
    """
    old = _current
    replaced = Installation() if old is None else old._installation
    with _paused_gc():
        draft = Draft()
        covered = draft.undo(replaced.applied)
        if session is not None:
            installation = session._draft(draft, replaced)
            draft.apply([Patch(session, "_installation", installation)])
        if old is not None and old is not session:
            draft.apply([Patch(old, "_installation", Installation(rules=replaced.rules))])
            if not old._is_entered:  # nobody will go back to what was before it
                draft.apply([Patch(old, "_previous", None)])
        if (old is None) != (session is None):
            epoch = None if session is None else switch.begin()
            draft.apply([Patch(switch, "_epoch", epoch)])
        covered_types = frozenset() if session is None else session.device_types
        switch.reserve_marks(covered_types)
        draft.apply([Patch(switch, "_covered", covered_types)])
        draft.apply([Patch(sys.modules[__name__], "_current", session)])
        draft.apply(map(wrappers.retirement, replaced.wrappers))
        said = _said_of(covered)

        def finish() -> None:
            _forget_what_is_cached()
            if said and session is not None:  # an error that this is made into undoes the change
                warnings.warn(said, HmpxWarning, stacklevel=6)
            if session is not None and session is not old:
                _say(session._said)

        try:
            draft.make(finish)
        except BaseException:
            _forget_what_is_cached()
            raise
    if session is None:
        switch.end()
        if said:  # last: the change holds, even if this is made into an error
            warnings.warn(said, HmpxWarning, stacklevel=5)


def _forget_what_is_cached() -> None:
    """Makes torch look anew at its functions, which have changed."""
    modules.forget()
    compiled.forget()
    rebinding.forget_overrides()


def _said_of(covered: Iterable[Change]) -> str:
    """Returns what to say of patches on top of which somebody else has patched; ``""`` if nothing."""
    names = {patch.where for patch in covered if not (patch.is_foreign or patch.stays_idle)}
    if not names:
        return ""
    return (
        f"{', '.join(sorted(names))}: patched by somebody else after hmpx.convert(); their patch was "
        "left in place, without hmpx's casts beneath it. Undo theirs first, then hmpx.revert()"
    )


@exclusive
def _rules_changed() -> None:
    if _current is not None:
        _switch_to(_current)


rules.REGISTRY.followed_by(_rules_changed)
lowering.REGISTRY.followed_by(_rules_changed)


def _asks_for_modules(policy: Policy, registered: tuple[rules.Registered, ...]) -> bool:
    """Whether to note running modules from the start; otherwise that begins when they are asked for."""
    return any(section.is_placed for section in policy.sections) or any(
        rule.names_modules() for rule in registered
    )


def _patches(
    session: Session, observers: tuple[Observer, ...], draft: Draft
) -> tuple[list[Patch], list[Callable[..., Any]]]:
    """Returns the patches that make torch follow the session's policy, and the wrappers in them.

    They wrap what ``draft`` holds.

    One builtin in several slots (``torch.conv2d`` is ``F.conv2d``) gets one wrapper.
    """
    patches: list[Patch] = []
    made: dict[tuple[int, str], Callable[..., Any] | None] = {}
    policy = session.policy
    deciding = _deciding(policy)
    lacking = missing_kernels.table()
    completed = [name for name in lacking if name in ops.table()]  # of this version of torch
    for name in dict.fromkeys([*policy.decisions, *deciding, *completed]):
        decision = policy.decisions.get(name, _PASS)
        op = ops.table().get(name)
        if op is None and ops.is_known(name):
            continue  # another library's
        if op is None:
            raise OptionError(
                f"the policy holds {name!r}, which is no op of torch {torch.__version__}"
            )
        promotes = ops.root(name) in ops.facts("promotes")
        kind, first_matrix = ops.kind(name)
        asked = deciding.get(name, ())
        for site in op.sites:
            lacks = lacking.get(name) if _has_kernels(site, op) else None
            is_settled = lacks is None and (site.in_place or not asked)
            if not observers and is_settled and _is_settled_by_torch(site, decision, promotes):
                continue
            slot = draft.attribute(site.owner, site.attribute)
            function = site.callable_of(slot)
            key = (id(slot), name)
            if key in made:
                pass
            elif lacks is not None and name not in policy.decisions and not asked:
                callee = missing_kernels.Callee(
                    name,
                    function,
                    ops.parameters(site).names,
                    frozenset(ops.written(name, site)),
                    site.is_python,
                    name in ops.facts("random"),
                )
                made[key] = wrappers.make_completed_wrapper(callee, lacks, site.qualified)
            else:
                plan = CallPlan(
                    op=name,
                    site=site.qualified,
                    decision=decision,
                    parameters=ops.parameters(site),
                    device_types=session.device_types,
                    in_place=site.in_place,
                    promotes=promotes,
                    is_python=site.is_python,
                    writes=ops.written(name, site),
                    statistics=ops.statistics(name, site),
                    updates_if=next(iter(ops.facts("writes_if").get(name, ())), None),
                    norm_parameters=frozenset(ops.facts("parameters").get(name, ())),
                    mixed_device_types=frozenset(ops.facts("mixed_parameters").get(name, ())),
                    never_narrows=name in ops.facts("never_narrow"),
                    kind=kind,
                    first_matrix=first_matrix,
                    legalize=session.options.legalize,
                    reuses_casts=session.options.reuse_casts,
                    rounding=session.options.rounding,
                    rounds_gradients=session.options.round_gradients,
                    is_view=ops.is_view(name),
                    casts_first=name in ops.facts("casts_first"),
                    lacking=lacks,
                    is_random=name in ops.facts("random"),
                )
                make = _maker(function, site, plan, observers)
                if asked and not site.in_place:
                    made[key] = choosing.make_choosing_wrapper(
                        function, plan, asked, policy.low_precision_type, make
                    )
                else:
                    made[key] = make(decision)
            wrapper = made[key]
            if wrapper is not None and site.is_property:
                getter = property(wrapper, slot.__set__, slot.__delete__, slot.__doc__)
                patches.append(Patch(site.owner, site.attribute, getter))
            elif wrapper is not None:
                patches.append(Patch(site.owner, site.attribute, wrapper))
    return patches, [wrapper for wrapper in made.values() if wrapper is not None]


_PASS = Decision(CastPolicy.PASS, reason="in no list")


def _foreign_names(policy: Policy) -> list[str]:
    """Returns the ops of other libraries for which anything is decided."""
    return [
        name
        for name in dict.fromkeys([*policy.decisions, *_deciding(policy)])
        if foreign_ops.is_foreign(name)
    ]


class _Foreign:
    """Wrappers of other libraries' functions, as far as these are loaded.

    Attributes:
        patches: What puts them in place.
        made: The wrappers.
        said: What is wrong with names in the lists.
    """

    def __init__(
        self,
        session: Session,
        observers: tuple[Observer, ...],
        draft: Draft,
        present: tuple[Callable[..., Any], ...] = (),
    ) -> None:
        """Starts without any; ``present`` are those that are in place already."""
        self.patches: list[Patch] = []
        self.made: list[Callable[..., Any]] = []
        self.said: list[str] = []
        self._session, self._observers, self._draft = session, observers, draft
        self._present = {id(wrapper) for wrapper in present}
        self._taken: dict[tuple[int, str], tuple[str, Decision]] = {}
        self._deciding = (
            _deciding(session.policy) if rules.state() or session.policy.sections else {}
        )

    def take(self, names: Iterable[str], module: object = None) -> None:
        """Makes the wrappers of these ops; ``module`` is executed to its end, as others may not be."""
        for name in names:
            decision = self._session.policy.decisions.get(name, _PASS)
            is_shipped = decision.reason.startswith(oplists.SHIPPED)
            sites = list(foreign_sites.sites(name, self._draft))
            if not (sites or is_shipped) and (why := foreign_ops.lacking(name, module)):
                self.said.append(f"{decision.reason or 'a rule'}: {why}")
            for site in sites:
                if id(site.function) not in self._present and self._is_first(site, name, decision):
                    self._wrap(site, name, decision)

    def _is_first(self, site: foreign_sites.Site, name: str, decision: Decision) -> bool:
        key = (
            (id(site.owner), site.attribute)
            if isinstance(site.owner, type)
            else (id(site.function), "")
        )
        first, said = self._taken.setdefault(key, (name, decision))
        if (
            said != decision
            and not said.reason.startswith(oplists.SHIPPED)
            and (not decision.reason.startswith(oplists.SHIPPED))
        ):
            self.said.append(
                f"{decision.reason}: {name!r} is left out: it is {first!r}, which is decided "
                f"otherwise at {said.reason}; keep one of the lines"
            )
        return first == name

    def _wrap(self, site: foreign_sites.Site, name: str, decision: Decision) -> None:
        session = self._session
        # Nobody knows by what the speed of another library's function in low precision is told.
        legalize = "always" if session.options.legalize == "always" else "never"
        plan = CallPlan(
            op=name,
            site=site.qualified,
            decision=decision,
            parameters=site.parameters,
            device_types=session.device_types,
            in_place=site.in_place,
            is_python=True,
            writes=site.writes,
            legalize=legalize,
            reuses_casts=session.options.reuse_casts,
            rounding=session.options.rounding,
            rounds_gradients=session.options.round_gradients,
            is_foreign=True,
        )
        make = _maker(site.function, site, plan, self._observers)
        asked = self._deciding.get(name, ())
        low_type = session.policy.low_precision_type
        wrapper = (
            choosing.make_choosing_wrapper(site.function, plan, asked, low_type, make)
            if asked and not site.in_place
            else make(decision)
        )
        if wrapper is not None:
            self.made.append(wrapper)
            self.patches.append(site.holding(wrapper))


def _replacements(
    made: Iterable[Callable[..., Any]], earlier: Iterable[Callable[..., Any]]
) -> dict[int, Callable[..., Any]]:
    """Returns ``id`` of a function, or of an earlier wrapper of it -> the wrapper."""
    found = {id(vars(wrapper)["__wrapped__"]): wrapper for wrapper in made}
    for kept in earlier:
        if (wrapper := found.get(id(vars(kept)["__wrapped__"]))) is not None:
            found[id(kept)] = wrapper
    return found


def _say(messages: list[str]) -> None:
    """Warns of what is wrong with names in the lists, at the first line outside of hmpx."""
    if messages:
        level, frame = 1, sys._getframe()
        while frame.f_back is not None and _is_passing_on(frame.f_globals.get("__name__")):
            level, frame = level + 1, frame.f_back
        lines = "\n  ".join(messages)
        warnings.warn(f"left out of the op lists:\n  {lines}", HmpxWarning, stacklevel=level)


def _is_passing_on(module: object) -> bool:
    return str(module).partition(".")[0] in (__package__, "importlib", "_frozen_importlib")


def _deciding(policy: Policy) -> dict[str, tuple[rules.Rule, ...]]:
    """Returns op -> what decides its calls before the lists do, for ops that have any."""
    by_section = policy.section_rules()
    names = set(by_section)
    for rule in rules.state():
        names |= ops.computing() if rule.op == "*" else ops.covered(rule.op)
        if rule.op == "*":
            names |= set(filter(foreign_ops.is_foreign, policy.decisions))
    found: dict[str, tuple[rules.Rule, ...]] = {
        name: (*rules.registered(name), *by_section.get(name, ())) for name in sorted(names)
    }
    return {name: asked for name, asked in found.items() if asked}


def _maker(
    function: Callable[..., Any],
    site: ops.Site | foreign_sites.Site,
    plan: CallPlan,
    observers: tuple[Observer, ...],
) -> choosing.Maker:
    """Returns what makes the wrapper that follows a decision; None for one that does nothing."""

    def make(decision: Decision) -> Callable[..., Any] | None:
        decided = dataclasses.replace(plan, decision=decision)
        if isinstance(decision.dtype, Format):
            lowerings = lowering.lowerings(plan.op, decision.dtype)
            decided = dataclasses.replace(decided, lowerings=lowerings)
        if observers and decision.cast_policy is not CastPolicy.PASS:
            return wrappers.make_observed_wrapper(function, decided, observers)
        if _is_settled_by_torch(site, decision, plan.promotes):
            return wrappers.make_wrapper_where_lacking(function, plan)
        return wrappers.make_wrapper(function, decided)

    return make


def _has_kernels(site: ops.Site, op: ops.Op) -> bool:
    """Whether the callable at ``site`` is torch's own, or the op has none but those of Python."""
    if site.is_property:
        return False
    return not site.is_python or all(each.is_python for each in op.sites)


def _is_settled_by_torch(
    site: ops.Site | foreign_sites.Site, decision: Decision, promotes: bool
) -> bool:
    """Whether torch's own kernel does exactly what the decision says, so that none is wrapped."""
    if decision.cast_policy is CastPolicy.PASS:
        return True
    if site.in_place:
        if isinstance(site, foreign_sites.Site):
            return False
        return promotes or not (site.is_python or ops.parameters(site).has_several_tensors)
    is_widest = decision.cast_policy is CastPolicy.WIDEST
    return promotes and is_widest and not decision.is_composed


@contextlib.contextmanager
def _paused_gc() -> Iterator[None]:
    """Keeps the thousands of small objects of a conversion from setting off full collections.

    With torch loaded each takes as long as the whole conversion.
    """
    restore = gc.enable if gc.isenabled() else gc.disable
    try:
        try:
            gc.disable()
            yield
        finally:
            restore()
    finally:  # in case that an exception came right before
        restore()
