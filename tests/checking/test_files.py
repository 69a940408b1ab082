"""Contracts and checkpoints on the command line, and the fixture for pytest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hmpx.cli import main
from tests.upstream_bugs import drawn

pytest_plugins = ["pytester"]


def saved(path: Path, **tensors: torch.Tensor) -> str:
    torch.save(tensors, path)
    return str(path)


def test_two_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weight, bias = drawn(64, 64), drawn(64)
    before = saved(
        tmp_path / "a.pt", gate=weight, bias=bias, old=bias, shape=bias, ids=torch.ones(3)
    )
    after = saved(
        tmp_path / "b.pt",
        gate=weight.to(torch.bfloat16).float(),
        bias=bias.half(),
        new=bias,
        shape=bias[:3],
        ids=torch.ones(3),
    )
    assert main(["check", "--state", before, after]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "old: missing afterwards",
        "new: new",
        "gate: still float32, but its contents were float32 and are bfloat16",
        "bias: float32 became float16",
        "shape: shape (64,) became (3,)",
    ]
    assert main(["check", "--state", before, before]) == 0
    assert main(["check", "--state", before, str(tmp_path / "c.pt")]) == 2
    (tmp_path / "c.pt").write_text("no state dict")
    assert main(["check", "--state", before, str(tmp_path / "c.pt")]) == 2
    assert "c.pt: not a state dict" in capsys.readouterr().err


def test_contracts_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "contract.yaml"
    file.write_text("expect:\n- op: softmax\n  compute: float32\n")
    assert main(["check", str(file)]) == 0
    assert capsys.readouterr().out == "1 contract, 1 line: no faults\n"
    file.write_text("expect:\n- op: softmaxx\n  compute: float32\n")
    assert main(["check", str(file)]) == 1
    assert capsys.readouterr().out == f"{file}:2: unknown op 'softmaxx'; did you mean 'softmax'?\n"


def test_the_fixture_holds_a_test_to_a_contract(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import torch

        def step(dtype):
            torch.ones(2, 2, dtype=dtype).softmax(-1)

        def test_kept(hmpx_expect):
            hmpx_expect({"expect": [{"op": "softmax", "compute": "float32"}]})
            step(torch.float32)

        def test_broken(hmpx_expect):
            hmpx_expect({"expect": [{"op": "softmax", "compute": "float32"}]})
            step(torch.bfloat16)
        """
    )
    pytester.makeconftest("from hmpx_pytest import hmpx_expect")
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*softmax (*) computed in bfloat16, expected float32*"])
