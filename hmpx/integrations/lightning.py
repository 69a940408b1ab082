"""A precision plugin for the Trainer of Lightning."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from ..monitoring import Monitor
from ..tensors import default_device_types
from .converted_run import ConvertedRun


class HmpxPrecision(MixedPrecision):
    """Converts torch while a Trainer fits, validates, tests or predicts.

    Parameters and optimizer state stay float32. If any op computes in float16, losses are scaled as with
    ``precision="16-mixed"``. Checkpoints carry the policy; loading one with another policy gives a
    warning.

    Args:
        scaler: Scales losses. None: a default `torch.amp.GradScaler`, if any op computes in float16.
        record: Path of a report written at the end of the run: ``.html``, ``.json`` or ``.csv``. Only the
            process of rank 0 writes it.
        watch: ``"raise"``, ``"log"`` or ``"collect"``: looks for the first NaN, see `hmpx.watch`.
        monitor: What `hmpx.monitor` returns, for the length of the run.
        **options: Arguments of `hmpx.convert`. Without any, an existing conversion is kept.

    Attributes:
        run: The conversion, with ``.record`` and ``.watch``; ``.carried`` is the checkpoint's policy.

    Raises:
        HmpxError: An argument has an invalid value.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from hmpx.integrations.lightning import HmpxPrecision
        >>> trainer = Trainer(plugins=[HmpxPrecision()], logger=False, enable_checkpointing=False)
    """

    def __init__(
        self,
        *,
        scaler: torch.amp.GradScaler | None = None,
        record: str | os.PathLike[str] | None = None,
        watch: str | None = None,
        monitor: Monitor | None = None,
        **options: Any,
    ) -> None:
        self.run = ConvertedRun(options, record, watch, monitor)
        self._has_default_scaler = scaler is None
        (device_type,) = default_device_types()
        precision: Any = "16-mixed" if self.run.computes_in_float16() else "bf16-mixed"
        super().__init__(precision, device_type, scaler)
        self.precision: Any = "32-true"  # that of parameters, which others read

    def connect(
        self, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Any], list[Any]]:
        """Converts torch for the devices of the model's type."""
        device_type = next((each.device.type for each in model.parameters()), None)
        if self.scaler is not None and self._has_default_scaler and device_type:
            self.scaler = torch.amp.GradScaler(device_type)
        self.run.start(device_type)
        return super().connect(model, optimizers, lr_schedulers)

    def forward_context(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]  # Precision's own
        """Returns a context that does nothing, since torch.autocast does not cast here."""
        return contextlib.nullcontext()

    def teardown(self) -> None:
        """Undoes the conversion."""
        self.run.end()

    def state_dict(self) -> dict[str, Any]:
        """Returns the policy, and the state of the scaler."""
        return {**self.run.state_dict(), "scaler": super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the scaler's state, and checks the policy against the checkpoint's."""
        self.run.load_state_dict(state_dict)
        super().load_state_dict(state_dict["scaler"])
