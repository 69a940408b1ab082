"""FSDP2 in one process: its mixed precision casts a module that the model keeps in fp32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import hmpx
from tests.upstream_bugs import Router, drawn

LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
WIDE = MixedPrecisionPolicy(param_dtype=torch.float32)


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def train(is_fixed: bool) -> list[torch.Tensor]:
    """Trains once; the fix shards the router's gate apart from the others, with a policy of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), Router())
    mesh = init_device_mesh("cpu", (1,))
    if is_fixed:
        fully_shard(model[1], mesh=mesh, mp_policy=WIDE)
    fully_shard(model, mesh=mesh, mp_policy=LOW)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(drawn(16, 64)).square().mean().backward()
        optimizer.step()
    return [each.full_tensor().detach() for each in model.parameters()]


def test_a_contract_is_broken_until_the_module_has_its_own_policy() -> None:
    contract = {"expect": [{"module": "*.gate", "compute": "float32"}]}
    message = r"linear in 1\.gate .* computed in bfloat16"
    with pytest.raises(hmpx.ContractError, match=message), hmpx.expect(contract):
        train(False)
    with hmpx.expect(contract):
        train(True)


def test_lint_alarms_until_the_module_has_its_own_policy() -> None:
    plain = train(False)
    with hmpx.lint(every=1) as findings:
        linted = train(False)
    assert all(map(torch.equal, plain, linted))
    assert {(each.code, each.op) for each in findings} == {("HP101", "softmax")}
    with hmpx.lint(every=1) as findings:
        train(True)
    assert not len(findings)
