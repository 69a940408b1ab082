"""Retries calls of torch's operators, such as `torch.ops.aten.mm`, in fp32 where they reject mixed dtypes.

hmpx wraps functions above the operators, so operators are not cast. Their inputs may be fp32 and low then.
Calls in dispatch modes are not retried.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, Final

from ..compute import Callee, in_fp32, inputs_of, may_run_again, note_legalized
from ..patching import Draft, Patch
from ..tensors import Args, Kwargs
from ..torch_internals import OpOverload, OpOverloadPacket, dispatch_modes
from ..torch_state import has_casts, is_below_dispatcher

LOGGER: Final = logging.getLogger("hmpx")


def operator_patches(draft: Draft) -> Iterator[Patch]:
    """Yields the patches of how operators are called."""
    for kind in (OpOverload, OpOverloadPacket):
        yield Patch(kind, "__call__", _completed(draft.attribute(kind, "__call__")))


def _completed(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def complete(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(self, *args, **kwargs)
        except Exception as error:
            again = _retry(functools.partial(call, self), self, error, args, kwargs)
            if again is None:
                raise
        return again()  # here nothing holds the frames of the error

    return complete


def _retry(
    function: Callable[..., Any], operator: Any, error: Exception, args: Args, kwargs: Kwargs
) -> Callable[[], Any] | None:
    """Returns a function that computes the call in fp32; None if that is not why it failed."""
    # A graph that is traced would keep the call that failed.
    if dispatch_modes() or is_below_dispatcher() or not may_run_again(error):
        return None
    inputs = inputs_of(args, kwargs)
    if inputs is None or inputs.low is None or not has_casts(inputs.low.device.type):
        return None
    is_one = isinstance(operator, OpOverload)
    overloads = [operator] if is_one else [getattr(operator, n) for n in operator.overloads()]
    arguments = [each for overload in overloads for each in overload._schema.arguments]
    names = [each.name for each in overloads[0]._schema.arguments if not each.kwarg_only]
    writes = {each.name for each in arguments if each.alias_info and each.alias_info.is_write}
    callee = Callee(str(operator), function, tuple(names), frozenset(writes), False, False)
    note_legalized()
    _log(callee.op)
    return functools.partial(in_fp32, callee, args, kwargs, inputs.first.dtype)


@functools.cache
def _log(operator: str) -> None:
    LOGGER.info("%s computes in fp32: it refuses the dtypes of its inputs", operator)
