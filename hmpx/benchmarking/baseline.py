"""Whether fp32's step is in fp32: one that casts by itself is no baseline, and says nothing of casts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from .. import session
from ..frames import located
from ..observers import user_location
from ..tensors import LOW_DTYPES, floats_of


def low_op_of(step: Callable[[], Any]) -> str:
    """Runs a step, and returns its first op in low precision: ``"linear gives bfloat16, at train.py:12"``.

    ``""`` if there is none. Compiled functions run as written, for compiled graphs show no ops.
    """
    noting = _Noting()
    with torch.compiler.set_stance("force_eager"), noting:
        step()
    return noting.found


class _Noting(TorchFunctionMode):
    """Notes the first op with a result in low precision."""

    found = ""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        returned = func(*args, **(kwargs or {}))
        if not self.found:
            low = [each.dtype for each in floats_of(returned) if each.dtype in LOW_DTYPES]
            if low or session.is_converted():
                self.found = _said(func, low)
        return returned


def _said(func: Callable[..., Any], low: list[torch.dtype]) -> str:
    name = str(resolve_name(func) or getattr(func, "__name__", func)).rpartition(".")[2]
    does = f"gives {str(low[0]).removeprefix('torch.')}" if low else "runs under hmpx.convert()"
    where = user_location()
    return f"{name} {does}, at {located(where)}" if where else f"{name} {does}"
