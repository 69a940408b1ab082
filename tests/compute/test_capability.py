"""What a device does natively: measured once, anywhere, without leaving a trace; or as reported."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import hmpx
from hmpx import OptionError
from hmpx.compute import capabilities as capability
from hmpx.compute.capabilities import KINDS, Capability, known_capability
from hmpx.policy import LEGALIZE_MODES
from tests.speeds import measured_by

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
LOW = (BF16, FP16)


@pytest.fixture
def forgotten(fresh_wrappers: None) -> Iterator[None]:
    """Nothing is known at the beginning, and what a test made up isn't at its end."""
    capability.forget()
    yield
    capability.forget()


# --- measured -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("kind", KINDS)
def test_the_cpu_is_measured(kind: str, dtype: torch.dtype) -> None:
    """Both ratios are finite and positive, and each question after the first has the same answer."""
    found = capability.capability(kind, "cpu", dtype)
    assert found.reported is capability.reported("cpu", dtype)
    for ratio in (found.inference, found.training):
        assert ratio is not None
        assert 0 < ratio < math.inf
    assert capability.capability(kind, "cpu", dtype) is found


@pytest.mark.usefixtures("forgotten")
def test_an_op_without_kernel_is_infinitely_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it is computed in fp32."""

    def refuse(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is BF16:
            raise RuntimeError("\"refuse\" not implemented for 'BFloat16'")
        return tensor.exp()

    monkeypatch.setitem(capability._PROBES, "norm", (refuse, ((2, 2),)))
    found = capability.capability("norm", "cpu", BF16)
    assert found.inference == found.training == math.inf
    assert found.is_slow


@pytest.mark.usefixtures("forgotten")
def test_a_measurement_that_fails_is_an_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The op is left to torch's kernel; the log says so once."""
    attempts = []

    def fail(tensor: torch.Tensor) -> torch.Tensor:
        attempts.append(tensor)
        raise TypeError("not like this")

    monkeypatch.setitem(capability._PROBES, "elementwise", (fail, ((2, 2),)))
    with hmpx.convert(policy={"lists": "none", "low": ["gelu"]}):
        for _ in range(2):
            assert F.gelu(torch.ones(3)).dtype is BF16
    found = capability.capability("elementwise", "cpu", BF16)
    assert found == Capability(capability.reported("cpu", BF16))
    assert not found.is_slow
    assert len(attempts) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "the speed of elementwise in bfloat16 on cpu can't be measured, so torch's kernels compute it: "
        "TypeError('not like this')"
    ]


#: What a measurement calls, and what that calls in turn.
USED = (
    *("mm", "conv2d", "linear", "scaled_dot_product_attention", "layer_norm", "lstm", "gelu"),
    *("linspace", "ones_like", "zeros", "sum", "is_same_size"),
)


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("how", ["low", "fp32", "first", "*", "log", "rules"])
def test_what_is_converted_does_not_matter(how: str) -> None:
    """The ops that a measurement calls may stand in any list, or be observed, or decided by rules."""
    used = [name for name in USED if hmpx.ops.resolve(name) in hmpx.ops.computing()]
    names = ["*"] if how in ("*", "log") else used
    policy = hmpx.Policy.from_ops(**{how if how in ("fp32", "first") else "low": names})
    with contextlib.ExitStack() as stack:
        if how == "rules":
            for name in used:
                hmpx.register_rule(name, lambda call: hmpx.ALLOW)
                stack.callback(hmpx.unregister_rule, name)
        stack.enter_context(
            hmpx.convert(policy=policy, isVerbose="once" if how == "log" else False)
        )
        weight = torch.ones(64, 64, dtype=BF16, requires_grad=True)
        result = F.gelu(F.layer_norm(F.linear(torch.ones(64, 64, dtype=BF16), weight), (64,)))
        torch.autograd.grad(result.sum(), weight)
        found = [capability.capability(kind, "cpu", BF16) for kind in KINDS]
    assert all(0 < each.inference < math.inf and 0 < each.training < math.inf for each in found)


