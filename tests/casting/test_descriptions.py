"""What is said of a call is remembered by the kinds of its arguments; it is always what a new one says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hmpx
from hmpx import Attached, OpCall

Program = Callable[[], Any]


def x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


LOW, WIDE = torch.bfloat16, torch.float64
EYE = torch.eye(2)

#: Site -> calls of it whose descriptions differ, or whose inputs are in other places.
CALLS: dict[str, list[Program]] = {
    "mul": [
        lambda: torch.mul(EYE, EYE),
        lambda: torch.mul(x(2), x(2, dtype=LOW)),
        lambda: torch.mul(x(2, dtype=LOW), x(2)),
        lambda: torch.mul(x(2, dtype=LOW), x(dtype=WIDE)),
        lambda: torch.mul(x(2, dtype=LOW), x(2, dtype=WIDE)),
        lambda: torch.mul(x(2), 2),
        lambda: torch.mul(x(2), other=x(2)),
        lambda: torch.mul(x(2), x(2), out=x(2)),
        lambda: torch.mul(x(2, dtype=LOW), x(2), out=x(2, dtype=LOW)),
        lambda: torch.mul(torch.arange(2), x(2)),
        lambda: torch.mul(torch.arange(2), torch.arange(2)),
    ],
    "linear": [
        lambda: F.linear(EYE, EYE, EYE[0]),
        lambda: F.linear(x(2, 2, dtype=LOW), x(2, 2), None),
        lambda: F.linear(x(2, 2), bias=x(2, dtype=LOW), weight=x(2, 2, dtype=LOW)),
        lambda: F.linear(x(2, 2), weight=x(2, 2), bias=x(2)),
    ],
    "softmax": [
        lambda: F.softmax(x(2), 0),
        lambda: F.softmax(x(2), 0, dtype=LOW),
        lambda: F.softmax(x(2, dtype=LOW), 0, dtype=WIDE),
    ],
    "relu": [
        lambda: F.relu(x(2)),
        lambda: F.relu(x(2), inplace=True),
        lambda: F.relu(x(2), True),
        lambda: F.relu(x(2), 1),
        lambda: F.relu(x(2), 0),
    ],
    "cat": [
        lambda: torch.cat([EYE, EYE]),
        lambda: torch.cat((x(2, dtype=LOW), x(2))),
        lambda: torch.cat([x(2), x(2), x(2, dtype=LOW)]),
        lambda: torch.cat(tensors=[x(2)]),
    ],
    "einsum": [
        lambda: torch.einsum("i,i->", x(2), x(2, dtype=LOW)),
        lambda: torch.einsum("i,i->", [x(2, dtype=LOW), x(2)]),
    ],
    "batch_norm": [
        lambda: F.batch_norm(x(2, 2), None, None, training=True),
        lambda: F.batch_norm(x(2, 2), x(2), x(2), x(2), x(2), False),
        lambda: F.batch_norm(x(2, 2, dtype=LOW), x(2), x(2), x(2), x(2), True),
    ],
    "setitem": [
        lambda: x(2, 2).__setitem__(0, x(2)),
        lambda: x(2, 2, dtype=LOW).__setitem__((slice(None), 1), x(2)),
    ],
}


def described(programs: list[Program], *, anew: bool) -> list[tuple[Any, ...]]:
    """Returns what observers get of calls, all by one wrapper or each by a new one."""
    found: list[tuple[Any, ...]] = []

    def note(call: OpCall, inputs: list[Tensor], *_: Any) -> None:
        said = call.op, call.cast_policy, call.reason, call.dtype, call.input_dtypes
        given = [(each.dtype, tuple(each.shape)) for each in inputs]
        found.append((*said, call.cast_dtypes, call.output_dtypes, call.cast_bytes, given))

    groups = [[program] for program in programs] if anew else [programs]
    for group in groups:
        with Attached(note, every_op=True, values=True):  # replaces all wrappers
            for program in group:
                program()
                with hmpx.disable_casts(), contextlib.suppress(RuntimeError):  # of mixed dtypes
                    program()
    return found


@pytest.mark.usefixtures("no_search_for_early_names")
@pytest.mark.parametrize("site", CALLS)
def test_descriptions_do_not_depend_on_earlier_calls(site: str) -> None:
    programs = CALLS[site]
    with hmpx.convert(device_types={"cpu"}):
        expected = described(programs, anew=True)
        assert described([*programs, *programs], anew=False) == expected * 2
    assert len(expected) >= len(programs)


def test_a_paused_observer_gets_nothing_beside_others() -> None:
    first: list[str] = []
    second: list[str] = []
    with (
        hmpx.convert(device_types={"cpu"}),
        Attached(lambda call, *_: first.append(call.op), every_op=True, values=True) as paused,
        Attached(lambda call, *_: second.append(call.op), every_op=True, values=True),
    ):
        paused.pause()
        torch.mm(EYE, EYE)
        paused.resume()
        torch.exp(EYE)
    assert (first, second) == (["exp"], ["mm", "exp"])
