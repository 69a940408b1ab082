"""What a model is called with: the meaning of ``inputs``, ``batches``, ``forward_step`` and ``loss_fn`` in all tools."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .arguments import has_run, items
from .errors import HmpxError, OptionError, cut, raised_here, said_by, shown


def arguments_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the positional and the named arguments of a call.

    A tuple gives positional arguments, a mapping arguments by name, anything else is one argument: also a list and
    a named tuple.
    """
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    is_several = isinstance(inputs, tuple) and not hasattr(inputs, "_fields")
    return (inputs if is_several else (inputs,)), {}


def batches_of(name: str, batches: Any) -> list[Any]:
    """Returns the inputs in an iterable of them; a tensor, array, tuple or mapping is one batch."""
    is_one = isinstance(batches, (tuple, Mapping)) or hasattr(batches, "__array__")
    if is_one or not isinstance(batches, Iterable):
        return [batches]
    found = items(name, batches, "an iterable of inputs")
    if not found:
        raise OptionError(f"{name} is empty; give at least one batch")
    return found


def is_factory(inputs: Any) -> bool:
    """Whether ``inputs`` are a function that returns them."""
    return callable(inputs) and not hasattr(inputs, "__array__")


@dataclass(frozen=True)
class Steps:
    """How a tool runs a model on a batch: its forward, and its loss.

    Attributes:
        tool: The tool, for messages.
        model: A module or a function.
        forward_step: Takes the model and a batch, and returns the output; None: the batch is the model's inputs.
        loss_fn: Takes the output and the batch; or the output alone, if no second argument is required or named
            ``batch``.
    """

    tool: str
    model: Any
    forward_step: Callable[[Any, Any], Any] | None = None
    loss_fn: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        for name, what in (
            ("model", "a module or a function"),
            ("forward_step", "a function of the model and a batch"),
            ("loss_fn", "a function of the output and the batch"),
        ):
            value = getattr(self, name)
            if not callable(value) and (value is not None or name == "model"):
                raise OptionError(f"{name} must be {what}, not {shown(value)}")

    def forward(self, batch: Any) -> Any:
        """Returns the output.

        Raises:
            OptionError: The model does not take such a batch, or returns a generator or a coroutine.
        """
        if self.forward_step is not None:
            return has_run("forward_step", self.forward_step(self.model, batch))
        args, kwargs = arguments_of(batch)
        try:
            found = self.model(*args, **kwargs)
        except raised_here(TypeError, AttributeError) as error:
            is_whole = any(isinstance(each, (list, tuple, Mapping)) for each in args)
            if not is_whole and _fits(self.model, args, kwargs):
                raise
            said = ", ".join([*map(_said, args), *(f"{n}={_said(v)}" for n, v in kwargs.items())])
            part = _part(batch, 0)
            remedy = f"give the part that the model takes: inputs={part}"
            if self.tool in ("compare", "plan", "tune"):  # which take a forward step
                remedy = f"give forward_step=lambda model, batch: model({part})"
            if not part:
                remedy = "a tuple gives several arguments, a mapping arguments by name"
            raise OptionError(
                f"{self.tool} called {_name(self.model)}({said}): {said_by(error)}; {remedy}"
            ) from error
        return has_run("model", found)

    def loss(self, output: Any, batch: Any) -> Any:
        """Returns the loss.

        Raises:
            OptionError: ``loss_fn`` does not take the batch.
        """
        function: Any = self.loss_fn
        has_batch = _has_batch(function)
        if not has_batch and _fits(function, (output,), {}):
            return function(output)
        try:
            return function(output, batch=batch) if has_batch else function(output, batch)
        except raised_here(Exception) as error:
            is_torchs = str(getattr(function, "__module__", "")).partition(".")[0] == "torch"
            is_of_types = isinstance(error, (TypeError, AttributeError))
            if isinstance(error, HmpxError) or not (is_torchs or is_of_types):
                raise
            name = _name(function)
            raise OptionError(
                f"{self.tool} called {name}(output, batch) with the batch {_said(batch)}: {said_by(error)}; if it "
                f"takes the target, give loss_fn=lambda output, batch: {name}(output, {_part(batch, -1) or 'target'})"
            ) from error

    def scalar_loss(self, output: Any, batch: Any) -> torch.Tensor:
        """Returns the loss, as a tensor without dimensions.

        Raises:
            OptionError: ``loss_fn`` does not take the batch, or returns no floating-point tensor of one element.
        """
        loss = self.loss(output, batch)
        if isinstance(loss, torch.Tensor):
            if loss.numel() == 1 and loss.dtype.is_floating_point:
                return loss.reshape(())
            given = f"one of shape {list(loss.shape)} and {loss.dtype}"
        else:
            given = shown(loss)
        raise OptionError(
            f"loss_fn must return a floating-point tensor of one element, not {given}"
        )


def _fits(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function takes these arguments, or has no signature."""
    try:
        inspect.signature(getattr(function, "forward", function)).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:
        pass
    return True


def _has_batch(function: Any) -> bool:
    """Whether a function takes an argument by the name ``batch``, after others."""
    try:
        found = inspect.signature(getattr(function, "forward", function)).parameters
    except raised_here(TypeError, ValueError):
        return False
    kind = found["batch"].kind if "batch" in [*found][1:] else None
    return kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _name(function: Any) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return str(name) if str(name).isidentifier() else "function"


def _part(batch: Any, index: int) -> str:
    """Returns the first or the last part of a batch, as code; ``""`` for a batch of one part."""
    if not isinstance(batch, (Mapping, list, tuple)) or not batch:
        return ""
    places = [*batch] if isinstance(batch, Mapping) else range(len(batch))
    return f"batch[{shown(places[index])}]"


def _said(value: Any) -> str:
    """Returns an argument as messages show it: ``"float32[4, 8]"`` for a tensor."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{str(value.dtype).removeprefix('torch.')}{[*value.shape]}"
    if isinstance(value, (list, tuple)):
        inside = ", ".join(map(_said, value[:4]))
        return cut(f"[{inside}]" if isinstance(value, list) else f"({inside})")
    if isinstance(value, Mapping):
        return cut("{" + ", ".join(f"{shown(n)}: {_said(v)}" for n, v in value.items()) + "}")
    return shown(value)
