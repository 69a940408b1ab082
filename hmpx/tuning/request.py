"""The arguments of `tune`, checked as a whole before anything runs, and its batches."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any, Final

import torch

from .. import arguments, session
from ..casting import Options
from ..errors import OptionError, shown
from ..inputs import Steps, batches_of
from ..policy import LEGALIZE_MODES, Policy
from ..tensors import long_name, parse_device_types, tensors_of
from ..torch_state import ModelState
from ..version import __version__
from .metrics import METRICS

BY: Final = ("op", "module")

#: Inputs of an evaluation: those of the search, or those that it has never seen.
TUNING: Final = "tuning"
FRESH: Final = "fresh"


class Request:
    """The checked arguments of `tune`.

    ``batches`` maps `TUNING`, and `FRESH` if there are any, to lists; ``state`` restores the model.
    """

    state: ModelState

    def __init__(self, **given: Any) -> None:
        self.model, self.metric = given["model"], given["metric"]
        self.measure = given["measure"]
        self.steps = Steps("tune", self.model, given["forward_step"], given["loss_fn"])
        session.refuse_where_off("tune")
        if not callable(self.measure) and self.measure is not None:
            raise OptionError(f"measure must be a function, not {shown(self.measure)}")
        if not callable(self.metric):
            metric = "relative_l2" if self.metric is None else self.metric
            self.metric = arguments.choice("metric", metric, METRICS)
        found = batches_of("batches", given["batches"])
        self.batches = {TUNING: found}
        if given["fresh_batches"] is not None:
            self.batches[FRESH] = batches_of("fresh_batches", given["fresh_batches"])
        elif end := len(found) - max(1, len(found) // 4):  # the last quarter of several
            self.batches = {TUNING: found[:end], FRESH: found[end:]}
        self.device_types, self.options = _conversion(
            self.model, self.batches[TUNING], given["device_types"], given["legalize"]
        )
        self.samples = arguments.whole("samples", given["samples"], 1)
        self.tolerance = _tolerance(given["tolerance"])
        self.by = arguments.choice("by", given["by"], BY)
        self.low_type = low_type_name(given["low_precision_type"])
        self.seed = arguments.whole("seed", given["seed"], 0)
        self.budget = arguments.whole("budget", given["budget"], 2)
        self.journal = arguments.path("journal", given["journal"])
        self.metric_name = self.metric
        if self.measure is not None:
            self.metric_name = getattr(self.measure, "__name__", "measure")
        elif callable(self.metric):
            self.metric_name = getattr(self.metric, "__name__", "metric")

    @property
    def conversion(self) -> dict[str, Any]:
        """The arguments of `convert` besides the policy with which sets are evaluated, unless by default."""
        found: dict[str, Any] = {"device_types": set(self.device_types)}
        for each in fields(Options):
            value = getattr(self.options, each.name)
            has_effect = not (each.metadata["is_of_formats"] and self._is_native)
            if value != each.default and has_effect:
                found[each.name] = value
        return found

    @property
    def may_follow(self) -> bool:
        """Whether ops may also follow their inputs: one evaluation must show their dtypes."""
        return self.measure is None and self._is_native

    @property
    def _is_native(self) -> bool:
        """Whether the low-precision type is not a number format."""
        policy = Policy.from_ops(low_precision_type=self.low_type)
        return isinstance(policy.low_precision_type, torch.dtype)

    def header(self) -> dict[str, Any]:
        """Returns the identity of this search for its journal. The tolerance may differ."""
        return {
            "hmpx": __version__,
            "torch": torch.__version__,
            "model": _fingerprint([*_held(self.model), *_held(self.model, "buffers")]),
            "inputs": {name: _fingerprint(tensors_of(x)) for name, x in self.batches.items()},
            "metric": _name(self.metric),
            "loss_fn": _name(self.steps.loss_fn),
            "measure": _name(self.measure),
            "samples": self.samples,
            "by": self.by,
            "low_precision_type": self.low_type,
            "device_types": sorted(self.device_types),
            "options": str(self.options),
            "seed": self.seed,
            "threads": torch.get_num_threads(),
            **({"forward_step": _name(step)} if (step := self.steps.forward_step) else {}),
        }


def low_type_name(low_precision_type: Any) -> str:
    """Returns the name of a low-precision type; None: that of the conversion in force, else bfloat16."""
    current = session.current()
    if low_precision_type is None:
        found = torch.bfloat16 if current is None else current.policy.low_precision_type
        return long_name(found)
    return long_name(Policy({}, low_precision_type).low_precision_type)


def _conversion(
    model: Any, inputs: Any, device_types: Iterable[str] | None, legalize: Any
) -> tuple[frozenset[str], Options]:
    """Returns the conversion of evaluations: that of the conversion in force, unless overridden."""
    current = session.current()
    if device_types is not None:
        types = parse_device_types(device_types)
    elif current is not None:
        types = current.device_types
    else:
        held = [*_held(model), *tensors_of(inputs)]
        types = frozenset(each.device.type for each in held) or parse_device_types(None)
    options = Options() if current is None else current.options
    if legalize is None and current is None and types == {"cpu"}:
        legalize = "always"  # "auto" depends on timings that differ between processes
    if legalize is not None:
        legalize = arguments.choice("legalize", legalize, LEGALIZE_MODES)
        options = replace(options, legalize=legalize)
    return types, options


def _tolerance(value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise OptionError(f"tolerance must be a number, not {shown(value)}")
    found = float(value)
    if not (found > 0 and math.isfinite(found)):
        raise OptionError(
            f"tolerance must be above 0 and finite, not {shown(value)}: the largest error that passes, "
            "such as 0.01"
        )
    return found


def _held(model: Any, which: str = "parameters") -> Iterable[torch.Tensor]:
    return getattr(model, which)() if isinstance(model, torch.nn.Module) else ()


def _fingerprint(tensors: Iterable[torch.Tensor]) -> str:
    """Returns a string that is equal for tensors of equal shapes and sums."""
    said = hashlib.sha256()
    for each in tensors:
        value = each.detach()
        is_plain = value.layout is torch.strided and not value.is_meta
        total = float(value.to(torch.complex128).abs().sum()) if is_plain else 0.0
        said.update(repr((tuple(value.shape), str(value.dtype), total)).encode())
    return said.hexdigest()[:16]


def _name(function: Any) -> str:
    """Returns the name of a function; a string as it is, ``""`` for None."""
    if function is None or isinstance(function, str):
        return function or ""
    return getattr(function, "__qualname__", None) or type(function).__qualname__
