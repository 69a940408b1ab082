"""Observers that are attached to a conversion, in force or to come."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hmpx
from hmpx import CallTensors, OpCall, OptionError, Policy
from hmpx.observers import reading_kernels

BF16, FP32 = torch.bfloat16, torch.float32


def x(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def policy() -> Policy:
    return Policy.from_ops(low=["mm", "linear"], fp32=["softmax"], widest=["add"])


def functions() -> list[Any]:
    """Returns what stands in many slots: those of torch or wrappers."""
    return [torch.mm, F.linear, torch.softmax, torch.add, Tensor.add_, torch.cat, nn.Linear.forward]


def test_each_call_is_told_with_its_decision() -> None:
    calls: list[OpCall] = []
    with hmpx.convert(policy=policy()), hmpx.attach(calls.append):
        y = F.linear(x(2, 3), x(4, 3))
        torch.softmax(y, -1)
        torch.add(y, x(2, 4))
        x(2, 4).add_(y)
    found = [(c.op, c.cast_policy, c.input_dtypes, c.cast_dtypes, c.output_dtypes) for c in calls]
    assert found == [
        ("linear", "LOW", (FP32, FP32), (BF16, BF16), (BF16,)),
        ("softmax", "FP32", (BF16,), (FP32,), (FP32,)),
        ("add", "WIDEST", (BF16, FP32), (BF16, FP32), (FP32,)),
        ("add", "TARGET", (FP32, BF16), (FP32, BF16), (FP32,)),
    ]
    assert [call.cast_bytes for call in calls] == [2 * (6 + 12), 4 * 8, 0, 0]
    assert all(call.location.startswith(__file__) for call in calls)


def test_nothing_attached_leaves_the_very_same_wrappers() -> None:
    """What was generated for a site is shared by all that are alike: code and all."""
    with hmpx.convert(policy=policy()):
        before = functions()
        codes = [getattr(f, "__code__", None) for f in before]
        with hmpx.attach(lambda call: None):
            assert torch.mm.__code__ is not codes[0]
        after = functions()
        assert [getattr(f, "__code__", None) for f in after] == codes
        assert after[3] is before[3]  # torch.add is torch's own again
    assert not hmpx.is_converted()


def test_several_observers_are_told_in_their_order() -> None:
    told: list[str] = []
    with hmpx.convert(policy=policy()):
        first = hmpx.attach(lambda call: told.append("first"))
        with hmpx.attach(lambda call: told.append("second")):
            torch.mm(x(2, 2), x(2, 2))
        torch.mm(x(2, 2), x(2, 2))
        first.detach()
    assert told == ["first", "second", "first"]
    assert "detached" in repr(first)


def test_tensors_as_given_as_cast_and_to_run_again() -> None:
    seen: list[tuple[OpCall, CallTensors]] = []

    def note(call: OpCall, tensors: CallTensors) -> None:
        seen.append((call, tensors))

    a, b, target = x(2, 3), x(3, 4, seed=1), x(2, 4, seed=2)
    before = target.clone()
    with hmpx.convert(policy=policy()), hmpx.attach(note, tensors=True):
        y = torch.mm(a, mat2=b)
        target.add_(y)
        torch.softmax(y, -1, dtype=None)
    (_, product), (_, added), (_, softmax) = seen
    assert product.given[0] is a and product.given_kwargs["mat2"] is b
    assert product.cast[0].dtype is BF16 is product.cast_kwargs["mat2"].dtype
    assert product.result is y
    expected = torch.mm(a, b)
    again = product.run(*product.given, **product.given_kwargs)
    torch.testing.assert_close(again, expected, rtol=0, atol=0)  # in fp32, uncast
    torch.testing.assert_close(added.given[0], before, rtol=0, atol=0)  # from before the call
    assert added.result is target
    assert softmax.cast[0].dtype is FP32


def test_observers_compute_uncast_and_unobserved() -> None:
    calls: list[str] = []

    def note(call: OpCall, tensors: CallTensors) -> None:
        calls.append(call.op)
        assert torch.mm(x(2, 2), x(2, 2)).dtype is FP32
        assert tensors.run(*tensors.given).dtype is FP32

    with hmpx.convert(policy=policy()), hmpx.attach(note, tensors=True):
        torch.mm(x(2, 2), x(2, 2))
    assert calls == ["mm"]


def test_an_observers_error_reaches_the_program() -> None:
    def refuse(call: OpCall) -> None:
        raise ZeroDivisionError(call.op)

    with hmpx.convert(policy=policy()):
        with hmpx.attach(refuse), pytest.raises(ZeroDivisionError, match="mm"):
            torch.mm(x(2, 2), x(2, 2))
        assert torch.mm(x(2, 2), x(2, 2)).dtype is BF16


def test_blocks_without_casts_are_not_observed() -> None:
    calls: list[OpCall] = []
    with hmpx.convert(policy=policy()), hmpx.attach(calls.append), hmpx.disable_casts():
        torch.mm(x(2, 2), x(2, 2))
    assert not calls


def test_what_is_kept_after_detaching_is_observed_no_more() -> None:
    calls: list[OpCall] = []
    with hmpx.convert(policy=policy()):
        with hmpx.attach(calls.append):
            kept = [torch.mm]
        assert kept[0](x(2, 2), x(2, 2)).dtype is BF16
    assert kept[0](x(2, 2), x(2, 2)).dtype is FP32
    assert not calls


def test_calls_of_all_threads_are_observed() -> None:
    calls: list[int] = []

    def note(call: OpCall) -> None:
        calls.append(threading.get_ident())

    def work() -> None:
        torch.mm(x(2, 2), x(2, 2))

    with hmpx.convert(policy=policy()), hmpx.attach(note):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(calls) == 4


def test_compiled_calls_are_told_while_they_are_traced() -> None:
    """By then tensors hold no values; what is compiled tells nobody."""
    calls: list[tuple[str, CallTensors | None]] = []

    def note(call: OpCall, tensors: CallTensors | None) -> None:
        calls.append((call.op, tensors))

    compiled = torch.compile(lambda a, b: F.relu(torch.mm(a, b)), backend="aot_eager")
    with hmpx.convert(policy=policy()), hmpx.attach(note, tensors=True):
        assert compiled(x(2, 2), x(2, 2)).dtype is BF16
        traced = len(calls)
        for _ in range(3):
            compiled(x(2, 2), x(2, 2))
    assert {op for op, _ in calls} == {"mm"}
    assert len(calls) == traced
    held = [t for _, tensors in calls if tensors is not None for t in tensors.given]
    assert all(type(tensor) is not Tensor for tensor in held)


def test_ops_by_rules_and_in_formats_are_observed() -> None:
    calls: list[OpCall] = []
    with hmpx.convert(policy={"lists": "none", "low": ["mm float8_e4m3fn"]}):
        hmpx.register_rule("bmm", lambda call: hmpx.DENY)
        try:
            with hmpx.attach(calls.append):
                torch.mm(x(2, 2), x(2, 2))
                torch.bmm(x(1, 2, 2, dtype=BF16), x(1, 2, 2))
        finally:
            hmpx.unregister_rule("bmm")
    assert [(call.op, getattr(call.dtype, "name", call.dtype)) for call in calls] == [
        ("mm", "float8_e4m3fn"),
        ("bmm", FP32),
    ]


def test_the_log_goes_on_beside_an_observer(caplog: pytest.LogCaptureFixture) -> None:
    """Each distinct decision is logged once, whatever comes and goes."""
    with hmpx.convert(policy=policy(), isVerbose="once"):
        for _ in range(2):
            with hmpx.attach(lambda call: None):
                torch.mm(x(2, 2), x(2, 2))
    assert sum(message.startswith("casting  mm") for message in caplog.messages) == 1


@pytest.mark.parametrize(
    ("observer", "tensors", "message"),
    [
        (None, False, "an observer must be a function of a call, not None"),
        ("print", False, "an observer must be a function of a call, not 'print'"),
        (print, "yes", "tensors must be True or False, not 'yes'"),
    ],
)
def test_wrong_arguments(observer: Any, tensors: Any, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        hmpx.attach(observer, tensors)
    assert str(caught.value).startswith(message)


# --- the dtypes that kernels compute in: those that only make or move values don't count ------------

X = torch.arange(1.0, 13.0).reshape(3, 4)
INDEX = torch.tensor([[2, 1, 0, 1]])

MOVING: dict[str, Callable[[torch.Tensor], object]] = {
    "views": lambda x: x.T[1:].reshape(-1).unsqueeze(0),
    "copies": lambda x: torch.ops.aten.select_copy(x.clone().contiguous().to(torch.bfloat16), 0, 1),
    "makes": lambda x: (torch.zeros_like(x), torch.full_like(x, 0.1), x.new_empty(3), x.item),
    "writes": lambda x: (torch.empty(3, 4).copy_(x), x.clone().zero_(), x.clone().fill_(3)),
    "joins": lambda x: (torch.cat([x, x]), torch.stack([x, x]), x.repeat(2, 1)),
    "selects": lambda x: (x[INDEX[0, :3]], x.gather(0, INDEX), x.index_select(0, INDEX[0])),
    "turns": lambda x: (x.flip(0), x.roll(1), F.pad(x, (1, 1))),
    "reads": lambda x: x[0, 0].item(),
}


@pytest.mark.parametrize("name", MOVING)
def test_moves_don_t_count(name: str) -> None:
    with reading_kernels() as kernels:
        MOVING[name](X)
    assert tuple(kernels) == ()


def test_computations_count_in_the_order_of_their_dtypes() -> None:
    with reading_kernels() as kernels, torch.autocast("cpu"):
        (X @ X.T).float().exp()
    assert tuple(kernels) == (torch.bfloat16, torch.float32)


def test_elementwise_kernels_compute_in_the_widest_dtype_of_their_inputs() -> None:
    for run in (lambda x: x * x.half(), lambda x: x.half() * x, lambda x: x.half().add_(x)):
        with reading_kernels() as kernels:
            run(X)
        assert tuple(kernels) == (torch.float32,)
    with reading_kernels() as kernels:
        X.half() * torch.tensor(2.0)
    assert tuple(kernels) == (torch.float16,)
