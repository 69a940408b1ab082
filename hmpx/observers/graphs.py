"""Calls in compiled graphs: an operator in the graph passes on their tensors each time that it runs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ..ops import draws
from ..tensors import SEQUENCES, Args, Kwargs, long_name, tensors_in
from ..torch_internals import effectful_operator, is_in_subgraph, tracing_context, transforms
from ..torch_state import apart
from .attached import ATTACHED, PAUSED, Attached
from .op_calls import CallTensors, OpCall, is_users

#: The calls that graphs hold by number, for each observer that gets their tensors.
_CALLS: Final[weakref.WeakKeyDictionary[Attached, dict[int, OpCall]]] = weakref.WeakKeyDictionary()
_numbers: Final = itertools.count()


def is_put_in_graph() -> bool:
    """Whether AOTAutograd is tracing a call of a compiled function, outside of branches and transforms."""
    return (
        tracing_context() is not None
        and "stack_trace" in torch.fx.traceback.get_current_meta()
        and not (torch.compiler.is_exporting() or transforms() or is_in_subgraph())
    )


def number_in_graphs(call: OpCall, attached: Sequence[Attached]) -> int:
    """Returns a new number for a call that torch.compile is tracing, which it gets its line from."""
    number = next(_numbers)
    text = torch.fx.traceback.get_current_meta().get("stack_trace")
    frames = (
        re.findall(r'File "(.*?)", line (\d+)', text)
        if text
        else [(each.filename, each.lineno) for each in tracing_context().extract_stack()]
    )
    if lines := [f"{path}:{line}" for path, line in frames if is_users(path)]:
        call = dataclasses.replace(call, location=lines[-1])
    for each in attached:
        if each.graphs:
            _CALLS.setdefault(each, {})[number] = call
    return number


def put_in_graph(number: int, args: Args, kwargs: Kwargs, writes: bool, result: Any) -> None:
    """Puts the operator behind a call."""
    given, ints, floats = list[Tensor](), list[int](), list[float]()
    text = json.dumps(_emptied([args, kwargs], given, ints, floats))
    results = tensors_in([result])
    if all(not each.is_nested for each in (*given, *results)):  # no kernel takes these
        _CALL(number, text, given, ints, floats, results, writes)


def _tell(  # noqa: PLR0917  # as its signature
    number: int,
    text: str,
    given: Sequence[Tensor],
    ints: Sequence[int],
    floats: Sequence[float],
    results: Sequence[Tensor],
    writes: bool,
) -> None:
    """Passes on the tensors of a call when its graph runs."""
    for each in ATTACHED.value:
        call = _CALLS.get(each, {}).get(number)
        if call is None or each in PAUSED:  # not of an earlier observer, whose graph lives on
            continue
        args, kwargs = _filled(json.loads(text), iter(given), iter(ints), iter(floats))
        run = functools.partial(_run, call, is_whole='"other"' not in text)
        tensors = CallTensors(args, kwargs, args, kwargs, run, run, results, writes, in_graph=True)
        with apart():
            each.tell(call, tensors)


def _run(call: OpCall, /, *args: Any, is_whole: bool, **kwargs: Any) -> Any:
    if not is_whole or draws(call.op):
        raise ValueError(f"{call.op} in a compiled graph can't be repeated with the same arguments")
    with apart():
        return call.function(*args, **kwargs)


_CALL: Final = effectful_operator(
    "call(int number, str text, Tensor[] given, SymInt[] ints, float[] floats, Tensor[] results, bool writes) -> ()",
    _tell,
)

#: Stands for an argument that graphs can't hold.
_OTHER: Final = object()


def _emptied(value: Any, given: list[Tensor], ints: list[Any], floats: list[float]) -> Any:
    """Returns arguments as JSON can hold them, without tensors and numbers, which may be symbols."""
    if isinstance(value, Tensor):
        given.append(value)
        return {"tensor": 0}
    if isinstance(value, SEQUENCES):
        items = [_emptied(each, given, ints, floats) for each in value]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {"dict": {k: _emptied(v, given, ints, floats) for k, v in value.items()}}
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, torch.SymInt)):
        ints.append(value)
        return {"int": 0}
    if isinstance(value, float):
        floats.append(value)
        return {"float": 0}
    return {"dtype": long_name(value)} if isinstance(value, torch.dtype) else {"other": 0}


def _filled(
    value: Any, given: Iterator[Tensor], ints: Iterator[int], floats: Iterator[float]
) -> Any:
    if isinstance(value, list):
        return [_filled(each, given, ints, floats) for each in value]
    if not isinstance(value, dict):
        return value
    kind, inner = next(iter(value.items()))
    if kind == "tuple":
        return tuple([_filled(each, given, ints, floats) for each in inner])
    if kind == "dict":
        return {name: _filled(each, given, ints, floats) for name, each in inner.items()}
    if kind == "dtype":
        return getattr(torch, inner)
    return next({"tensor": given, "int": ints, "float": floats}.get(kind, iter([_OTHER])))
