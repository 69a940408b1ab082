"""A callback for the Trainer of Hugging Face."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from ..errors import OptionError
from ..monitoring import Monitor
from ..reports import written
from .converted_run import ConvertedRun


class HmpxCallback(TrainerCallback, ExportableState):
    """Converts torch from the beginning of ``train()`` to its end, including evaluation in between.

    Parameters and optimizer state stay float32. Checkpoints carry the policy as ``hmpx_policy.yaml``;
    loading one with another policy gives a warning. Use `converted` for evaluation and prediction outside
    of ``train()``. If ``train()`` raises, the Trainer calls no callback; call `end` to undo the
    conversion then.

    Args:
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
        >>> from hmpx.integrations.transformers import HmpxCallback
        >>> callback = HmpxCallback(lists="hmpx")      # Trainer(model, args, callbacks=[callback])
    """

    def __init__(
        self,
        *,
        record: str | os.PathLike[str] | None = None,
        watch: str | None = None,
        monitor: Monitor | None = None,
        **options: Any,
    ) -> None:
        self.run = ConvertedRun(options, record, watch, monitor)

    @contextlib.contextmanager
    def converted(self, device_type: str | None = None) -> Iterator[ConvertedRun]:
        """Converts torch in a block, for separate evaluation or prediction.

        Args:
            device_type: Type of the device; None for the accelerator's if there is one, else the CPU's.
        """
        self.run.start(device_type)
        try:
            yield self.run
        finally:
            self.run.end()

    def end(self) -> None:
        """Undoes the conversion, and writes the report; does nothing if that is already done."""
        self.run.end()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Converts torch."""
        self._check(args)
        self.run.start(args.device.type)
        callbacks: Any = state.stateful_callbacks  # by class name, whatever its annotation says
        saved = callbacks and callbacks.get(type(self).__name__)
        if saved and state.global_step:  # else it is this run's own
            self.run.load_state_dict(saved["attributes"]["_carried"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Undoes the conversion."""
        self.run.end()

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Writes the policy into the model's folder."""
        folder = Path(args.output_dir or "", f"checkpoint-{state.global_step}")
        if state.is_world_process_zero and folder.is_dir():
            written(self.run.state_dict()["policy"], folder / "hmpx_policy.yaml")

    def state(self) -> dict[str, Any]:
        """Returns the state saved by the Trainer, from which a like callback is made."""
        found = self.run.state_dict()
        policy = {"policy": yaml.safe_load(found["policy"])} if found["policy"] else {}
        return {"args": policy, "attributes": {"_carried": found}}

    def _check(self, args: TrainingArguments) -> None:
        if args.bf16:
            raise OptionError(
                "TrainingArguments(bf16=True) has torch.autocast cast as well; leave it out, and give "
                "HmpxCallback the type: low_precision_type=torch.bfloat16"
            )
        needs_scaling = self.run.computes_in_float16()
        if args.fp16 and not needs_scaling:
            raise OptionError(
                "TrainingArguments(fp16=True) has torch.autocast cast as well, to float16, which is not "
                "the policy's type; leave it out, or give HmpxCallback low_precision_type=torch.float16"
            )
        if needs_scaling and (not args.fp16 or args.device.type == "cpu"):
            raise OptionError(
                "float16 needs loss scaling, which the Trainer has with TrainingArguments(fp16=True), not "
                "on CPUs; bfloat16 needs none"
            )
