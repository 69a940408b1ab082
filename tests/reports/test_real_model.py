"""A report of a model that ran: all views of it together."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import hmpx
from hmpx.reports import Report, read_json


class Block(nn.Module):
    """Products in low precision, a softmax in fp32 between them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.softmax(self.fc1(x), -1))


def recorded() -> Report:
    policy = hmpx.Policy.from_ops(low=["linear"], fp32=["softmax"])
    model = nn.Sequential(Block(), Block())
    with (
        torch.no_grad(),
        hmpx.convert(policy=policy, device_types={"cpu"}),
        hmpx.record(times=True) as rec,
    ):
        model(torch.ones(4, 8))
    return rec.report()


def test_a_run_can_be_looked_at_in_every_way(tmp_path: Path) -> None:
    report = recorded()
    assert [group.key for group in report.by_op()] == [
        ("linear", "forward", "float32", "bfloat16", "bfloat16"),
        ("linear", "forward", "bfloat16, float32", "bfloat16", "bfloat16"),
        ("softmax", "forward", "bfloat16", "float32", "float32"),
    ]
    assert str(report).startswith("100 % of FLOPs, ")
    assert [line.split()[:4] for line in str(report).splitlines()[-3:]] == [
        ["linear", "fp32", "bf16", "bf16"],
        ["linear", "bf16+fp32", "bf16", "bf16"],
        ["softmax", "bf16", "fp32", "fp32"],
    ]
    assert {group.key for group in report.by_module()} == {
        ("0",), ("0.fc1",), ("0.fc2",), ("1",), ("1.fc1",), ("1.fc2",)
    }  # fmt: skip
    report.to_json(tmp_path / "report.json")
    assert read_json(tmp_path / "report.json") == report
    page = report.to_html()
    assert "return self.fc2(torch.softmax(self.fc1(x), -1))" in page
    assert '<tr id="line-0-' in page and 'class="mixed"' in page
    assert len(report.to_csv().splitlines()) == 1 + len(report.rows)
