"""Whether a loss scaler is at work, which makes gradients overflow at times on purpose."""

from __future__ import annotations

from collections import deque
from typing import Final

from ..patches import SCALERS

#: A scale below this one no longer scales up.
_FLOOR: Final = 1.0

#: Of so many steps
_STEPS: Final = 200

#: this share may be skipped.
_MOST_SKIPPED: Final = 0.05


class LossScaling:
    """The steps that loss scalers have skipped."""

    def __init__(self) -> None:
        """Starts with none."""
        self._skipped: deque[bool] = deque(maxlen=_STEPS)
        self._is_bad = False
        SCALERS.clear()

    def is_used(self) -> bool:
        """Whether a loss has been scaled since the watch began."""
        return any(scaler.is_enabled() for scaler in list(SCALERS))

    def is_lost(self) -> bool:
        """Notes that gradients are not finite; returns whether no scale helps."""
        self._is_bad = True
        if sum(self._skipped) + 1 > _MOST_SKIPPED * _STEPS:
            return True
        return any(scaler.is_enabled() and scaler.get_scale() < _FLOOR for scaler in list(SCALERS))

    def end_step(self) -> None:
        """Starts the next step."""
        if self.is_used():
            self._skipped.append(self._is_bad)
        self._is_bad = False
