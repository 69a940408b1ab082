"""The lists that repeat torch.autocast's policy, against the installed torch.

What the lists say is compared with torch's header (CUDA) and dispatcher (CPU); what they do, with
the cases of torch's own autocast tests and with torch.autocast itself, which runs on fake tensors
where there is no GPU.
"""

from __future__ import annotations

import contextlib
import functools
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # imported by torch itself at some first calls, which would look like a patch
import torch._inductor
from torch import Tensor
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists

import hmpx
from tests.conftest import NAMESPACES
from tests.values import tensors

LISTS = Path(__file__).parents[2] / "lists"
HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"

#: torch.autocast grows from release to release: the lists hold what this one has.
WRITTEN_FOR = (2, 13)
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

KINDS = ("bf16", "fp32", "widest")

#: Asks the installed torch; it also wrote what each torch registers.
ASKED = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "autocast_lists.py"))

#: Ops in torch.autocast's policy that no Python callable reaches, so that no list can hold them.
UNCALLABLE = {
    "_thnn_fused_gru_cell": "called by gru_cell in C++ only",
    "_thnn_fused_lstm_cell": "called by lstm_cell in C++ only",
    "mkldnn_rnn_layer": "called by lstm in C++ only",
    "multilabel_margin_loss_forward": "called by multilabel_margin_loss in C++ only",
}


pytestmark = pytest.mark.filterwarnings("ignore", "error::hmpx.HmpxWarning")


def listed(device_type: str, kind: str) -> dict[str, str]:
    """Returns op -> the reason beside it, ``""`` for a line that is torch.autocast's own."""
    text = (LISTS / f"autocast-{device_type}" / f"{kind}.txt").read_text()
    found = (line.partition("#") for line in text.splitlines() if not line.startswith("#"))
    lines = ((*content.partition(";")[::2], reason.strip()) for content, _, reason in found)
    return {name.strip(): reason for name, condition, reason in lines if holds(condition)}


def holds(condition: str) -> bool:
    """Whether what a line says of torch's version, ``"torch >= 2.14"``, is so here."""
    if not condition:
        return True
    _, sign, version = condition.split()
    is_newer = tuple(int(part) for part in version.split(".")) <= TORCH
    return is_newer if sign == ">=" else not is_newer


def own(device_type: str, kind: str) -> set[str]:
    """Returns the lines that are torch.autocast's own."""
    return {name for name, reason in listed(device_type, kind).items() if not reason}


def assert_same_names(expected: dict[str, set[str]], device_type: str) -> None:
    """Compares torch's names by kind with the lists'; collects all differences."""
    faults = []
    for kind in KINDS:
        known = expected[kind] - UNCALLABLE.keys()
        faults += [f"{kind}.txt lacks {name}" for name in known - own(device_type, kind)]
        if TORCH >= WRITTEN_FOR:
            faults += [f"{kind}.txt has {name}" for name in own(device_type, kind) - known]
    assert not faults, "\n".join(sorted(faults))


# --- what the lists say --------------------------------------------------------------------------


@pytest.mark.skipif(
    not HEADER.is_file() or next(iter(ASKED["MACROS"])) not in HEADER.read_text(),
    reason="this torch ships without the header, or with one that does not list the ops",
)
def test_cuda_lists_are_those_of_the_header() -> None:
    """Each macro's ops are in the list of its kind, and the lists hold no others."""
    found = ASKED["of_header"]()
    expected: dict[str, set[str]] = {kind: found[kind.replace("bf16", "low")] for kind in KINDS}
    assert all(expected.values())
    assert_same_names(expected, "cuda")


def test_cpu_lists_are_what_the_dispatcher_has() -> None:
    """Each op registered for torch.autocast on the CPU is in the list that its casts ask for."""
    found = ASKED["of_cpu"]()
    expected: dict[str, set[str]] = {kind: found[kind.replace("bf16", "low")] for kind in KINDS}
    # Of some overloads no arguments are made here that reach the casts.
    assert not found[""] - set.union(*expected.values())
    assert_same_names(expected, "cpu")


# --- what the lists do ---------------------------------------------------------------------------

#: Groups of torch's test cases -> the kind of list that they test; "" for ops in no list.
GROUPS = {
    "torch_16": "bf16",
    "torch_fp16": "bf16",
    "nn_16": "bf16",
    "nn_fp16": "bf16",
    "linalg_fp16": "bf16",
    "methods_fp16": "bf16",
    "torch_fp32": "fp32",
    "nn_fp32": "fp32",
    "methods_fp32": "fp32",
    "torch_need_autocast_promote": "widest",
    "torch_expect_builtin_promote": "",
    "methods_expect_builtin_promote": "",
    "banned": "fp32",
}

