"""The optimizer of a planned step: from a name, a class or a function, and what it keeps."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import nn

from ..errors import OptionError, shown, suggestion

#: What `plan` takes: None for no optimizer.
Optimizer = str | type[torch.optim.Optimizer] | Callable[[Iterable[nn.Parameter]], Any] | None

#: Devices on which torch's optimizers update all parameters at a time, unless they are told otherwise.
_AT_A_TIME: Final = ("cuda", "xpu", "mtia")

_NAMES: Final = {
    name.lower(): getattr(torch.optim, name)
    for name in dir(torch.optim)
    if isinstance(getattr(torch.optim, name), type)
    and issubclass(getattr(torch.optim, name), torch.optim.Optimizer)
    and getattr(torch.optim, name) is not torch.optim.Optimizer
}


def parsed(value: Any) -> tuple[str, Callable[[list[nn.Parameter]], Any] | None]:
    """Returns an optimizer's name and what makes it; None for no optimizer.

    Raises:
        OptionError: There is none of that name, or ``value`` can't be called.
    """
    if value is None:
        return "no optimizer", None
    if isinstance(value, str):
        return _named(value)
    if not callable(value):
        raise OptionError(
            f'optimizer must be a name such as "AdamW", a class or a function of parameters, not '
            f"{shown(value)}"
        )
    return getattr(value, "__name__", type(value).__name__), value


def _named(text: str) -> tuple[str, Callable[[list[nn.Parameter]], Any]]:
    name, *options = text.split()
    found = _NAMES.get(name.lower())
    if found is None:
        hint = suggestion(name.lower(), _NAMES) or f" (known: {', '.join(sorted(_NAMES))})"
        raise OptionError(f"optimizer: torch.optim has no {shown(name)}{hint}")
    try:
        pairs = [option.split("=", 1) for option in options]
        arguments = {key: ast.literal_eval(value) for key, value in pairs}
    except (ValueError, SyntaxError):
        raise OptionError(
            f'optimizer {shown(text)}: options are given as in "SGD momentum=0.9"'
        ) from None
    said = ", ".join(f"{key}={value}" for key, value in arguments.items())
    return f"{found.__name__} {said}".strip(), lambda parameters: found(parameters, **arguments)


def made(
    make: Callable[[list[nn.Parameter]], Any], parameters: list[nn.Parameter], device_type: str
) -> Any:
    """Returns an optimizer that updates parameters as it would on the device.

    Raises:
        OptionError: It isn't one.
    """
    optimizer = make(parameters)
    if not hasattr(optimizer, "step") or not hasattr(optimizer, "param_groups"):
        raise OptionError(
            f"optimizer must make an optimizer of torch's kind, not {shown(optimizer)}"
        )
    for group in optimizer.param_groups:
        is_undecided = "foreach" in group and group["foreach"] is None and not group.get("fused")
        if is_undecided and device_type in _AT_A_TIME:
            group["foreach"] = True
    return optimizer
