"""What the log says decided a call, and the lines that HMP printed."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hmpx

BF16 = torch.bfloat16
X = torch.ones(2, 2)
LOW = X.to(BF16)


def logged(call: Callable[[], object], caplog: pytest.LogCaptureFixture, **options: object) -> str:
    """Returns the one line that a call's decision is logged in."""
    caplog.clear()
    policy = options or {"lists": "hmp"}
    with (
        caplog.at_level("INFO", "hmpx"),
        hmpx.convert(isVerbose="once", legalize="never", device_types={"cpu"}, **policy),  # type: ignore[arg-type]
    ):
        call()
    (line,) = caplog.messages
    return re.sub(r"  at .*", "", line.removeprefix("casting  "))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda: F.relu(X.clone(), inplace=True), "relu(fp32)  to_fp32  TARGET by in-place rule"),
        (lambda: LOW.clone().__iadd__(X), "iadd(bf16, fp32)  to_bf16  TARGET by in-place rule"),
        (lambda: X.clone().div_(LOW), "div(fp32, bf16)  to_fp32  TARGET by in-place rule"),
        (lambda: torch.mm(X, X, out=X.clone()), "mm(fp32, fp32)  to_fp32  TARGET by out= rule"),
        (lambda: torch.add(X, LOW, out=X.clone()), "add(fp32, bf16)  to_fp32  TARGET by out= rule"),
        (lambda: torch.mm(X.double(), X.double()), "mm(fp64, fp64)  as_is  PASS by its fp64 input"),
        (
            lambda: torch.div(LOW, torch.tensor(2.0).double()),
            "div(bf16, fp64)  to_fp32  FP32 by lists/hmp/fp32.txt:5",
        ),
        (
            lambda: torch.mm(X.to_sparse(), LOW),
            "mm(fp32, bf16)  to_fp32  FIRST by its sparse input",
        ),
        (lambda: torch.mm(X, X), "mm(fp32, fp32)  to_bf16  LOW by lists/hmp/bf16.txt:22"),
        (lambda: X @ X, "matmul(fp32, fp32)  to_bf16  LOW by lists/hmp/bf16.txt:21"),
    ],
)
def test_the_log_names_what_decided(
    call: Callable[[], object], line: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The line of a list only where that did; else the rule before it."""
    assert logged(call, caplog) == line


def test_the_log_names_rules_and_sections(caplog: pytest.LogCaptureFixture) -> None:
    """With the function, or the section's place."""
    section = {"low": ["mm"], "sections": [{"mode": "eval", "fp32": ["mm"]}]}

    def evaluated() -> None:
        model = torch.nn.Module()
        model.forward = lambda: torch.mm(LOW, LOW)  # type: ignore[method-assign]
        model.eval()()

    assert "FP32 by " in logged(evaluated, caplog, policy=section)
    hmpx.register_rule("mm", keep_fp32)
    try:
        line = logged(lambda: torch.mm(LOW, LOW), caplog)
        assert line.startswith("mm(bf16, bf16)  to_fp32  FP32 by ") and "keep_fp32" in line
    finally:
        hmpx.unregister_rule("mm")


def keep_fp32(call: object) -> hmpx.CastPolicy:
    """Decides that an op runs in float32."""
    return hmpx.DENY


def printed(program: Callable[[], object], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Returns the lines that a program prints in HMP's style, addresses left out."""
    with hmpx.convert(lists="hmp", isVerbose="hmp", legalize="never", device_types={"cpu"}):
        program()
    return re.sub(r" at 0x\w+", "", capsys.readouterr().out).splitlines()


def test_hmps_lines_are_printed_as_hmp_did(capsys: pytest.CaptureFixture[str]) -> None:
    """With its spaces, for the ops that it knew of, at each call."""

    @hmpx.disable_casts()
    def unconverted() -> torch.Tensor:
        return torch.mm(X, X)

    def program() -> None:
        for _ in range(2):
            torch.mm(X, X)
        LOW.softmax(-1)
        torch.cat([X, LOW])
        X.clone().add_(LOW)
        torch.lerp(X, LOW, 0.5)  # in no list of HMP's
        with hmpx.disable_casts():
            torch.mm(X, X)
        unconverted()
        parameter = torch.nn.Parameter(X.clone())
        optimizer = torch.optim.SGD([parameter], lr=0.1)  # switches casts off without being asked
        torch.nn.utils.clip_grad_norm_([parameter], 1.0)
        optimizer.step()

    assert printed(program, capsys) == [
        "hmp:verbose_mode  True",
        "hmp:opt_level O1",
        "casting  <built-in method mm of type object> to_bf16",
        "casting  <built-in method mm of type object> to_bf16",
        "casting  <method 'softmax' of 'torch._C.TensorBase' objects> to_fp32",
        "casting  <built-in method cat of type object>  to  to_fp32",
        "casting  <method 'add_' of 'torch._C.TensorBase' objects>  to  to_fp32",
        "Disabled HMP casting",
        "Enabled HMP casting",
        "Disabled HMP casting",
        "Enabled HMP casting",
    ]


def test_nothing_is_announced_after_revert(capsys: pytest.CaptureFixture[str]) -> None:
    """Nor by conversions in other styles; an exception is announced, too."""
    with pytest.raises(ZeroDivisionError):
        printed(lambda: raising(), capsys)
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "Disabled HMP casting",
        "Enabled HMP casting",
    ]
    with hmpx.disable_casts():
        pass
    with hmpx.convert(device_types={"cpu"}), hmpx.disable_casts():
        pass
    assert capsys.readouterr().out == ""


def raising() -> None:
    """Leaves a block without casts by an exception."""
    with hmpx.disable_casts():
        raise ZeroDivisionError


def test_lines_escape_names_of_modules(caplog: pytest.LogCaptureFixture) -> None:
    """One call is one printable line, whatever a module is called."""
    model = nn.Sequential()
    model.add_module("\x1b[2J\r\nforged", nn.Linear(4, 4))
    with (
        caplog.at_level("INFO", "hmpx"),
        hmpx.convert(isVerbose="once", device_types={"cpu"}),
    ):
        model(torch.ones(2, 4))
    assert caplog.messages
    assert all(message.isprintable() for message in caplog.messages)
