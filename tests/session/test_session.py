"""convert, replace, revert: torch is patched as a whole, or not at all."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import nn

import hmpx
from hmpx import HmpxWarning, OptionError, Policy, patching
from tests.conftest import differences, namespaces

BF16, FP32 = torch.bfloat16, torch.float32


def ones() -> torch.Tensor:
    return torch.ones(2, 2)


def test_convert_and_revert_restore_torch_by_key_and_identity() -> None:
    """Every slot of every namespace is the same object again, created slots are gone."""
    for options in ({}, {"opt_level": "O2"}, {"isVerbose": True}, {"lists": "autocast-cuda"}):
        before = namespaces()
        hmpx.convert(**options)
        assert hmpx.is_converted()
        assert len(differences(before)) > 100
        hmpx.revert()
        assert not hmpx.is_converted()
        assert differences(before) == []


def test_revert_without_convert_does_nothing() -> None:
    """It may be called at any time."""
    hmpx.revert()
    assert not hmpx.is_converted()
    assert not hmpx.casts_enabled()


def test_a_second_convert_with_an_equal_policy_does_nothing() -> None:
    """The same wrappers stay in place: a notebook cell may be run again."""
    first = hmpx.convert()
    wrapper = F.linear
    assert hmpx.convert() is first
    assert F.linear is wrapper


def test_a_second_convert_with_another_policy_replaces_the_first() -> None:
    """No wrapper of the first is left beneath the second."""
    first = hmpx.convert()
    second = hmpx.convert(policy=Policy.from_ops(fp32=["matmul"]))
    assert (ones() @ ones()).dtype is FP32
    assert F.linear(ones(), ones()).dtype is FP32
    first.revert()
    assert hmpx.is_converted()
    second.revert()
    assert not hmpx.is_converted()


def test_a_with_block_restores_what_was_in_force_before() -> None:
    """Inner and outer conversions nest, also when they are equal."""
    low, fp32 = Policy.from_ops(low=["matmul"]), Policy.from_ops(fp32=["matmul"])
    with hmpx.convert(policy=low):
        with hmpx.convert(policy=fp32):
            assert (ones() @ ones()).dtype is FP32
        assert (ones() @ ones()).dtype is BF16
        with hmpx.convert(policy=low):
            assert (ones() @ ones()).dtype is BF16
        assert (ones() @ ones()).dtype is BF16
    assert not hmpx.is_converted()


def test_a_with_block_reverts_after_an_exception() -> None:
    """However the block is left."""
    with pytest.raises(ZeroDivisionError), hmpx.convert():
        1 / 0  # noqa: B018
    assert not hmpx.is_converted()


def test_wrong_options_leave_a_conversion_in_force() -> None:
    """A failed second convert changes nothing."""
    hmpx.convert(policy=Policy.from_ops(low=["matmul"]))
    with pytest.raises(OptionError):
        hmpx.convert(opt_level="O3")
    assert (ones() @ ones()).dtype is BF16


@pytest.mark.parametrize("converted", [False, True])
def test_an_error_halfway_through_convert_leaves_a_clean_state(
    monkeypatch: pytest.MonkeyPatch, converted: bool
) -> None:
    """All of the old state or all of the new one."""
    if converted:
        hmpx.convert(policy=Policy.from_ops(low=["matmul"]))
    expected = (ones() @ ones()).dtype
    write, written = patching._write, []

    def failing_write(patch: patching.Patch, value: object) -> None:
        written.append(patch)
        if len(written) == 100:
            raise TypeError("a slot that can't be set")
        write(patch, value)

    monkeypatch.setattr(patching, "_write", failing_write)
    with pytest.raises(TypeError):
        hmpx.convert()
    assert hmpx.is_converted() is converted
    assert (ones() @ ones()).dtype is expected
    assert F.linear(ones(), ones()).dtype is FP32


def test_somebody_elses_patch_on_top_is_left_working_and_named() -> None:
    """Their function stays in place, and no cast is left beneath it."""
    hmpx.convert(policy=Policy.from_ops(low=["linear"]))
    ours = F.linear

    def theirs(*args: Any) -> torch.Tensor:
        return ours(*args)

    F.linear = theirs  # type: ignore[assignment]
    assert F.linear(ones(), ones()).dtype is BF16
    with pytest.warns(HmpxWarning, match=r"torch.nn.functional.linear: patched by somebody else"):
        hmpx.revert()
    assert F.linear is theirs
    assert F.linear(ones(), ones()).dtype is FP32
    F.linear = torch._C._nn.linear


def test_sessions_that_were_replaced_are_let_go() -> None:
    """A service that converts again and again keeps one of them, or two."""
    policies = [Policy.from_ops(low=["mm"]), Policy.from_ops(low=["mm", "bmm"])]
    sessions = [weakref.ref(hmpx.convert(policy=policies[n % 2])) for n in range(10)]
    gc.collect()
    assert sum(reference() is not None for reference in sessions) <= 2
    hmpx.revert()


@pytest.mark.parametrize("is_asked", [False, True], ids=["lists", "rules"])
def test_nothing_waits_for_a_collection_of_garbage(is_asked: bool) -> None:
    """What a function holds that calls `convert` is freed at its end."""

    class Held:
        pass

    def program() -> list[weakref.ref[Any]]:
        held = Held()
        hmpx.convert(device_types={"cpu"})
        F.linear(ones(), ones()).sum()
        found = [weakref.ref(held)]
        hmpx.revert()
        return found

    if is_asked:
        hmpx.register_rule("*", lambda call: None)
    gc.collect()
    gc.disable()
    try:
        assert [found() for found in program()] == [None]
    finally:
        gc.enable()
        if is_asked:
            hmpx.unregister_rule("*")


def test_one_builtin_in_two_slots_keeps_one_identity() -> None:
    """``F.conv2d is torch.conv2d`` before and after."""
    with hmpx.convert():
        assert F.conv2d is torch.conv2d
        assert F.linear is torch._C._nn.linear


def test_wrappers_tell_what_they_wrap() -> None:
    """Name, module, documentation and ``__wrapped__``, so that help() and pickle work."""
    original, method = F.linear, torch.Tensor.matmul
    with hmpx.convert():
        assert F.linear.__wrapped__ is original
        assert (F.linear.__module__, F.linear.__qualname__) == ("torch.nn.functional", "linear")
        assert F.linear.__doc__ == original.__doc__
        assert torch.Tensor.matmul.__qualname__ == "Tensor.matmul"
        assert torch.Tensor.matmul.__wrapped__ is method
        assert pickle.loads(pickle.dumps(F.linear)) is F.linear
        assert pickle.loads(pickle.dumps(torch.Tensor.matmul)) is torch.Tensor.matmul
        assert copy.deepcopy(F.linear) is F.linear


def test_models_train_under_the_default_lists() -> None:
    """fp32 parameters, fp32 gradients, and the loss of casting by hand."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
    data, target = torch.randn(4, 8), torch.tensor([0, 1, 2, 0])
    with hmpx.convert() as active:
        assert model(data).dtype is BF16
        loss = F.cross_entropy(model(data), target)
        loss.backward()
    assert loss.dtype is FP32
    assert {p.grad.dtype for p in model.parameters()} == {FP32}  # type: ignore[union-attr]
    hidden = F.linear(data.bfloat16(), model[0].weight.bfloat16(), model[0].bias.bfloat16())
    hidden = F.layer_norm(hidden, (8,), model[1].weight, model[1].bias).relu()
    logits = F.linear(hidden, model[3].weight.bfloat16(), model[3].bias.bfloat16())
    assert loss.item() == F.cross_entropy(logits.float(), target).item()
    assert "not in force" in repr(active)


