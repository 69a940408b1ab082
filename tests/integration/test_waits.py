"""No step waits for the device where the plain program doesn't: neither models nor single ops, forward or backward.

A wait takes the host's time, and it is illegal while a CUDA graph is captured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import hmpx
from tests.fake_cuda import steps
from tests.integration.test_opinfo_conformance import INFOS, current
from tests.samples import drawn, sample_inputs, spread

BF16, FP32 = torch.bfloat16, torch.float32

#: Names for the arguments of `convert`.
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "fp16": {"low_precision_type": "float16"},
    "hmp": {"lists": "hmp"},
    "cast again": {"keep_weight_casts": False},
    "legalized": {"legalize": "always"},
    "float8": {"low_precision_type": "float8_e4m3fn"},
    "delayed": {"low_precision_type": "float8_e4m3fn_delayed"},
    "nvfp4": {"low_precision_type": "nvfp4"},
    "posits": {"low_precision_type": "posit8_2"},
    "table": {"low_precision_type": "nf4"},
}

#: A sample of an op: the op's number, and the dtype to compute with.
Sample = tuple[int, torch.dtype]


# --- on fake CUDA tensors -------------------------------------------------------------------------


def waits_of_steps(name: str, options: list[str]) -> dict[str, list[str]]:
    """Returns options -> the kernels for which a step with loss scaling and a fused optimizer waits."""
    from tests.fake_cuda import models

    found = {}
    for each in ("fp32", *options):
        conversion: Any = contextlib.nullcontext()
        if each != "fp32":
            conversion = hmpx.convert(device_types={"cuda"}, **OPTIONS[each])
        # A build for CPUs switches scalers off.
        with steps.fake(), mock.patch("torch.cuda.amp.common.amp_definitely_not_available", bool):
            step = models.make(name)
            optimizer = torch.optim.AdamW(step.model.train().parameters(), fused=True)
            scaler = torch.amp.GradScaler("cuda")
            assert scaler.is_enabled()
            with conversion, steps.Kernels("cuda") as kernels:
                scaler.scale(step.loss(step.model(**step.inputs))).backward()
                scaler.step(optimizer)
                scaler.update()
        assert any(kernel.name == "_fused_adamw_" for kernel in kernels.list)
        found[each] = [str(kernel) for kernel in kernels.list if kernel.waits]
    return found


@pytest.mark.models
@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit", "resnet", "t5", "lstm"])
def test_no_step_waits(name: str, on_fake_cuda: Callable[..., Any]) -> None:
    pytest.importorskip("transformers")
    options = ["default", "fp16", "float8"]
    assert on_fake_cuda(waits_of_steps, name, options) == {each: [] for each in ("fp32", *options)}


def samples(names: list[str]) -> dict[Sample, Any]:
    """Returns samples of these ops on the CPU: of each op one to compute with in fp32, and one in bf16."""
    return {
        (number, dtype): sample
        for number, info in enumerate(INFOS)
        if info.formatted_name in names
        for sample, dtype in zip(spread(list(sample_inputs(info)), 2), (FP32, BF16), strict=False)
    }


def placed(sample: Any, dtype: torch.dtype, place: Callable[[Tensor], Tensor]) -> Any:
    """Returns a sample's input, args and kwargs; fp32 tensors in ``dtype``, with gradients to be recorded."""

    def one(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        tensor = place(value)
        tensor = tensor.to(dtype) if tensor.dtype is FP32 else tensor
        return tensor.requires_grad_() if tensor.is_floating_point() else tensor

    return tree_map(one, (sample.input, sample.args, sample.kwargs))


def run(call: Callable[..., Any], given: Any) -> None:
    """Runs an op and its backward."""
    outputs = [t for t in tree_leaves(call(*given)) if isinstance(t, Tensor)]
    outputs = [t for t in outputs if t.is_floating_point() and t.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])


def waits_of_ops(names: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    """Returns options -> how many calls ran, how many had more casts, and which waited or stopped, of these ops.

    Calls that stop in the plain program, too, are left out: fake tensors have no values, of which shapes may depend,
    and lack some kernels.
    """
    calls = [current(info.op) for info in INFOS]
    found, plain = samples(names["default"]), {}

    def kernels(each: Sample) -> list[steps.Kernel]:
        mode: Any = torch.empty(1).fake_mode  # type: ignore[attr-defined]
        given = placed(found[each], each[1], lambda tensor: mode.from_tensor(tensor).to("cuda"))
        with steps.Kernels("cuda") as counting:
            run(calls[each[0]], given)
        return counting.list

    def waiting(kernels: list[steps.Kernel]) -> list[str]:
        return [str(kernel) for kernel in kernels if kernel.waits or kernel.moves]

    with steps.fake():
        for each in found:
            with contextlib.suppress(Exception):
                plain[each] = kernels(each)
        results = {}
        for options, chosen in names.items():
            worse, ran, cast = [], 0, 0
            with hmpx.convert(device_types={"cuda"}, **OPTIONS[options]):
                for each, before in plain.items():
                    name = INFOS[each[0]].formatted_name
                    if name not in chosen:
                        continue
                    ran += 1
                    try:
                        now = kernels(each)
                    except Exception as error:
                        worse.append(f"{name} of {each[1]}: {error!r:.200}")
                        continue
                    cast += sum(k.casts > 0 for k in now) > sum(k.casts > 0 for k in before)
                    if len(waiting(now)) > len(waiting(before)):
                        worse.append(f"{name} of {each[1]}: {waiting(now)}")
            results[options] = {"ran": ran, "cast": cast, "worse": worse}
    return results


def test_no_op_waits(on_fake_cuda: Callable[..., Any], pytestconfig: pytest.Config) -> None:
    """Every op that fake tensors can run; a third of them without ``--whole``."""
    whole = pytestconfig.getoption("whole")
    names = {
        options: [info.formatted_name for info in drawn(INFOS, n, whole=whole)]
        for options, n in {"default": 3, "fp16": 12, "float8": 12}.items()
    }
    for options, found in on_fake_cuda(waits_of_ops, names).items():
        assert found["worse"] == [], options
        assert found["ran"] > 0.8 * len(names[options])
        assert found["cast"] > 0.1 * len(names[options])


# --- on the device "meta", whose calls take the way of accelerators --------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", OPTIONS)
def test_no_op_reads_values(options: str, pytestconfig: pytest.Config) -> None:
    """There are no values to read, for which torch would raise."""
    calls = [current(info.op) for info in INFOS]
    infos = drawn(INFOS, 12, whole=pytestconfig.getoption("whole"))
    found = samples([info.formatted_name for info in infos])
    ran, stopped = [], []

    def given(each: Sample) -> Any:
        return placed(found[each], each[1], lambda tensor: tensor.detach().to("meta"))

    for each in found:
        with contextlib.suppress(Exception):
            run(calls[each[0]], given(each))
            ran.append(each)
    with hmpx.convert(device_types={"meta"}, **OPTIONS[options]):
        for each in ran:
            try:
                run(calls[each[0]], given(each))
            except Exception as error:
                stopped.append(f"{INFOS[each[0]].formatted_name} of {each[1]}: {error!r:.200}")
    assert stopped == []
    assert len(ran) > 0.8 * len(infos)