# --- the first question, anywhere -----------------------------------------------------------------


def in_checkpoint(*, use_reentrant: bool) -> Callable[[Callable[[], None]], None]:
    def run(ask: Callable[[], None]) -> None:
        a = torch.ones(2, requires_grad=True)
        checkpoint(lambda a: (ask(), a * 2)[1], a, use_reentrant=use_reentrant).sum().backward()
        assert a.grad.tolist() == [2, 2]

    return run


def in_vmap(ask: Callable[[], None]) -> None:
    torch.func.vmap(torch.func.grad(lambda a: (ask(), a * 2)[1].sum()))(torch.ones(3, 2))


def in_thread(ask: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(ask).result()


def in_hook_of_backward(ask: Callable[[], None]) -> None:
    a = torch.ones(2, requires_grad=True)
    a.register_hook(lambda gradient: ask())
    a.sum().backward()


def within(*regions: Callable[[], Any]) -> Callable[[Callable[[], None]], None]:
    def run(ask: Callable[[], None]) -> None:
        with contextlib.ExitStack() as stack:
            for region in regions:
                stack.enter_context(region())
            ask()

    return run


def refuse(tensor: Tensor) -> Tensor:
    raise AssertionError("it saved a tensor")


class Refusing(TorchFunctionMode):
    """A mode that is to see nothing of a measurement."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "mm" not in str(func)
        return func(*args, **(kwargs or {}))


CONTEXTS: dict[str, Callable[[Callable[[], None]], None]] = {
    "no_grad": within(torch.no_grad),
    "inference_mode": within(torch.inference_mode),
    "autocast": within(lambda: torch.autocast("cpu", dtype=BF16)),
    "hooks": within(lambda: torch.autograd.graph.saved_tensors_hooks(refuse, refuse)),
    "no hooks": within(lambda: torch.autograd.graph.disable_saved_tensors_hooks("none")),
    "function mode": within(Refusing),
    "dispatch mode": within(lambda: Computed()),
    "default device": within(lambda: torch.device("meta")),
    "fake tensors": within(FakeTensorMode),
    "disable_casts": within(hmpx.disable_casts),
    "a conversion": within(lambda: hmpx.convert(policy=hmpx.Policy.from_ops(low=["*"]))),
    "checkpoint": in_checkpoint(use_reentrant=False),
    "reentrant checkpoint": in_checkpoint(use_reentrant=True),
    "vmap of grad": in_vmap,
    "backward": in_hook_of_backward,
    "another thread": in_thread,
}


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("context", CONTEXTS)
def test_the_first_question_may_come_anywhere(context: str) -> None:
    """In modes, transforms and hooks: all is measured, and nothing left changed."""
    found: list[Capability] = []

    def state() -> tuple[object, ...]:
        generator = torch.default_generator.initial_seed()
        return (
            generator,
            torch.is_grad_enabled(),
            torch.get_num_threads(),
            torch.get_default_dtype(),
        )

    def ask() -> None:
        before = state()
        found.extend(capability.capability(kind, "cpu", BF16) for kind in ("gemm", "rnn", "norm"))
        assert state() == before

    CONTEXTS[context](ask)
    assert all(0 < each.inference < math.inf and 0 < each.training < math.inf for each in found)
    assert found


def cuda_says(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> None:
    """Replaces functions of torch.cuda by these answers, or by these functions."""
    for name, answer in answers.items():
        is_plain = isinstance(answer, bool | int | tuple)
        monkeypatch.setattr(torch.cuda, name, (lambda a=answer: a) if is_plain else answer)


# --- reported -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("device_type", ["hpu", "xpu", "mps", "mtia", "privateuseone", "meta"])
def test_accelerators_are_taken_at_their_word(device_type: str, dtype: torch.dtype) -> None:
    """Nothing is measured there, and nothing slow."""
    assert capability.reported(device_type, dtype) is True
    for kind in KINDS:
        assert capability.capability(kind, device_type, dtype) == Capability(True)


def test_the_cpu_reports_what_onednn_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or nothing, where torch has no such question."""
    assert capability.reported("cpu", BF16) is torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert capability.reported("cpu", FP16) is torch.ops.mkldnn._is_mkldnn_fp16_supported()
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert capability.reported("cpu", BF16) is None


@pytest.mark.parametrize(
    ("is_available", "hip", "version", "expected"),
    [
        (False, None, (9, 0), (None, None)),
        (True, None, (9, 0), (True, True)),
        (True, None, (8, 0), (True, True)),
        (True, None, (7, 5), (False, True)),
        (True, None, (5, 3), (False, True)),
        (True, None, (5, 2), (False, False)),
        (True, "6.2", (5, 0), (True, True)),
    ],
)
def test_gpus_report_by_their_compute_capability(
    monkeypatch: pytest.MonkeyPatch,
    is_available: bool,
    hip: str | None,
    version: tuple[int, int],
    expected: tuple[bool | None, bool | None],
) -> None:
    """From 8.0 on bfloat16, from 5.3 on float16; AMD's always."""
    cuda_says(monkeypatch, is_available=is_available, get_device_capability=version)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert (capability.reported("cuda", BF16), capability.reported("cuda", FP16)) == expected


class Card:
    """Stands in for `torch.cuda.device`: notes the card that is chosen."""

    chosen: list[int]

    def __init__(self, index: int) -> None:
        """Chooses ``index``."""
        self.index = index

    def __enter__(self) -> None:
        Card.chosen.append(self.index)

    def __exit__(self, *exc_info: object) -> None:
        Card.chosen.append(-1)


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Has the machine have a card without bfloat16 beside one with it; returns what is measured."""
    Card.chosen = []
    measured: list[object] = []

    def measure(*question: object) -> Capability:
        measured.append((question[1], Card.chosen[-1:]))
        return Capability(False, 3.0, 3.0)

    versions = {None: (8, 0), 0: (8, 0), 1: (7, 5)}
    cuda_says(
        monkeypatch,
        is_available=True,
        device_count=2,
        get_device_capability=lambda index=None: versions[index],
        device=Card,
    )
    measured_by(monkeypatch, measure)
    return measured


@pytest.mark.usefixtures("forgotten")
def test_each_card_is_asked_of_for_itself(two_cards: list[object]) -> None:
    """And measured as the current one of its thread."""
    first, second = (torch.device("cuda", index) for index in range(2))
    found = [capability.capability("gemm", capability.name_of(d), BF16) for d in (first, second)]
    assert found == [Capability(True), Capability(False, 3.0, 3.0)]
    assert two_cards == [("cuda:1", [1])]
    assert Card.chosen == [1, -1]
    assert not capability.is_reported_of_all("cuda", BF16)
    assert capability.is_reported_of_all("cuda", FP16)
    assert capability.reported("cuda:7", BF16) is None  # a fake tensor's


@pytest.mark.usefixtures("forgotten")
def test_nothing_is_measured_while_a_graph_is_captured(
    two_cards: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call is left to torch's kernel; what is known by then holds, and the rest is asked again."""
    card = torch.device("cuda:1")
    cuda_says(monkeypatch, is_initialized=True, is_current_stream_capturing=False)
    known = known_capability("gemm", card, BF16)
    cuda_says(monkeypatch, is_current_stream_capturing=True)
    assert known_capability("gemm", card, BF16) == known == Capability(False, 3.0, 3.0)
    assert not known_capability("norm", card, BF16).is_slow
    assert len(two_cards) == 1
    cuda_says(monkeypatch, is_current_stream_capturing=False)
    assert known_capability("norm", card, BF16).is_slow
    assert len(two_cards) == 2


@pytest.mark.usefixtures("forgotten")
def test_a_call_in_a_captured_graph_settles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its site asks again, and is legalized if the device turns out to be slow."""
    x, measured = torch.randn(64, 64), []

    def measure(kind: str, *question: object) -> Capability:
        measured.append(kind)
        return Capability(False, 3.0, 3.0)

    measured_by(monkeypatch, measure)
    with hmpx.convert(device_types={"cpu"}, low_precision_type=FP16):
        with monkeypatch.context() as patches:
            cuda_says(patches, is_initialized=True, is_current_stream_capturing=True)
            assert torch.mm(x, x).dtype is FP16
        assert not measured
        torch.mm(x, x)
    assert measured


def exhaust(*tensors: Tensor) -> Tensor:
    """Has no memory for low precision."""
    if tensors[0].dtype in LOW:
        raise torch.OutOfMemoryError("out of memory")
    return tensors[0].exp()


@pytest.mark.usefixtures("forgotten")
def test_exhausted_memory_is_no_lack_of_a_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The measurement has failed, which the log says, and ops are left to torch's kernels."""
    monkeypatch.setitem(capability._PROBES, "norm", (exhaust, ((2, 2),)))
    found = capability.capability("norm", "cpu", BF16)
    assert found == Capability(capability.reported("cpu", BF16))
    assert "out of memory" in caplog.text


# --- the option -----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["sometimes", "", "AUTO", True, None])
def test_unknown_values_of_legalize_are_refused(value: object) -> None:
    """With what is known; torch stays as it was."""
    text = f"legalize must be one of {', '.join(map(repr, LEGALIZE_MODES))}, not {value!r}"
    with pytest.raises(OptionError) as error:
        hmpx.convert(legalize=value)  # type: ignore[arg-type]
    assert str(error.value) == text
    assert not hmpx.is_converted()


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize(
    ("legalize", "asks"), [("always", False), ("never", False), ("auto", True)]
)
def test_only_auto_asks(monkeypatch: pytest.MonkeyPatch, legalize: str, asks: bool) -> None:
    """Nothing is measured at convert, nor where the answer would change nothing."""
    asked = []

    def measure(*args: object) -> Capability:
        asked.append(args[0])
        return Capability(None, 1.0, 1.0)

    measured_by(monkeypatch, measure)
    with hmpx.convert(legalize=legalize):
        assert not asked
        torch.ones(64, 64) @ torch.ones(64, 64)
        assert bool(asked) is asks


@pytest.mark.usefixtures("forgotten")
def test_small_products_settle_nothing_for_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are left to torch's kernels for their size, on hardware that is said to have the dtype."""
    monkeypatch.setattr(capability, "reported", lambda *args: True)
    monkeypatch.setattr(capability, "is_reported_of_all", lambda *args: True)
    measured_by(monkeypatch, lambda *args: Capability(True, 9.0, 9.0))
    small, large = torch.ones(2, 2).requires_grad_(), torch.ones(64, 64).requires_grad_()
    with hmpx.convert(lists="hmp", legalize="auto"):
        for op in (F.linear, torch.mm, torch.bmm):
            batch = (1,) if op is torch.bmm else ()
            op(small.expand(*batch, 2, 2), small.expand(*batch, 2, 2))
            with Computed() as computed:
                op(large.expand(*batch, 64, 64), large.expand(*batch, 64, 64))
            assert computed.dtypes == {FP32}, op


class Computed(TorchDispatchMode):
    """Notes in which dtypes products and attention are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        """Notes the dtype of the last matrix."""
        if any(name in str(func) for name in ("mm", "attention")):
            self.dtypes.add(args[2 if "attention" in str(func) else -1].dtype)
        return func(*args, **(kwargs or {}))


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t()


def matmul_by_rows(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


def linear_by_columns(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.t())


def attention(x: Tensor, weight: Tensor) -> Tensor:
    heads = weight.view(1, 4, 64, 256)
    return F.scaled_dot_product_attention(heads, heads, heads)


def attention_by_name(x: Tensor, weight: Tensor) -> Tensor:
    heads, mask = weight.view(1, 4, 64, 256), torch.ones(64, 64, dtype=torch.bool)
    return F.scaled_dot_product_attention(heads, key=heads, value=heads, attn_mask=mask)


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize(
    ("function", "rows", "slow_kinds", "expected"),
    [
        (linear, 1, {"gemm"}, BF16),
        (linear, 2, {"gemm"}, BF16),
        (linear, 3, {"gemm"}, FP32),
        (matmul, 1, {"gemm"}, BF16),
        (matmul, 2, {"gemm"}, BF16),
        (matmul, 3, {"gemm"}, FP32),
        (matmul, 1, {"gemm", "gemv"}, FP32),
        (matmul, 1, {"gemv"}, FP32),
        (matmul, 3, {"gemv"}, BF16),
        (matmul_by_rows, 1, {"gemm"}, FP32),
        (matmul_by_rows, 2, {"gemv"}, BF16),
        (linear_by_columns, 1, {"gemm"}, FP32),
        (linear, 1, {"gemm", "gemv"}, FP32),
        (linear, 3, {"gemv"}, BF16),
        (attention, 1, set(), BF16),
        (attention, 1, {"attention"}, FP32),
        (attention_by_name, 1, set(), BF16),
        (attention_by_name, 1, {"attention"}, FP32),
    ],
)
@pytest.mark.parametrize("is_listed", [True, False])
@pytest.mark.parametrize("slow_in", ["inference", "training"])
def test_what_is_slow_decides(  # noqa: PLR0917  # all that it depends on
    monkeypatch: pytest.MonkeyPatch,
    is_listed: bool,
    function: Callable[[Tensor, Tensor], Tensor],
    rows: int,
    slow_kinds: set[str],
    expected: torch.dtype,
    slow_in: str,
) -> None:
    """Whether or not gradients are recorded, and whichever of the two is slow.

    For products by whether their first matrix has a row or two, unless the numbers that a sum takes of the second lie
    apart in memory: no native kernel is fast there. For ops of the low-precision list, and for those that follow their
    first input there.
    """

    def measured(kind: str, *args: object) -> Capability:
        times = dict.fromkeys(("inference", "training"), 1.0)
        return Capability(None, **{**times, slow_in: 9.0 if kind in slow_kinds else 1.0})

    measured_by(monkeypatch, measured)
    ops = ["linear", "matmul", "scaled_dot_product_attention"]
    policy = hmpx.Policy.from_ops(low=ops) if is_listed else hmpx.Policy.from_ops(first=ops)
    dtype = FP32 if is_listed else BF16
    actual = []
    for records, learns in ((False, False), (True, False), (True, True)):
        x = torch.ones(rows, 256, dtype=dtype)
        weight = torch.ones(256, 256, dtype=dtype, requires_grad=learns)
        session = hmpx.convert(policy=policy, device_types={"cpu"})
        with session, torch.set_grad_enabled(records), Computed() as computed:
            function(x, weight)
        actual.append(computed.dtypes)
    assert actual == [{expected}] * 3


@pytest.mark.parametrize(
    ("inference", "training", "is_slow"),
    [
        (1.0, 1.0, False),
        (1.0, 2.5, True),
        (2.5, 1.0, True),
        (0.1, 2.8, False),  # a row or two: fp32 would be ten times as slow in inference
        (0.9, math.inf, True),
        (math.inf, math.inf, True),
        (None, None, False),
    ],
)
def test_the_worse_time_decides_unless_fp32_costs_more(
    inference: float | None, training: float | None, is_slow: bool
) -> None:
    assert Capability(None, inference, training).is_slow is is_slow


@pytest.mark.usefixtures("forgotten")
def test_what_is_legalized_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    measured_by(monkeypatch, lambda *question: Capability(None, 1.25, 3.5))
    with caplog.at_level("INFO", "hmpx"), hmpx.convert(device_types={"cpu"}):
        for records in (False, True, True):
            with torch.set_grad_enabled(records):
                F.conv2d(torch.ones(1, 2, 4, 4), torch.ones(2, 2, 3, 3))
    assert [
        record.getMessage() for record in caplog.records if "legalized" in record.getMessage()
    ] == [
        "convolution in bfloat16 on cpu is legalized, in inference and in training: native kernels take "
        "1.2 and 3.5 times as long as fp32 with casts"
    ]