def test_printing_a_tensor_shows_its_values_as_they_are() -> None:
    """The arithmetic of ``repr`` is neither cast nor logged."""
    value = torch.tensor([1.001, 1000.5])
    expected = repr(value)
    with hmpx.convert(opt_level="O2"):
        assert repr(value) == expected
        assert repr(nn.Parameter(value)) == "Parameter containing:\n" + repr(value.requires_grad_())


# --- logs ---------------------------------------------------------------------------------------


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "hmpx"]


@pytest.mark.parametrize(
    "options", [{"exclude": ["1"]}, {"exclude": "1"}, {"policy": {"exclude": ["1"]}}]
)
def test_excluded_modules_run_in_float32(options: dict[str, object]) -> None:
    """Also with the other lists in force."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with hmpx.convert(device_types={"cpu"}, **options) as active:  # type: ignore[arg-type]
        assert model(ones()).dtype == torch.float32
        assert model[0](ones()).dtype == torch.bfloat16
        assert hmpx.load_policy(policy=yaml.safe_load(active.policy.to_yaml())) == active.policy


def test_verbose_logs_each_call_in_hmps_shape(caplog: pytest.LogCaptureFixture) -> None:
    """One line a call: ``casting  <method ...>  to_bf16``."""
    caplog.set_level(logging.INFO, "hmpx")
    hmpx.convert(isVerbose=True)
    for _ in range(2):
        ones() @ ones()
    torch.softmax(ones().bfloat16(), 0)
    torch.add(ones(), ones().bfloat16())
    with hmpx.disable_casts():
        ones() @ ones()
    torch.mm(ones().double(), ones().double())
    assert (
        lines(caplog)[:2]
        == [
            "casting  <slot wrapper '__matmul__' of 'torch._C.TensorBase' objects>  to_bf16"
            if "slot wrapper" in lines(caplog)[0]
            else "casting  <method '__matmul__' of 'torch._C.TensorBase' objects>  to_bf16"
        ]
        * 2
    )
    assert [line.rpartition("  ")[2] for line in lines(caplog)[2:]] == [
        "to_fp32",
        "to_fp32",
        "as_is",
    ]
    assert len(lines(caplog)) == 5


def test_verbose_once_logs_each_decision_with_reason_module_and_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The list line, the module path, the user's file:line; once (pytorch #117832, #116935)."""
    caplog.set_level(logging.INFO, "hmpx")
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Softmax(-1))
    hmpx.convert(isVerbose="once")
    for _ in range(3):
        model(ones())
    logged = lines(caplog)
    assert len(logged) == 2
    assert logged[0].startswith(
        "casting  linear(fp32, fp32, fp32)  to_bf16  LOW by lists/hmpx/bf16.txt:18  in 0.0  at "
    )
    here = Path(__file__).name
    assert f"{here}:" in logged[0]
    assert "softmax(bf16)  to_fp32" in logged[1]
    assert "  in 1  at " in logged[1]


