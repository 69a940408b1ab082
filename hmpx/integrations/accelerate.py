"""Conversion for loops of Hugging Face Accelerate."""

from __future__ import annotations

import os
from typing import Any

from accelerate import Accelerator  # type: ignore[import-untyped]

from ..errors import OptionError
from ..monitoring import Monitor
from .converted_run import ConvertedRun


def convert(
    accelerator: Accelerator,
    *,
    record: str | os.PathLike[str] | None = None,
    watch: str | None = None,
    monitor: Monitor | None = None,
    **options: Any,
) -> ConvertedRun:
    """Converts torch for an accelerator's device, until ``.end()`` or the end of a ``with`` block.

    ``save_state`` also saves the policy; ``load_state`` warns if the saved policy differs.

    Args:
        accelerator: With ``mixed_precision="no"``; or ``"fp16"`` for its loss scaling, if ops compute in
            float16.
        record: Path of a report written at the end of the run: ``.html``, ``.json`` or ``.csv``. Only the
            process of rank 0 writes it.
        watch: ``"raise"``, ``"log"`` or ``"collect"``: looks for the first NaN, see `hmpx.watch`.
        monitor: What `hmpx.monitor` returns, for the length of the run.
        **options: Arguments of `hmpx.convert`. Without any, an existing conversion is kept.

    Returns:
        The conversion, with ``.record`` and ``.watch``; ``.carried`` is the policy of a checkpoint.

    Raises:
        HmpxError: An argument has an invalid value, the accelerator's own mixed precision is on, or
            float16 has no loss scaling. Nothing is patched then.

    Example:
        >>> from accelerate import Accelerator
        >>> from hmpx.integrations.accelerate import convert
        >>> accelerator = Accelerator(mixed_precision="no", cpu=True)
        >>> with convert(accelerator):
        ...     torch.nn.functional.linear(torch.ones(1, 2), torch.ones(3, 2)).dtype
        torch.bfloat16
    """
    run = ConvertedRun(options, record, watch, monitor)
    own, needs_scaling = accelerator.mixed_precision, run.computes_in_float16()
    if own != "no" and not (own == "fp16" and needs_scaling):
        raise OptionError(
            f"Accelerator(mixed_precision={own!r}) has torch.autocast cast as well; make it "
            'mixed_precision="no", and give convert the low_precision_type'
        )
    if needs_scaling and accelerator.scaler is None:
        raise OptionError(
            'float16 needs loss scaling, which Accelerator(mixed_precision="fp16") has, not on CPUs; '
            "bfloat16 needs none"
        )
    run.start(accelerator.device.type)
    accelerator.register_for_checkpointing(run)
    return run
