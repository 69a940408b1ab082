"""Users' functions that compute one op in one number format, by a library or on integers.

Graphs contain an opaque operator. It finds the function when the graph runs, by the names of op and format,
so graphs from the disk cache find it too.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from .. import arguments, number_formats, ops, tensors
from ..errors import OptionError, raised_here, said_by, shown
from ..number_formats import Custom, Format, Rounded, Scaled, decode, encode, get
from ..registry import change_together, exclusive
from ..tensors import Args, Function, Kwargs, map_all, map_tensors
from ..torch_internals import HAS_OPERATORS, may_learn
from ..torch_state import without_casts
from .composition import is_exported, is_traced
from .watching import LOWERINGS, Lowerings


@dataclass(frozen=True)
class OnCodes:
    """A function that takes and returns tensors of integer codes, prepared by `create_lower_func`."""

    function: Function


@dataclass(frozen=True)
class Lowering:
    """A function that computes an op from arguments rounded to the format."""

    function: Function
    op: str
    format: str  # its name
    takes_codes: bool = False  # so it can't take plain numbers

    @property
    def name(self) -> str:
        """The names of the op and the format, for error messages."""
        return f"{self.op} in {self.format}"

    def in_place_of(self, result: Any, args: Args, kwargs: Kwargs) -> Any:
        """Returns the function's result with the gradient of torch's ``result``; both have one shape."""
        if not isinstance(result, Tensor):
            raise OptionError(f"{self.name}: an op that is lowered returns one tensor")
        if is_traced() and not is_exported():
            found = self._in_graph(args, kwargs, result)
        else:
            with torch.no_grad():
                found = self.called(args, kwargs)
            if found.shape != result.shape:
                raise OptionError(
                    f"{self.name} returned the shape {tuple(found.shape)} instead of "
                    f"{tuple(result.shape)}"
                )
            found = found.to(result.dtype)
        if not may_learn(result):
            return found
        return _InPlaceOf.apply(result, lambda _, found: found.view_as(found), None, found)

    def _in_graph(self, args: Args, kwargs: Kwargs, like: Tensor) -> Tensor:
        tensors: list[Tensor] = []

        def placed(tensor: Tensor) -> Any:
            tensors.append(tensor.detach())
            return {_TENSOR: len(tensors) - 1}

        try:
            given = json.dumps(map_all([args, kwargs], placed))
        except TypeError as error:
            raise OptionError(
                f"{self.name}: torch.compile can't hold a call of a registered function with such an "
                f"argument ({error}); run it uncompiled"
            ) from None
        found: Tensor = _OPERATOR(self.op, self.format, given, tensors, like.detach())
        return found

    def called(self, args: Args, kwargs: Kwargs) -> Tensor:
        """Returns the function's result, one tensor; it gets copies, to which it may write."""
        found = self.function(*map(_copied, args), **{n: _copied(v) for n, v in kwargs.items()})
        if not isinstance(found, Tensor):
            raise OptionError(f"{self.name}: an op that is lowered returns one tensor")
        return found


def _run(op: str, format: str, given: str, tensors: list[Tensor], like: Tensor) -> Tensor:
    found = lowerings(op, format)
    lowering = found.get(like.device.type) or found.get(None)
    if lowering is None:
        raise OptionError(
            f"{op} in {format}: no function is registered any more; compile the model again"
        )
    args, kwargs = json.loads(
        given, object_hook=lambda value: tensors[value[_TENSOR]] if _TENSOR in value else value
    )
    with torch.no_grad(), without_casts():
        return lowering.called(tuple(args), kwargs).to(like.dtype, copy=True)


_OPERATOR: Any = None
if HAS_OPERATORS:  # else `convert` raises an error
    _OPERATOR = torch.library.custom_op("hmpx::lowered", _run, mutates_args=())
    _OPERATOR.register_fake(lambda op, format, given, tensors, like: torch.empty_like(like))

#: Key of a tensor's placeholder in a call that a graph stores as JSON.
_TENSOR: Final = "hmpx::tensor"


class _InPlaceOf(Rounded):
    drawn_as = "lowered op"


def _copied(value: Any) -> Any:
    return map_tensors(value, lambda tensor: tensor.detach().clone())


#: Operators whose first argument is the right-hand operand.
_REFLECTED: Final = frozenset(
    {"radd", "rdiv", "rfloordiv", "rmatmul", "rmod", "rmul", "rpow", "rsub", "rtruediv"}
)

# --- the registry ------------------------------------------------------------------------------