@pytest.mark.parametrize("name", ["add", "cat", "where", "max"])
def test_logging_does_not_change_the_numbers(name: str) -> None:
    """An op that torch promotes by itself is wrapped while observed, with the same result."""
    a, b = torch.rand(3), torch.rand(3).bfloat16()
    call = {
        "add": lambda: a + b,
        "cat": lambda: torch.cat([a, b]),
        "where": lambda: torch.where(a > 0.5, a, b),
        "max": lambda: torch.max(a, b),
    }[name]
    with hmpx.convert():
        # That of `where` is there for numbers that a low type does not hold.
        assert hasattr(getattr(torch, name), "__wrapped__") == (name == "where")
        expected = call()
    with hmpx.convert(isVerbose="once"):
        assert hasattr(getattr(torch, name), "__wrapped__")
        actual = call()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_the_log_ends_the_program_when_its_reader_has_gone() -> None:
    """As print does in ``python script.py | head -1``, instead of a traceback for each line."""
    script = (
        "import torch, hmpx\n"
        "with hmpx.convert(isVerbose=True, device_types={'cpu'}):\n"
        "    for _ in range(100_000): torch.ones(1) @ torch.ones(1)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline().startswith("casting")
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=120) == 1
    assert errors.count("Traceback") == 1
    assert errors.splitlines()[-1].startswith("BrokenPipeError")


def test_a_kept_wrapper_that_somebody_elses_function_calls_does_not_call_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next conversion wraps theirs, which would otherwise go round in circles."""
    x = torch.ones(2, 2)
    with hmpx.convert(policy=Policy.from_ops(low=["mm"])):
        kept = torch.mm

    def theirs(*args: Any) -> torch.Tensor:
        return kept(*args)

    monkeypatch.setattr(torch, "mm", theirs)
    with hmpx.convert(policy=Policy.from_ops(low=["mm"])):
        assert torch.mm(x, x).dtype is torch.bfloat16
    assert torch.mm(x, x).dtype is torch.float32


# --- devices that are not there -------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2])
def test_device_types_of_which_this_machine_has_none_are_warned_of(count: int) -> None:
    """Once, at the user's line, with the remedy; where warnings are errors torch stays unconverted."""
    accelerator = torch.accelerator.current_accelerator()
    here = accelerator.type if torch.accelerator.is_available() and accelerator else "cpu"
    absent = [each for each in ("cuda", "hpu", "mps", "xpu") if each != here][:count]
    device_types, named = set(absent), " or ".join(absent)
    with pytest.warns(hmpx.HmpxWarning, match=f"torch finds no {named} device") as found:
        hmpx.convert(device_types=device_types)
    (warning,) = found
    assert warning.filename == __file__
    assert f"leave out device_types to cast tensors on {here}" in str(warning.message)
    hmpx.revert()
    with pytest.raises(hmpx.HmpxWarning):
        hmpx.convert(device_types=device_types)
    assert not hmpx.is_converted()


@pytest.mark.parametrize("device_types", [None, {"cpu"}, {"cpu", "cuda"}, {"meta"}])
def test_device_types_of_which_this_machine_has_one_are_not_warned_of(
    device_types: set[str] | None,
) -> None:
    """Warnings are errors here."""
    with hmpx.convert(device_types=device_types):
        assert hmpx.is_converted()
