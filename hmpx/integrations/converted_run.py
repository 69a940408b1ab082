"""A conversion for the length of a framework's training, with an optional report and watch."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed
import yaml

from .. import arguments
from ..errors import HmpxWarning, NonFiniteError, OptionError, shown
from ..monitoring import Monitor
from ..policy import UNDECIDED, Policy, every_decision, load_policy
from ..recording import record as Record  # a class, and the name of an argument here
from ..session import checked_policy, convert, current
from ..version import __version__
from ..watching import Watch
from ..watching import watch as watching

#: Extension of the report's path -> its writer.
_FORMATS: Final = {".html": Record.to_html, ".json": Record.to_json, ".csv": Record.to_csv}


class ConvertedRun:
    """A conversion of torch from `start` to `end`.

    Without options an existing conversion is kept, so that a script which calls `hmpx.convert` itself
    can still have a report or a watch.

    Attributes:
        policy: The policy of the conversion; None for that of the conversion in force.
        record: The record behind the report; None without one.
        watch: The watch; None without one.
        carried: The policy of the loaded checkpoint; None if none was loaded.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        record: str | os.PathLike[str] | None,
        watch: str | None,
        monitor: Monitor | None = None,
    ) -> None:
        self.policy = checked_policy(**options) if options else None
        self._options = dict(options)
        self._path = None if record is None else Path(arguments.path("record", record))
        if self._path is not None and self._path.suffix not in _FORMATS:
            raise OptionError(
                f"record must be a path that ends in {', '.join(_FORMATS)}, not {shown(str(record))}"
            )
        if watch is not None:
            watching(watch)  # type: ignore[arg-type]  # it checks
        if not isinstance(monitor, (Monitor, type(None))):
            raise OptionError(f"monitor must be what hmpx.monitor() returns, not {shown(monitor)}")
        self._mode, self._monitor = watch, monitor
        self.record: Record | None = None
        self.watch: Watch | None = None
        self.carried: Policy | None = None
        self._open: contextlib.ExitStack | None = None
        self._written = 0

    def __repr__(self) -> str:
        state = "not running" if self._open is None else "running"
        parts = [f"{name}={getattr(self, name)!r}" for name in ("policy", "watch")]
        return f"<hmpx ConvertedRun {state}: {', '.join(parts)}>"

    def computes_in_float16(self) -> bool:
        """Whether any op computes in float16 by the policy, so that losses need scaling."""
        policy = self._policy()
        if policy is None:
            return False
        low = policy.low_precision_type
        return any((each.dtype or low) is torch.float16 for each in every_decision(policy))

    def start(self, device_type: str | None) -> None:
        """Converts torch, by default on this device type, and starts the record and the watch. Runs once."""
        if self._open is not None:
            return
        with contextlib.ExitStack() as stack:
            if self._options or current() is None:
                found = {"device_types": device_type and {device_type}, **self._options}
                stack.enter_context(convert(**found))
            is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
            is_first = not is_distributed or torch.distributed.get_rank() == 0
            if self._path is not None and is_first:
                self.record = stack.enter_context(Record())
            if self._mode is not None:
                self.watch = stack.enter_context(watching(self._mode))  # type: ignore[arg-type]
            if self._monitor is not None:
                stack.enter_context(self._monitor)
            self._open = stack.pop_all()

    def end(self) -> None:
        """Undoes the conversion and writes the report; does nothing if that is already done."""
        self._close(None, None, None)

    def __enter__(self) -> ConvertedRun:
        self.start(None)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._close(*exc_info)

    def _close(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._open is None:
            return
        stack, self._open = self._open, None
        if error is None and self._mode == "raise" and self.watch is not None and self.watch.first:
            # Already raised: not a second time for its consequences.
            error, kind = NonFiniteError(self.watch.first), NonFiniteError
        try:
            stack.__exit__(kind, error, trace)
        finally:
            if self.record is not None and self._path is not None:
                self._written += 1  # evaluation after a training keeps the training's report
                number = f"-{self._written}" if self._written > 1 else ""
                path = self._path.with_stem(f"{self._path.stem}{number}")
                _FORMATS[path.suffix](self.record, path)

    # --- checkpoints ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the version of hmpx, the policy, as a policy file, and amaxes, if there are any."""
        policy, session = self._policy(), current()
        found = {"hmpx": __version__, "policy": "" if policy is None else policy.to_yaml()}
        amaxes = {} if session is None else session.histories.state_dict()
        return {**found, "amaxes": amaxes} if amaxes else found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads amaxes; keeps a checkpoint's policy as `carried`, and warns if it differs from the current one."""
        session = current()
        if state.get("amaxes") and session is not None:
            session.histories.load_state_dict(state["amaxes"])
        if not state.get("policy"):
            return
        self.carried = load_policy(policy=yaml.safe_load(state["policy"]))
        policy = self._policy()
        if policy is not None and policy != self.carried:
            warnings.warn(
                f"the checkpoint was made under another policy: {_difference(self.carried, policy)}; "
                "to go on with that one, pass policy=run.carried of this run to the next",
                HmpxWarning,
                stacklevel=2,
            )

    def _policy(self) -> Policy | None:
        session = current()
        return session.policy if self.policy is None and session is not None else self.policy


def _difference(there: Policy, here: Policy) -> str:
    names = sorted(
        name
        for name in there.decisions.keys() | here.decisions.keys()
        if there.decisions.get(name, UNDECIDED) != here.decisions.get(name, UNDECIDED)
    )
    if not names:
        types = [settled.low_precision_type for settled in (there, here)]
        if types[0] != types[1]:
            return f"its low precision is {types[0]}, here it is {types[1]}"
        return "its sections differ"
    more = f", and {len(names) - 3} more" if len(names) > 3 else ""
    return f"it decides otherwise for {', '.join(names[:3])}{more}"
