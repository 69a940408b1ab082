"""`Report.policy`: a run under torch.autocast as a policy, and files with its types."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hmpx

pytest.importorskip("onnxscript")


#: Op -> its node.
NODES = {
    "linear": "Gemm", "matmul": "MatMul", "add": "Add", "layer_norm": "LayerNormalization", "softmax": "Softmax",
    "relu": "Relu", "cat": "Concat",
}  # fmt: skip


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(self.norm(x + self.inner(x)))
        return torch.cat([F.softmax(logits @ logits.mT @ logits, -1), logits.relu() + 1], -1)


class Pair(nn.Module):
    """The second block computes in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        found = self.first(x).float()
        with torch.autocast("cpu", enabled=False):
            return self.second(found)


def recorded(model: nn.Module, x: Tensor, low: torch.dtype) -> tuple[hmpx.record, Any]:
    with (
        hmpx.convert(policy={"lists": "none"}, device_types={"cpu"}),
        hmpx.record() as rec,
        torch.autocast("cpu", low),
        torch.no_grad(),
    ):
        return rec, model(x)


@pytest.mark.parametrize(("make", "low"), [(Block, torch.bfloat16), (Pair, torch.float16)])
def test_nodes_have_the_types_of_the_run(
    make: type[nn.Module], low: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(3, 8)
    rec, expected = recorded(model, x, low)
    policy = rec.policy()
    assert policy.low_precision_type is low
    with hmpx.convert(policy=policy, device_types={"cpu"}), torch.no_grad():
        assert torch.equal(model(x), expected)
    found = hmpx.export(model, x, tmp_path / "m.onnx", policy=policy, outputs="keep", verify=True)
    assert found.faults == ()
    ran = Counter[tuple[str, str]]()
    for row in rec.rows:
        ran[NODES.get(row.op, ""), row.dtype] += row.calls
    written = Counter((node.op_type, node.dtype) for node in found.nodes)
    assert {each: n for each, n in written.items() if each[0] in {*NODES.values()}} == {
        each: n for each, n in ran.items() if each[0]
    }
    assert all(node.error is None or node.error <= 2 for node in found.nodes)


def test_two_types_in_one_module_are_named() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            low = F.linear(x, self.weight)
            with torch.autocast("cpu", enabled=False):
                return low.float() + F.linear(x, self.weight[:8])

    rec, _ = recorded(Both(), torch.randn(2, 8), torch.bfloat16)
    with pytest.warns(
        hmpx.HmpxWarning, match=r"test_autocast_runs.py:\d+: linear ran in \w+ here"
    ) as found:
        policy = rec.policy()
    assert len(found) == 1
    assert {"linear"} == {
        *policy.decisions,
        *[op for each in policy.sections for op in each.decisions],
    }


def test_a_conversion_gives_its_own_types_back() -> None:
    model, x = Pair().eval(), torch.randn(3, 8)
    with hmpx.convert(device_types={"cpu"}, lists="lean"), hmpx.record() as rec, torch.no_grad():
        expected = model(x)
    with hmpx.convert(policy=rec.report().policy(), device_types={"cpu"}), torch.no_grad():
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize(
    "listed",
    [
        {"low": ["linear output=float32"]},
        {"low": ["linear float8_e4m3fn_row output=bfloat16"]},
        {"fp32": ["linear output=bfloat16"]},
    ],
)
def test_types_of_results_and_names_with_wildcards_stay(listed: dict[str, list[str]]) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleDict({"a[0]": nn.Linear(256, 256), "b*": nn.Linear(256, 4)})

        def forward(self, x: Tensor) -> Tensor:
            return torch.as_tensor(self.inner["b*"](self.inner["a[0]"](x)))

    model, x = Named(), torch.randn(2, 256)
    sections = [{"module": "inner.b[*]", "low": ["linear float16"]}]
    given = {"lists": "none", "sections": sections, **listed}
    with hmpx.convert(policy=given, device_types={"cpu"}), hmpx.record() as rec:
        expected = model(x)
    with hmpx.convert(policy=rec.policy(), device_types={"cpu"}), hmpx.record() as again:
        result = model(x)
    assert torch.equal(result, expected)
    kept = [
        [(row.module, row.dtype, row.output_dtypes) for row in each.rows] for each in (rec, again)
    ]
    assert kept[0] == kept[1]
