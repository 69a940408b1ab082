"""``habana_frameworks.torch.core``: step markers, and settings of the lazy mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...absent import absent, unknown, without_effect
from ..utils import debug as _debug
from ..utils import experimental as _experimental

#: Closures that wait for the next step marker.
_closures: list[Callable[[], object]] = []


def mark_step(device_str: str = "", sync: bool = False) -> None:
    """Runs the closures that `add_step_closure` took; there is no graph to launch here."""
    waiting = [*_closures]
    _closures.clear()
    for closure in waiting:
        closure()


def iter_mark_step(device_str: str = "") -> None:
    """Marks a step, as `mark_step` does."""
    mark_step()


def add_step_closure(closure: Callable[..., object], args: tuple[Any, ...] = ()) -> None:
    """Makes the next `mark_step` call ``closure`` with ``args``."""
    _closures.append(lambda: closure(*args))


def hpu_initialize(model: Any = None, *args: object, **kwargs: object) -> None:
    """Does nothing: there are no weights to quantize here."""


hpu_inference_initialize = hpu_initialize


def hpu_set_env(model: Any = None, *args: object, **kwargs: object) -> Any:
    """Returns ``model``: there is no environment to prepare."""
    return model


hpu_inference_set_env = hpu_set_inference_env = hpu_set_env
hpu_reset_env = hpu_teardown_inference_env = hpu_set_env


def is_enabled_weight_permute_pass() -> bool:
    """Returns True: convolutions take weights in torch's layout, so scripts leave them alone."""
    return True


def get_device_count() -> int:
    """Returns the number of devices."""
    from ..hpu import device_count

    return device_count()


def __getattr__(name: str) -> Any:
    if name == "quantization":
        return absent(__name__, name, "use the formats of hmpx, such as float8_e4m3fn")
    for module in (_debug, _experimental):  # whose functions were here once
        if not name.startswith("_") and hasattr(module, f"_{name}"):
            return getattr(module, f"_{name}")
    if name.startswith(("enable_", "disable_", "set_dynamic")):
        return without_effect(__name__, name)
    raise unknown(__name__, name)
