"""Alarms of `monitor`: names of figures, and their limits."""

from __future__ import annotations

import fnmatch
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

from .. import arguments
from ..errors import OptionError, fielded, shown
from .figures import Counts, Type, figures

#: The default alarms: pattern of a figure's name -> its limit.
ALARMS: Final[Mapping[str, float]] = MappingProxyType(
    {
        "*/activation/near_max": 0.0,
        "*/activation/saturated": 0.02,
        "*/activation/error_of_spread": 0.25,
        "*/input/near_max": 0.0,
        "*/input/saturated": 0.02,
        "*/input/overflow": 0.0,
        "*/input/error_of_spread": 0.25,
        "*/gradient/subnormal": 0.5,
        "*/weight/unchanged": 0.9,
        "*/weight/nonfinite": 0.0,
        "*/state/nonfinite": 0.0,
    }
)


class MonitoredRow(NamedTuple):
    """What figures are of.

    Attributes:
        module: Path of the module; ``""`` for the outermost one.
        op: Name of the op; of a parameter its own name, of an optimizer's state ``"weight.exp_avg"``.
        kind: ``"activation"``, ``"input"`` (that a call casts), ``"gradient"``, ``"weight"``, ``"state"``.
        of: The type that the values have, or that a call casts them to.
        is_cast: Whether it casts them.
        trial: Name of the format that is only tried; ``""`` for the type in use.
    """

    module: str
    op: str
    kind: str
    of: Type
    is_cast: bool = False
    trial: str = ""

    def name(self, figure: str) -> str:
        """Returns the name of a figure in logs."""
        figure = f"{self.trial}.{figure}" if self.trial else figure
        return "/".join(filter(None, ["hmpx", self.module, self.op, self.kind, figure]))

    def figures(self, counts: Counts) -> Iterator[tuple[str, float]]:
        """Yields the figures of its counts by name."""
        return figures(counts, self.of, is_cast=self.is_cast, is_tried=bool(self.trial))


@dataclass(frozen=True)
class Alarm:
    """A figure beyond its limit.

    Attributes:
        name: Name of the figure: ``"hmpx/fc1/linear/activation/near_max"``.
        step: Number of the step.
        value: The figure.
        limit: Its limit.
        module: Path of the module; ``""`` for the outermost one.
        op: Name of the op, or of the parameter.
        remedy: What helps, by the values of this step.
        tried: What the remedy gave at the next checked step; ``""`` before that.

    Example:
        >>> with hmpx.monitor(alarms={"*/amax": 9.0}, on_alarm="collect") as monitor:
        ...     _ = torch.ones(2) * 10
        ...     monitor.step()
        >>> str(monitor.alarms[0])
        'hmpx/mul/activation/amax is 10 in step 0, over 9'
    """

    name: str
    step: int
    value: float
    limit: float
    module: str
    op: str
    remedy: str
    tried: str = ""

    __repr__ = fielded

    def __str__(self) -> str:
        found = f"{self.name} is {self.value:.3g} in step {self.step}, over {self.limit:g}"
        return "; ".join(filter(None, [found, self.remedy, self.tried]))


def checked_alarms(alarms: object) -> dict[str, float]:
    """Returns the limits by pattern.

    Raises:
        OptionError: They are something else than a mapping of patterns to numbers.
    """
    found = arguments.mapping("alarms", alarms, "a dict of pattern -> limit")
    for pattern, limit in found.items():
        arguments.text("a pattern of alarms", pattern)
        if isinstance(limit, bool) or not isinstance(limit, (int, float)) or math.isnan(limit):
            raise OptionError(f"alarms[{pattern!r}] must be a number, not {shown(limit)}")
    return found


@functools.lru_cache(maxsize=1 << 14)
def matches(name: str, pattern: str) -> bool:
    """Whether a pattern of alarms matches a figure's name."""
    return fnmatch.fnmatchcase(name, pattern)


def limit_of(name: str, alarms: Mapping[str, float]) -> float:
    """Returns the limit of a figure: that of the last pattern that matches; inf for none."""
    found = math.inf
    for pattern, limit in alarms.items():
        if matches(name, pattern):
            found = limit
    return found