#: Cases of torch's tests in which hmpx does something else, on the CPU: device list, group, op.
DEVIATIONS = {
    ("cuda", "torch_fp16", "cudnn_convolution"): "no name in the header, and no kernel on the CPU",
    ("cuda", "torch_fp16", "cudnn_convolution_transpose"): "as cudnn_convolution",
    ("cuda", "torch_fp16", "einsum"): "torch's case has operands that do not suit its equation",
    ("cuda", "torch_expect_builtin_promote", "equal"): "gives a bool, which has no dtype",
    (
        "cpu",
        "torch_16",
        "addbmm",
    ): "computes in fp32, since torch's sum over the batch stops growing",
}

CASE_LISTS = {"cuda": AutocastTestLists, "cpu": AutocastCPUTestLists}
LOW = torch.bfloat16
LOW_DTYPES = (LOW, torch.float16)


@functools.cache
def policy(device_type: str, low: torch.dtype) -> hmpx.Policy:
    """Returns the policy that a set's lists make."""
    return hmpx.load_policy(lists=f"autocast-{device_type}", low_precision_type=low)


def outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Tensor] | str:
    """Returns the tensors that a call returns, or its error's text."""
    try:
        with torch.no_grad():
            return list(tensors(function(*args, **kwargs)))
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"


def dtypes(result: list[Tensor] | str) -> Any:
    """Returns the dtypes of an `outcome`."""
    return result if isinstance(result, str) else [t.dtype for t in result]


def cases(device_type: str) -> list[Any]:
    """Returns (group, op, call, expected dtype) for each of torch's cases and each way to call it.

    ``call(low)`` makes the call with arguments for that low-precision type.
    """
    found = []
    lists = CASE_LISTS[device_type](torch.device("cpu"))
    for group, kind in GROUPS.items():
        for index, (op, *rest) in enumerate(getattr(lists, group, ())):
            calls = [part for part in rest if isinstance(part, tuple)]
            kwargs = next((part for part in rest if isinstance(part, dict)), {})
            expected = next((part for part in rest if isinstance(part, torch.dtype)), None)
            if op == "einsum":
                calls = [(rest[0], *calls[0])]
            namespaces = ["torch.Tensor"]
            if not group.startswith("methods"):
                namespaces += ["torch._C._nn" if group.startswith(("nn", "banned")) else "torch"]
            for namespace in namespaces:
                if not hasattr(NAMESPACES[namespace], op):
                    continue

                def call(
                    low: torch.dtype,
                    op: str = op,
                    namespace: str = namespace,
                    calls: list[Any] = calls,
                    kwargs: dict[str, Any] = kwargs,
                ) -> list[Tensor] | str:
                    # With two tuples of arguments the second is meant for float16.
                    args = calls[-1] if low is torch.float16 else calls[0]
                    return outcome(getattr(NAMESPACES[namespace], op), *args, **kwargs)

                name = f"{group}-{index}-{namespace.removeprefix('torch.')}.{op}"
                found.append(pytest.param(group, op, call, expected or kind, id=name))
    return found


@pytest.mark.sampled(10)
@pytest.mark.parametrize("low", LOW_DTYPES, ids=["bf16", "fp16"])
@pytest.mark.parametrize(("group", "op", "call", "expected"), cases("cuda"))
def test_cuda_case_gives_the_dtype_that_torch_expects(
    group: str, op: str, call: Any, expected: Any, low: torch.dtype
) -> None:
    """The cases of torch's autocast tests give under the lists, on the CPU, what their group says."""
    with hmpx.convert(policy=policy("cuda", low), device_types={"cpu"}):
        actual = call(low)
    dtype = {"bf16": low, "fp32": torch.float32, "widest": torch.float32}.get(expected, expected)
    deviates = isinstance(actual, str) or {t.dtype for t in actual} != {dtype}
    assert deviates == (("cuda", group, op) in DEVIATIONS), (dtypes(actual), dtype)


@pytest.mark.sampled(8)
@pytest.mark.native
@pytest.mark.parametrize("low", LOW_DTYPES, ids=["bf16", "fp16"])
@pytest.mark.parametrize(("group", "op", "call", "expected"), cases("cpu"))
def test_cpu_case_equals_torch_autocast(
    group: str, op: str, call: Any, expected: Any, low: torch.dtype
) -> None:
    """The cases of torch's autocast tests give under the lists what torch.autocast gives, exactly."""
    with torch.autocast("cpu", low):
        wanted = call(low)
    with hmpx.convert(policy=policy("cpu", low), device_types={"cpu"}):
        actual = call(low)
    deviates = dtypes(actual) != dtypes(wanted) or (
        not isinstance(actual, str)
        and not all(torch.equal(a, b) for a, b in zip(actual, wanted, strict=True))
    )
    assert deviates == (("cpu", group, op) in DEVIATIONS), (actual, wanted)


# --- ops inside which torch.autocast casts -------------------------------------------------------


@contextlib.contextmanager
def autocast(device_type: str) -> Iterator[None]:
    """Switches torch.autocast on, for fake tensors of an absent device too."""
    torch.set_autocast_dtype(device_type, torch.bfloat16)
    torch.set_autocast_enabled(device_type, True)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, False)
        torch.clear_autocast_cache()
