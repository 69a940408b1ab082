"""What a device does natively: measured once, anywhere, without leaving a trace; or as reported."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import hmpx
from hmpx import wrappers
from hmpx.casting import CallPlan, CallSite, OpFacts, Options
from hmpx.compute import missing_kernels
from hmpx.compute.legalize import capability, legalization
from hmpx.compute.legalize.capability import KINDS, SLOW, Capability
from hmpx.compute.legalize.legalization import LEGALIZE_MODES, is_slow, known_capability
from hmpx.errors import OptionError
from hmpx.ops import Parameters
from hmpx.policy.decisions import CastPolicy, Decision
from tests import forks

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
LOW = (BF16, FP16)


@pytest.fixture
def forgotten() -> Iterator[None]:
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
def test_it_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process, however often it is asked."""
    measured = []

    def measure(*args: object) -> Capability:
        measured.append(args[:3])
        return Capability(None, 1.0, 1.0)

    monkeypatch.setattr(capability, "_measured", measure)
    for _ in range(3):
        capability.capability("gemm", "cpu", BF16)
        capability.capability("gemm", "cpu", FP16)
    assert measured == [("gemm", "cpu", BF16), ("gemm", "cpu", FP16)]


@pytest.mark.usefixtures("forgotten")
@pytest.mark.skipif(
    time.get_clock_info("thread_time").resolution >= 1e-6, reason="the clock is too coarse"
)
def test_waiting_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it happens on a busy machine, to one of the two that are compared."""

    def wait(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is BF16:
            time.sleep(0.05)
        return tensor.exp()

    monkeypatch.setitem(capability._PROBES, "norm", (wait, ((512, 512),)))
    found = capability.capability("norm", "cpu", BF16)
    assert found.inference is not None
    assert found.training is not None
    assert found.inference < 10
    assert found.training < 10


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
    assert found.is_slow(training=True)
    assert found.is_slow(training=False)


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
    assert not found.is_slow(training=True)
    assert len(attempts) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "the speed of elementwise in bfloat16 on cpu can't be measured, so torch's kernels compute it: "
        "TypeError('not like this')"
    ]


@pytest.mark.usefixtures("forgotten")
def test_an_op_that_fails_in_fp32_too_is_no_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing it in fp32 would not help."""

    def fail(tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(capability._PROBES, "norm", (fail, ((2, 2),)))
    found = capability.capability("norm", "cpu", BF16)
    assert found == Capability(capability.reported("cpu", BF16))


@pytest.mark.usefixtures("forgotten")
def test_no_thread_is_an_answer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a process may have no more of them, or the interpreter is about to end."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    found = capability.capability("norm", "cpu", BF16)
    assert found == Capability(capability.reported("cpu", BF16))


@pytest.mark.usefixtures("forgotten")
def test_threads_that_ask_at_once_share_one_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them have its answer."""
    measured = []

    def measure(*args: object) -> Capability:
        time.sleep(0.2)
        measured.append(args)
        return Capability(None, 1.0, 1.0)

    monkeypatch.setattr(capability, "_measured", measure)
    answers = []
    together = threading.Barrier(8)

    def ask() -> None:
        together.wait()
        answers.append(capability.capability("gemm", "cpu", BF16))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert measured == [("gemm", "cpu", BF16)]
    assert answers == [Capability(None, 1.0, 1.0)] * 8
    assert len({id(answer) for answer in answers}) == 1


#: What a measurement calls, and what that calls in turn.
USED = (
    *("mm", "conv2d", "linear", "scaled_dot_product_attention", "layer_norm", "lstm", "gelu"),
    *("linspace", "ones_like", "view", "zeros", "bfloat16", "float", "sum", "is_same_size"),
)


class Counted(threading.Thread):
    """Counts its kind, and refuses to be one of many."""

    started = 0

    def start(self) -> None:
        assert Counted.started < 2 * len(KINDS)
        Counted.started += 1
        super().start()


def everything(*args: object) -> hmpx.Decision:
    return hmpx.ALLOW


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize(
    ("how", "legalize"),
    [
        *(("low", mode) for mode in LEGALIZE_MODES),
        *((how, "auto") for how in ("fp32", "widest", "first", "O2", "*", "log", "rules")),
    ],
)
def test_what_is_converted_does_not_matter(
    monkeypatch: pytest.MonkeyPatch, how: str, legalize: str
) -> None:
    """The ops that a measurement calls may stand in any list, or be observed, or decided by rules."""
    monkeypatch.setattr(threading, "Thread", Counted)
    monkeypatch.setattr(Counted, "started", 0)
    used = [name for name in USED if hmpx.ops.resolve(name) in hmpx.ops.computing()]
    names = {"*": ["*"], "log": ["*"]}.get(how, used)
    options: dict[str, Any] = {"legalize": legalize}
    if how == "O2":
        options["opt_level"] = "O2"
    else:
        cast_policy = how if how in {"fp32", "widest", "first"} else "low"
        options["policy"] = hmpx.Policy.from_ops(**{cast_policy: names})
    if how == "log":
        options["isVerbose"] = "once"
    if how == "rules":
        for name in used:
            hmpx.register_rule(name)(everything)
    try:
        with hmpx.convert(**options):
            weight = torch.ones(64, 64, dtype=BF16, requires_grad=True)
            result = F.gelu(F.layer_norm(F.linear(torch.ones(64, 64, dtype=BF16), weight), (64,)))
            torch.autograd.grad(result.sum(), weight)
            found = [capability.capability(kind, "cpu", BF16) for kind in KINDS]
    finally:
        if how == "rules":
            for name in used:
                hmpx.unregister_rule(name)
    assert Counted.started == len(KINDS)
    for each in found:
        assert each.inference is not None
        assert each.training is not None
        assert 0 < each.inference < math.inf
        assert 0 < each.training < math.inf


@pytest.mark.parametrize(
    ("inference", "training", "expected"),
    [
        (None, None, (False, False)),
        (SLOW, SLOW, (False, False)),
        (SLOW * 1.01, SLOW, (True, False)),
        (0.5, 100.0, (False, True)),
        (math.inf, math.inf, (True, True)),
    ],
)
def test_what_is_slow(
    inference: float | None, training: float | None, expected: tuple[bool, bool]
) -> None:
    """What takes more than `SLOW` times as long as fp32; not what has not been measured."""
    found = Capability(None, inference, training)
    assert (found.is_slow(training=False), found.is_slow(training=True)) == expected


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("kind", KINDS)
def test_is_slow_sums_up(kind: str, dtype: torch.dtype) -> None:
    """A kind is slow if any of its ops is, in training or not; products by few rows are gemm too."""
    names = ("gemm", "gemv") if kind == "gemm" else (kind,)
    known = [capability.capability(name, "cpu", dtype) for name in names]
    expected = any(c.is_slow(training=training) for c in known for training in (True, False))
    assert is_slow(kind, "cpu", dtype) is expected


# --- the first question, anywhere -----------------------------------------------------------------

#: Each context runs in a process of its own, forked from one in which nothing was measured.
SCRIPT = '''
import contextlib, faulthandler, os, signal, sys, threading, time, traceback
import torch
import torch._dynamo  # here, not in each process
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
import hmpx
from hmpx import Policy
from hmpx.compute.legalize import capability, legalization

torch.set_num_threads(2)
BF16 = torch.bfloat16


def ask():
    """Has some kinds measured; checks that it has been, and that nothing else has changed."""
    assert capability.capability.cache_info().currsize == 0
    before = state()
    for kind in ("gemm", "rnn", "norm"):
        found = capability.capability(kind, "cpu", BF16)
        assert 0 < found.inference < 1e9 and 0 < found.training < 1e9, found
    assert state() == before, (state(), before)


def state():
    return (
        torch._C._get_tracing_state(),
        torch.default_generator.get_state().numpy().tobytes() if is_plain else None,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_num_threads(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.get_autocast_dtype("cpu"),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_anomaly_enabled(),
        torch.get_default_device(),
        torch.is_warn_always_enabled(),
        len(torch.overrides._get_current_function_mode_stack()),
        torch._C._len_torch_dispatch_stack(),
        threading.active_count(),
    )


is_plain = True
seen = []


def called(name):
    def hook(tensor):
        seen.append((name, tensor.shape))
        return tensor
    return hook


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if "mm" in str(func):
            seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "mm" in str(func):
            seen.append(str(func))
        return func(*args, **(kwargs or {}))


def within(*contexts):
    def run():
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            ask()
    return run


def in_fake_mode():
    global is_plain
    is_plain = False
    with FakeTensorMode():
        ask()


def in_checkpoint(use_reentrant):
    def run():
        global is_plain
        is_plain = False
        asked = []

        def function(a):
            if not asked:
                asked.append(ask())
            return a * 2

        a = torch.ones(2, requires_grad=True)
        checkpoint(function, a, use_reentrant=use_reentrant, preserve_rng_state=True).sum().backward()
        assert a.grad.tolist() == [2, 2] and asked
    return run


def in_vmap():
    global is_plain
    is_plain = False

    def function(a):
        ask()
        return a * 2

    torch.func.vmap(torch.func.grad(lambda a: function(a).sum()))(torch.ones(3, 2))


def in_compile():
    compiled = torch.compile(lambda a, w: F.linear(a, w), backend="aot_eager", fullgraph=True)
    with hmpx.convert(policy=Policy.from_ops(low=["linear"]), legalize="auto"):
        random = torch.get_rng_state()
        assert capability.capability.cache_info().currsize == 0
        assert compiled(torch.ones(8, 64), torch.ones(64, 64)).dtype is BF16
        assert capability.capability.cache_info().currsize > 0
        assert torch.equal(torch.get_rng_state(), random)
        assert torch.get_num_threads() == 2


def in_backward():
    class Asking(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            return a.clone()

        @staticmethod
        def backward(ctx, gradient):
            ask()
            return gradient

    Asking.apply(torch.ones(2, requires_grad=True)).sum().backward()


def in_default(dtype):
    def run():
        torch.set_default_dtype(dtype)
        ask()
    return run


def in_default_device():
    torch.set_default_device("meta")
    try:
        ask()
    finally:
        torch.set_default_device(None)


def in_deterministic_mode():
    torch.use_deterministic_algorithms(True)
    ask()


def without_gradients():
    torch.set_grad_enabled(False)
    ask()


def in_conversion_of_everything():
    with hmpx.convert(policy=Policy.from_ops(low=["*"])):
        ask()


def forked_meanwhile():
    """Forks while another thread asks: parent and child both know, and can measure more."""
    measured = capability._measured

    def slowly(*args):
        time.sleep(0.3)
        return measured(*args)

    capability._measured = slowly
    thread = threading.Thread(target=capability.capability, args=("gemm", "cpu", BF16))
    thread.start()
    while not capability._running:
        time.sleep(0.001)
    child = os.fork()
    faulthandler.dump_traceback_later(60, exit=True)
    if child == 0:
        try:
            for kind in ("gemm", "norm"):
                assert 0 < capability.capability(kind, "cpu", BF16).inference < 1e9
            os._exit(0)
        finally:
            os._exit(1)
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert 0 < capability.capability("norm", "cpu", BF16).inference < 1e9


def forked_by_a_signal():
    """Forks in the thread that waits for its answer."""
    measured = capability._measured
    children = []

    def slowly(*args):
        time.sleep(0.3)
        return measured(*args)

    capability._measured = slowly
    main = os.getpid()
    signal.signal(signal.SIGALRM, lambda *args: children.append(os.fork()))
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    found = capability.capability("gemm", "cpu", BF16)
    assert 0 < found.inference < 1e9 and len(children) == 1
    if os.getpid() != main:
        os._exit(0)
    faulthandler.dump_traceback_later(60, exit=True)
    assert os.waitpid(children[0], 0)[1] == 0


def in_thread():
    errors = []

    def run():
        try:
            ask()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not errors, errors


def no_hooks():
    return torch.autograd.graph.saved_tensors_hooks(called("pack"), called("unpack"))


CONTEXTS = {
    "nothing": ask,
    "no_grad": within(torch.no_grad),
    "inference_mode": within(torch.inference_mode),
    "autocast": within(lambda: torch.autocast("cpu", dtype=BF16)),
    "saved_tensors_hooks": within(no_hooks),
    "disabled hooks": within(lambda: torch.autograd.graph.disable_saved_tensors_hooks("none")),
    "function mode": within(Functions),
    "dispatch mode": within(Dispatched),
    "default device": within(lambda: torch.device("meta")),
    "disable_casts": within(hmpx.disable_casts),
    "FakeTensorMode": in_fake_mode,
    "checkpoint": in_checkpoint(False),
    "reentrant checkpoint": in_checkpoint(True),
    "vmap of grad": in_vmap,
    "torch.compile": in_compile,
    "backward": in_backward,
    "default dtype float64": in_default(torch.float64),
    "default dtype bfloat16": in_default(BF16),
    "default device, set": in_default_device,
    "deterministic mode": in_deterministic_mode,
    "anomaly mode": within(lambda: torch.autograd.set_detect_anomaly(True)),
    "set_grad_enabled": without_gradients,
    "fork": forked_meanwhile,
    "fork by a signal": forked_by_a_signal,
    "a conversion": in_conversion_of_everything,
    "another thread": in_thread,
}

failed = 0
for name, run in CONTEXTS.items():
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run()
            assert not seen, seen
            code = 0
        except BaseException:
            print(f"--- {name}", file=sys.stderr)
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    failed += os.waitpid(child, 0)[1] != 0
sys.exit(failed != 0)
'''


def test_the_first_question_may_come_anywhere() -> None:
    """In modes, transforms, hooks and compilation: all is measured, and nothing left changed."""
    done = forks.run("-W", "ignore::FutureWarning", "-c", SCRIPT)
    assert done.returncode == 0, done.stderr


# --- reported -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("device_type", ["hpu", "xpu", "mps", "mtia", "privateuseone", "meta"])
def test_accelerators_are_taken_at_their_word(device_type: str, dtype: torch.dtype) -> None:
    """Nothing is measured there, and nothing slow."""
    assert capability.reported(device_type, dtype) is True
    for kind in KINDS:
        assert capability.capability(kind, device_type, dtype) == Capability(True)
        assert not is_slow(kind, device_type, dtype)


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
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: version)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert (capability.reported("cuda", BF16), capability.reported("cuda", FP16)) == expected


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize(
    ("device_type", "said", "is_measured"),
    [
        ("cpu", True, True),
        ("cpu", False, True),
        ("cpu", None, True),
        ("cuda", True, False),
        ("cuda", None, False),
        ("cuda", False, True),
    ],
)
def test_what_is_measured(
    monkeypatch: pytest.MonkeyPatch, device_type: str, said: bool | None, is_measured: bool
) -> None:
    """Every CPU, whatever it says; an accelerator only if it says that it lacks the dtype."""
    monkeypatch.setattr(capability, "reported", lambda *args: said)
    measured = Capability(said, 3.0, 3.0)
    monkeypatch.setattr(capability, "_measured", lambda *args: measured)
    found = capability.capability("gemm", device_type, BF16)
    assert found == (measured if is_measured else Capability(said))


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

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    versions = {None: (8, 0), 0: (8, 0), 1: (7, 5)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: versions[index])
    monkeypatch.setattr(torch.cuda, "device", Card)
    monkeypatch.setattr(capability, "_measured", measure)
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
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    known = known_capability("gemm", "cuda:1", BF16)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert known_capability("gemm", "cuda:1", BF16) == known == Capability(False, 3.0, 3.0)
    assert not known_capability("norm", "cuda:1", BF16).is_slow(training=True)
    assert len(two_cards) == 1
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert known_capability("norm", "cuda:1", BF16).is_slow(training=True)
    assert len(two_cards) == 2


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


def listed(function: Callable[..., Any]) -> Any:
    """Returns the wrapper of a function that is in the low-precision list."""
    parameters = Parameters(("x",), {0: "T"}, 1, frozenset())
    decision = Decision(CastPolicy.LOW, BF16)
    site = CallSite("gelu", "torch.gelu", parameters)
    options = Options(legalize="never")
    plan = CallPlan(site, OpFacts(), decision, frozenset({"cpu"}), options)
    return wrappers.make_wrapper(function, plan)


def lacking(function: Callable[..., Any]) -> Any:
    """Returns what completes a function that lacks kernels for some calls."""
    callee = missing_kernels.Callee("polar", function, ("x",), frozenset(), False, False)
    some = frozenset({("cpu", BF16)})
    return missing_kernels.completed(callee, missing_kernels.Lacking(sometimes=some))


@pytest.mark.parametrize("made", [listed, lacking])
def test_exhausted_memory_is_no_reason_to_compute_in_fp32(
    made: Callable[[Callable[..., Any]], Any],
) -> None:
    """Which takes more: the call fails as it does without hmpx."""
    dtypes = []

    def count(x: Tensor) -> Tensor:
        dtypes.append(x.dtype)
        return exhaust(x)

    with pytest.raises(torch.OutOfMemoryError):
        made(count)(torch.ones(2, dtype=BF16))
    assert dtypes == [BF16]


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

    monkeypatch.setattr(capability, "_measured", measure)
    with hmpx.convert(legalize=legalize):
        assert not asked
        torch.ones(64, 64) @ torch.ones(64, 64)
        assert bool(asked) is asks


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("cpu_is_slow", [True, False])
@pytest.mark.parametrize("device_types", [{"meta"}, {"cpu", "meta"}])
def test_each_device_type_is_settled_for_itself(
    monkeypatch: pytest.MonkeyPatch, device_types: set[str], cpu_is_slow: bool
) -> None:
    """Where torch's kernels are fast, nobody asks again, whatever is so on other device types."""
    ratio = math.inf if cpu_is_slow else 1.0
    monkeypatch.setattr(capability, "_measured", lambda *args: Capability(None, ratio, ratio))
    asked = []
    applies = legalization.Legalization.applies

    def note(self: legalization.Legalization, inputs: Any, *args: Any) -> bool:
        asked.append(inputs.first.device.type)
        return applies(self, inputs, *args)

    monkeypatch.setattr(legalization.Legalization, "applies", note)
    with hmpx.convert(device_types=device_types, lists="hmp"), Computed() as computed:
        for low in (False, True):
            for device in ("meta", "cpu") * 3:
                x = torch.ones(64, 64, device=device)
                x = x.bfloat16() if low else x
                result = [torch.mm(x, x), torch.relu(x), F.linear(x, x), x @ x]
                is_cast = low or device in device_types
                assert {each.dtype for each in result} == {BF16 if is_cast else FP32}
    ops = 4
    # In each of six rounds where it stays open, in the first one elsewhere.
    on_cpu = 6 * ops if cpu_is_slow else ops
    assert asked.count("meta") == ops
    assert asked.count("cpu") == (on_cpu if "cpu" in device_types else 0)
    is_legalized = cpu_is_slow and "cpu" in device_types
    assert computed.dtypes == (
        {BF16, FP32} if is_legalized or "cpu" not in device_types else {BF16}
    )


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("is_slow", [False, True])
def test_wrappers_ask_no_more_once_all_is_settled(
    monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    """Where torch's kernels are fast they are called as if nothing was ever legalized."""
    ratio = 9.0 if is_slow else 1.0
    monkeypatch.setattr(capability, "reported", lambda *args: True)
    monkeypatch.setattr(capability, "_measured", lambda *args: Capability(True, ratio, ratio))
    x = torch.ones(64, 64).requires_grad_()
    with hmpx.convert(lists="hmp", legalize="auto"):
        control = vars(torch.mm)["__hmpx_control__"]
        values = [control.legalizes]
        torch.mm(x, x)
        values.append(control.legalizes)
    assert values == [True, is_slow]


@pytest.mark.usefixtures("forgotten")
def test_small_products_settle_nothing_for_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are left to torch's kernels for their size, on hardware that is said to have the dtype."""
    monkeypatch.setattr(capability, "reported", lambda *args: True)
    monkeypatch.setattr(capability, "is_reported_of_all", lambda *args: True)
    monkeypatch.setattr(capability, "_measured", lambda *args: Capability(True, 9.0, 9.0))
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
        (linear, 1, {"gemm"}, (BF16, FP32, FP32)),
        (linear, 2, {"gemm"}, (BF16, FP32, FP32)),
        (linear, 3, {"gemm"}, (FP32, FP32, FP32)),
        (matmul, 1, {"gemm"}, (BF16, FP32, FP32)),
        (matmul, 2, {"gemm"}, (BF16, FP32, FP32)),
        (matmul, 3, {"gemm"}, (FP32, FP32, FP32)),
        (matmul, 1, {"gemm", "gemv"}, (FP32, FP32, FP32)),
        (matmul, 1, {"gemv"}, (FP32, BF16, BF16)),
        (matmul, 3, {"gemv"}, (BF16, BF16, BF16)),
        (matmul_by_rows, 1, {"gemm"}, (FP32, FP32, FP32)),
        (matmul_by_rows, 2, {"gemv"}, (BF16, BF16, BF16)),
        (linear_by_columns, 1, {"gemm"}, (FP32, FP32, FP32)),
        (linear, 1, {"gemm", "gemv"}, (FP32, FP32, FP32)),
        (linear, 3, {"gemv"}, (BF16, BF16, BF16)),
        (attention, 1, set(), (BF16, FP32, FP32)),
        (attention, 1, {"attention"}, (FP32, FP32, FP32)),
        (attention_by_name, 1, set(), (BF16, FP32, FP32)),
        (attention_by_name, 1, {"attention"}, (FP32, FP32, FP32)),
    ],
)
@pytest.mark.parametrize("is_listed", [True, False])
def test_what_is_slow_decides(  # noqa: PLR0917  # all that it depends on
    monkeypatch: pytest.MonkeyPatch,
    is_listed: bool,
    function: Callable[[Tensor, Tensor], Tensor],
    rows: int,
    slow_kinds: set[str],
    expected: tuple[torch.dtype, ...],
) -> None:
    """In inference, and where gradients are recorded, whether or not an input requires one.

    In a checkpoint's forward nothing tells whether it does. For products by whether their first matrix has a row or two,
    unless the numbers that a sum takes of the second lie apart in memory: no native kernel is fast there. For ops of the low-precision list,
    and for those that follow their first input there.
    """

    def measured(kind: str, *args: object) -> Capability:
        training = 9.0 if kind in slow_kinds | {"attention"} else 1.0
        return Capability(None, 9.0 if kind in slow_kinds else 1.0, training)

    monkeypatch.setattr(capability, "_measured", measured)
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
    assert actual == [{each} for each in expected]
