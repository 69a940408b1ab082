"""The text of generated wrappers, kept beside the tests so that it can be read and reviewed.

After a change on purpose: ``HMPX_WRITE_GOLDEN=1 python -m pytest tests/casting/test_generated_source.py``.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import hmpx
from hmpx import Policy, ops
from hmpx.casting import CallPlan, Options, facts_of, site_of, source
from hmpx.casting.source import source_of

GOLDEN = Path(__file__).with_name("golden")

#: Op -> the list it is in.
LISTED = {
    "linear": "low",
    "conv2d": "low",
    "layer_norm": "low",
    "softmax": "fp32",
    "cat": "widest",
}


def plan(op: str, **options: Any) -> CallPlan:
    """Returns the plan of an op's first call site that is not Python's."""
    site = next(each for each in ops.table()[op].sites if not each.is_python)
    decision = Policy.from_ops(**{LISTED[op]: [op]}).decisions[op]
    call_site = site_of(op, site, None, is_overridable=True)
    return CallPlan(call_site, facts_of(op), decision, frozenset({"cpu"}), Options(**options))


@pytest.mark.parametrize("op", LISTED)
def test_the_source_is_as_kept(op: str) -> None:
    path, actual = GOLDEN / f"{op}.py.txt", source_of(plan(op)).lstrip()
    if os.environ.get("HMPX_WRITE_GOLDEN"):
        path.write_text(actual, encoding="utf-8")
    assert actual == path.read_text(encoding="utf-8")
    assert len(actual.splitlines()) <= 70
    assert max(map(len, actual.splitlines())) <= 120


def test_the_source_with_compiled_nodes() -> None:
    """They come ahead of all else."""
    without = source_of(plan("linear")).splitlines()
    added = source_of(plan("linear"), has_nodes=True).splitlines()
    first = next(n for n, line in enumerate(added) if line != without[n])
    assert without[first - 1].strip() == "try:"
    assert [line.strip() for line in added[first : first + 4]] == [
        "if not (open_regions or is_dynamo_compiling() or (nodes := control.nodes) is None):",
        "result = nodes(a0, a1, a2, *rest, **kwargs)",
        "if result is not None:",
        "return result",
    ]
    assert added[:first] + added[first + 4 :] == without


def test_the_source_with_casts_made_together() -> None:
    """By compiled nodes; their fallback are the same casts one by one."""
    options = {"keep_weight_casts": True}
    without = source_of(plan("conv2d", **options)).splitlines()
    added = source_of(plan("conv2d", **options), is_fused=True).splitlines()
    first = next(n for n, line in enumerate(added) if line != without[n])
    assert [line.strip() for line in added[first : first + 7]] == [
        "together = None if is_dynamo_compiling() else fused(a0, a1, a2)",
        "if together is not None:",
        "b0, b1, b2 = together",
        "else:",
        *[line.strip() for line in without[first : first + 3]],
    ]
    assert added[first + 7 :] == without[first + 3 :]


@pytest.mark.native
def test_the_source_is_shown_in_tracebacks() -> None:
    """By `linecache`, as that of any function."""
    with hmpx.convert(policy=Policy.from_ops(low=["softmax"])):
        lines, _ = inspect.getsourcelines(torch.softmax.__code__)
    assert lines[0].strip().startswith("def wrapper(a0=missing")
    assert any("original(" in line for line in lines)


def test_torch_compile_finds_all_names_of_the_source_in_its_module() -> None:
    """It looks up globals of a function in the module that they name."""
    # Python and Dynamo add names of their own.
    ours = {name: value for name, value in source._GLOBALS.items() if name[:2] != "__"}
    assert {name: vars(source).get(name) for name in ours} == ours
