"""A watch waits for devices at the end of a step only."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import hmpx
from hmpx.watching import notes, records, slots

pytestmark = pytest.mark.usefixtures("no_search_for_early_names")


def convert(**options: Any) -> hmpx.Session:
    return hmpx.convert(device_types={"cpu"}, **options)


def x(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


#: What makes Python wait for a device, or copies from it, as kernels and as methods of tensors.
WAITING_KERNELS = {
    "aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal", "aten::allclose",
    "aten::nonzero", "aten::masked_select", "aten::unique_dim", "aten::_unique2", "aten::copy_",
    "aten::_to_copy", "aten::to", "aten::clone",
}  # fmt: skip
WAITING_METHODS = (
    "item", "tolist", "cpu", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__",
    "__repr__", "copy_", "clone", "to",
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has everything measured by torch's ops, as on accelerators."""
    monkeypatch.setattr(slots, "extremes_kernels", dict)


def waits(calls: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Counter[str], Counter[str]]:
    """Returns what a watched program does more than the same one unwatched: in a step, and at its end.

    Kernels are counted by the profiler, below all modes; methods where Python looks them up, and
    under the names by which `hmpx.watching` keeps them.
    """
    methods: Counter[str] = Counter()

    def counted(function: Any, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            methods[name] += 1
            return function(*args, **kwargs)

        return call

    def run(watched: bool) -> list[Counter[str]]:
        found: list[Counter[str]] = []
        with contextlib.ExitStack() as stack:
            stack.enter_context(convert(legalize="never"))
            w = stack.enter_context(hmpx.watch("collect")) if watched else None
            given, weight = x(4, 4).requires_grad_(), x(4, 4).t()
            patches = stack.enter_context(monkeypatch.context())
            for name in WAITING_METHODS:
                patches.setattr(Tensor, name, counted(getattr(Tensor, name), name))
            for module in (slots, records, notes):
                for name, value in list(vars(module).items()):
                    method = getattr(value, "__name__", "")
                    if name.startswith("_") and method in WAITING_METHODS:
                        patches.setattr(module, name, counted(value, method))
            patches.setattr(torch.cuda, "synchronize", counted(None, "synchronize"))
            patches.setattr(torch.accelerator, "synchronize", counted(None, "synchronize"))
            for part in ("step", "end"):
                methods.clear()
                with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
                    if part == "step":
                        y = given
                        for _ in range(calls):
                            y = torch.tanh(torch.mm(y, given)) * weight
                        y.sum().backward()
                    elif w is not None:
                        w.step()
                kernels = Counter(each.name for each in profiled.events())
                found.append(kernels + methods)
        return found

    (step, end), (plain_step, plain_end) = run(True), run(False)
    return step - plain_step, end - plain_end


def test_a_step_waits_for_devices_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that a watched call adds waits; what is read at the end does not grow with the calls."""
    few, many = waits(2, monkeypatch), waits(20, monkeypatch)
    for step, _ in (few, many):
        assert step["aten::aminmax"] > 10
        assert not set(step) & (WAITING_KERNELS | set(WAITING_METHODS) | {"synchronize"}), step
    assert few[1] == many[1]
    assert few[1]["tolist"] == 1
    assert not set(few[1]) & {"item", "aten::_local_scalar_dense", "cpu", "__bool__", "synchronize"}