@exclusive
def register_op(
    fn: Function | OnCodes, op: str, format: str | Format, device_type: str | None = None
) -> None:
    """Makes ``fn`` compute an op in a number format.

    The op runs in the format if a list or a rule says so. The result of ``fn`` is rounded to the
    format; gradients are those of torch's own op. Registering again replaces the function.

    Args:
        fn: Takes the op's arguments, tensors rounded to the format, and returns one tensor. Or a
            result of ``create_lower_func``.
        op: Op name, as in the lists.
        format: The format, or its name.
        device_type: Limits this to tensors on such devices; None for all device types without their own
            function.

    Raises:
        OptionError: The op, the format or the device type is unknown, or ``fn`` can't be called.

    Example:
        >>> hmpx.formats.register(hmpx.formats.Fixed("q4_4", integer_bits=4, fraction_bits=4))
        >>> def mul(a, b):  # like hardware that truncates
        ...     return hmpx.formats.quantize(a * b, "q4_4", rounding="toward_zero")
        >>> hmpx.formats.register_op(mul, "mul", "q4_4")
        >>> policy = hmpx.Policy.from_ops(low=["mul"], low_precision_type="q4_4")
        >>> with hmpx.convert(policy=policy, device_types={"cpu"}):
        ...     torch.tensor([0.3125]) * torch.tensor([0.875])
        tensor([0.2500])
        >>> hmpx.formats.unregister("q4_4")
    """
    spelling = arguments.text("op", op, "an op name")
    name = ops.resolve(spelling)
    if name is None:
        raise OptionError(ops.unknown(spelling))
    known = get(format)
    if not callable(fn) and not isinstance(fn, OnCodes):
        raise OptionError(f"register_op takes a function, not {shown(fn)}")
    if device_type is not None:
        device_type = tensors.parse_device_type("device_type", device_type)
    if isinstance(fn, OnCodes) and isinstance(known, Scaled) and known.history is not None:
        raise OptionError(
            f"format {known.name}: codes have the tensor's own scale, and not that of its history; give "
            "register_op a function of values"
        )
    function = _on_values(fn, known) if isinstance(fn, OnCodes) else fn
    lowering = Lowering(function, name, known.name, isinstance(fn, OnCodes))
    key, lowerings = (name, known.name), LOWERINGS.value
    LOWERINGS.change({**lowerings, key: {**lowerings.get(key, {}), device_type: lowering}})


def create_lower_func(function: str | Function) -> OnCodes:
    """Prepares a function that works on integer codes for `register_op`.

    The function is called with the op's arguments, with each floating-point tensor encoded by
    `formats.encode` (uint8 or uint16), and returns codes, which are decoded. Named after TVM's function.

    Args:
        function: The function, or its import path: ``"package.module:function"``.

    Raises:
        OptionError: The function does not exist.

    Example:
        >>> hmpx.formats.register(hmpx.formats.Fixed("q4_4", integer_bits=4, fraction_bits=4))
        >>> negated = hmpx.formats.create_lower_func(lambda codes: (256 - codes.int()).to(torch.uint8))
        >>> hmpx.formats.register_op(negated, "neg", "q4_4")
        >>> policy = hmpx.Policy.from_ops(low=["neg"], low_precision_type="q4_4")
        >>> with hmpx.convert(policy=policy, device_types={"cpu"}):
        ...     -torch.tensor([0.5, -2.0])
        tensor([-0.5000,  2.0000])
        >>> hmpx.formats.unregister("q4_4")
    """
    if isinstance(function, str):
        module, _, name = function.partition(":")
        try:
            found = getattr(importlib.import_module(module), name)
        except raised_here(
            Exception
        ) as error:  # importing runs the module, which may raise anything
            raise OptionError(
                f"no function {shown(function)} (package.module:function): {said_by(error)}"
            ) from error
        function = found
    if not callable(function):
        raise OptionError(f"create_lower_func takes a function or its name, not {shown(function)}")
    return OnCodes(function)


def lowerings(op: str, format: str) -> Mapping[str | None, Lowering]:
    """Returns device type -> the function that computes ``op`` in the format of that name.

    Operators without their own function use that of their op, reflected ones with swapped operands.
    """
    own = LOWERINGS.value.get((op, format))
    if own is not None:
        return dict(own)
    found = LOWERINGS.value.get((ops.root(op), format), {})
    return {
        device_type: replace(
            known, op=op, function=_swapped(known.function) if op in _REFLECTED else known.function
        )
        for device_type, known in found.items()
    }


def _swapped(function: Function) -> Function:
    return lambda a, b, *args, **kwargs: function(b, a, *args, **kwargs)


@exclusive
def unregister(name: str) -> None:
    """Removes a registered format, and the functions that compute ops in it.

    The current conversion continues to round to the format; torch computes the ops from then on.

    Raises:
        OptionError: No format has that name, or it is built into hmpx.

    Example:
        >>> hmpx.formats.register(hmpx.formats.Fixed("q4_4", integer_bits=4, fraction_bits=4))
        >>> hmpx.formats.unregister("q4_4")
        >>> "q4_4" in hmpx.formats.names()
        False
    """
    change_together(
        (number_formats.FORMATS_BY_NAME, number_formats.without(name)), (LOWERINGS, _without(name))
    )


def _without(format: str) -> Lowerings:
    known = LOWERINGS.value
    kept = {key: lowerings for key, lowerings in known.items() if key[1] != format}
    return known if len(kept) == len(known) else kept


def _on_values(fn: OnCodes, format: Format) -> Callable[..., Tensor]:
    if isinstance(format, Custom):
        raise OptionError(
            f"format {format.name} has no codes; give register_op a function of values"
        )

    def code(tensor: Tensor) -> Any:
        return encode(tensor, format) if tensor.is_floating_point() else tensor

    def function(*args: Any, **kwargs: Any) -> Tensor:
        given = [map_tensors(value, code) for value in args]
        named = {name: map_tensors(value, code) for name, value in kwargs.items()}
        codes = fn.function(*given, **named)
        return decode(codes, format)

    return function
