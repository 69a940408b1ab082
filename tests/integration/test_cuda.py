"""What only a GPU can show; `python scripts/gpu.py` runs these first and prints one table.

Tests note what they have measured as the property ``figure``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db

import hmpx
from hmpx import compute, ops
from tests.integration.test_no_less_right import less_right
from tests.integration.test_opinfo_conformance import INFOS, LEFT_OUT, current

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

#: The ops are tested in so many parts, which may run at a time.
PARTS = 8

COUNTED = Path(__file__).parents[2] / "benchmarks" / "results" / "kernel_counts-fake_cuda.json"


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4)).cuda()


class Broadcast(nn.Module):
    """A product with a broadcast matrix, of which autograd keeps a copy in another layout."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 1, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x.view(-1, 2, 4) @ self.weight).sum(0).view(-1, 4)


def test_only_tensors_on_the_gpu_are_cast_by_default() -> None:
    """The data pipeline on the CPU stays fp32."""
    with hmpx.convert() as session:
        assert session.device_types == {"cuda"}
        assert network()(torch.randn(2, 16, device="cuda")).dtype is BF16
        assert F.linear(torch.randn(2, 4), torch.randn(3, 4)).dtype is FP32


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.BatchNorm1d(8), nn.InstanceNorm1d(8)]
)
def test_low_norms_return_the_low_type(norm: nn.Module) -> None:
    """Whatever their kernel takes beside a low input."""
    shape = (4, 8) if isinstance(norm, nn.LayerNorm) else (4, 8, 6)
    x = torch.randn(shape, device="cuda", requires_grad=True)
    norm.cuda()
    expected = norm(x.detach().bfloat16().float())
    with hmpx.convert(lists="lean"):
        actual = norm(x.bfloat16())
        actual.float().sum().backward()
    assert actual.dtype is BF16
    torch.testing.assert_close(actual.float(), expected, rtol=2**-6, atol=2**-6)
    assert x.grad is not None and x.grad.dtype is FP32


@pytest.mark.filterwarnings("error:RNN module weights are not part of single contiguous chunk")
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}])
@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU, nn.RNN])
def test_cudnn_takes_the_casts_of_weights_as_they_lie(
    cls: type[nn.Module], options: dict[str, Any]
) -> None:
    """And frozen weights: it copies them into no other chunk, of which it warns."""
    torch.manual_seed(0)
    module, x = cls(16, 32, **options).cuda(), torch.randn(5, 3, 16, device="cuda")
    expected = module(x)[0]
    with hmpx.convert(lists="autocast-cuda"):
        actual = module(x)[0]
        assert actual.dtype is BF16
        torch.testing.assert_close(actual.float(), expected, rtol=2**-5, atol=2**-5)
        actual.float().sum().backward()
        module.zero_grad()
        with torch.no_grad():
            converted = module.eval()(x)[0]
            with hmpx.freeze(module, x, outputs="keep"):
                torch.testing.assert_close(module(x)[0], converted, rtol=0, atol=0)
        assert len({p.untyped_storage().data_ptr() for p in module.parameters()}) == 1


def test_loss_scaling_in_fp16_trains_as_in_fp32() -> None:
    """With torch's own GradScaler: gradients and parameters are fp32."""
    x = torch.randn(64, 16, device="cuda")
    y = torch.randint(4, (64,), device="cuda")

    def losses() -> list[float]:
        model, scaler = network(), torch.amp.GradScaler("cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for _ in range(10):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {FP32}
            scaler.step(optimizer)
            scaler.update()
            found.append(loss.item())
        return found

    expected = losses()
    with hmpx.convert(low_precision_type=FP16):
        actual = losses()
    assert actual == pytest.approx(expected, rel=0.05)
    assert actual[-1] < actual[0]


@pytest.mark.parametrize("region", [BF16, FP16])
def test_the_lists_win_inside_an_autocast_region(region: torch.dtype) -> None:
    a = torch.randn(4, 4, device="cuda")

    def outcome() -> list[Tensor]:
        return [a @ a, F.linear(a, a), torch.softmax(a @ a, -1), F.layer_norm(a, (4,))]

    with hmpx.convert():
        expected = outcome()
        with torch.autocast("cuda", region):
            actual = outcome()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("lists", ["hmpx", "autocast-cuda"])
@pytest.mark.parametrize(
    "call",
    [lambda t: torch.ldexp(t, t), lambda t: torch.mvlgamma(t + 1, 1)],
    ids=["ldexp", "mvlgamma"],
)
def test_ops_that_autocast_upcasts_inside_return_fp32(
    call: Callable[[Tensor], Tensor], lists: str
) -> None:
    """Fake tensors decompose them before torch.autocast sees the inner `pow` or `sum`."""
    low = torch.rand(4, 4, device="cuda", dtype=BF16)
    exact = call(low.double())
    with torch.autocast("cuda", BF16):
        peer = call(low)
    with hmpx.convert(lists=lists):
        actual = call(low)
    assert actual.dtype is peer.dtype is FP32
    assert (actual - exact).norm() <= (peer - exact).norm() + 1e-6


# --- what is counted on fake devices, here on real ones -------------------------------------------


@pytest.mark.models
@pytest.mark.parametrize("candidate", ["hmpx", "hmpx autocast-cuda", "hmpx products"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "resnet"])
def test_kernels_are_those_counted_on_fake_devices(
    name: str, candidate: str, record_property: Callable[[str, object], None]
) -> None:
    """Casts are as docs/evidence/speed.md has them, but one by one in this mode; attention is taken apart otherwise."""
    pytest.importorskip("transformers")
    models = pytest.importorskip("tests.fake_cuda.models")
    candidates = pytest.importorskip("tests.fake_cuda.candidates")
    steps = pytest.importorskip("tests.fake_cuda.steps")
    counted = json.loads(COUNTED.read_text("utf-8"))["figures"][name]

    def figures(candidate: str) -> dict[str, int]:
        is_peer = candidate == "autocast"
        region = torch.autocast("cuda", BF16) if is_peer else contextlib.nullcontext()
        options = candidates.CANDIDATES[candidate].options
        with contextlib.ExitStack() as stack:
            if options is not None:
                stack.enter_context(hmpx.convert(**options))
            with torch.device("cuda"):
                step = models.make(name)
            kernels = stack.enter_context(steps.Kernels("cuda", step.model.parameters()))
            with region:
                loss = step.loss(step.model(**step.inputs))
            loss.backward()
        return steps.summary(kernels.list)

    actual, peer, plain = figures(candidate), figures("autocast"), figures("fp32")
    more = {key: actual[key] - peer[key] for key in ("casts", "kernels", "waits")}
    record_property("figure", f"over autocast's: {more}")
    expected = counted[candidate]["casts"] - counted["autocast"]["casts"]
    assert more["casts"] <= expected + 4  # of masks, which versions of models make
    # The backward of attention in fp32 reads its seed on the host, with and without a conversion.
    assert actual["waits"] <= max(peer["waits"], plain["waits"])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lists": "autocast-cuda"},
        {"lists": "hmp"},
        {"legalize": "always"},
        {"keep_weight_casts": False},
        {"low_precision_type": "float8_e4m3fn_delayed"},
        {"low_precision_type": "nvfp4"},
    ],
    ids=str,
)
def test_a_step_does_not_wait_for_the_device(options: dict[str, Any]) -> None:
    """No value is read back, which a debug mode of torch's would raise for."""
    model, x = network(), torch.randn(8, 16, device="cuda")
    model.append(Broadcast().cuda())
    y = torch.randint(4, (8,), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with hmpx.convert(**options):
        for step in range(3):
            torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first one measures
            try:
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")


def test_peak_memory_is_at_most_that_of_autocast(
    record_property: Callable[[str, object], None],
) -> None:
    def peak(region: contextlib.AbstractContextManager[Any]) -> int:
        torch.manual_seed(0)
        blocks = [
            nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 512), nn.GELU()) for _ in range(8)
        ]
        model = nn.Sequential(*blocks).cuda()
        x = torch.randn(4096, 512, device="cuda")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        with region:
            loss = model(x).float().square().mean()
        loss.backward()
        return torch.cuda.max_memory_allocated()

    expected = min(
        peak(torch.autocast("cuda", BF16)) for _ in range(2)
    )  # the first one has workspaces made
    with hmpx.convert():
        actual = min(peak(contextlib.nullcontext()) for _ in range(2))
    record_property("figure", f"{actual / expected:.2f} of autocast's")
    assert actual <= expected


# --- CUDA graphs ----------------------------------------------------------------------------------

WARM_UP, REPLAYS = 3, 4


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """Returns what replays a step, which runs `WARM_UP` times before it is captured, as torch advises."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


class Sequences(nn.Module):
    """An LSTM, and a product with a broadcast matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.product = nn.LSTM(8, 4), Broadcast()

    def forward(self, x: Tensor) -> Tensor:
        return self.product(self.lstm(x.view(-1, 2, 8))[0])  # type: ignore[no-any-return]


#: Networks that take [8, 16].
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": network,
    "attention": lambda: nn.Sequential(
        nn.Unflatten(1, (4, 4)), nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
    ),
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()
    ),
    "sequences": Sequences,
}


class Training:
    """A converted training on batches that are the same for every instance.

    Its ``run`` is the part of a step before the optimizer's.
    """

    def __init__(self, name: str, *, scales: bool = False) -> None:
        torch.manual_seed(0)
        self.model = NETWORKS[name]().cuda()
        self.x = torch.ones(8, 16, device="cuda", requires_grad=True)
        self.scaler = torch.amp.GradScaler("cuda", enabled=scales)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, capturable=True)

    def run(self) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(self.x).float().square().mean()).backward()

    def step(self) -> None:
        self.run()
        self.optimizer.step()

    def results(self, step: Callable[[], object]) -> list[list[Tensor]]:
        """Returns the parameters after each of several steps, between which the program changes a weight as well."""
        found = []
        for number in range(REPLAYS):
            with torch.no_grad():
                self.x.copy_(torch.full((8, 16), 0.1 * number).cumsum(1))
                next(self.model.parameters()).mul_(1.01)
            step()
            found.append([p.detach().clone() for p in self.model.parameters()])
        return found


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "fp16": {"low_precision_type": FP16},
    "cast again": {"keep_weight_casts": False},
    "reused": {"reuse_casts": True},
    "legalized": {"legalize": "always"},
    "autocast's": {"lists": "autocast-cuda"},
    "float8": {"low_precision_type": "float8_e4m3fn"},
    "delayed": {"low_precision_type": "float8_e4m3fn_delayed"},
    "nvfp4": {"low_precision_type": "nvfp4"},
}


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Has cuDNN add up in one order."""
    with torch.backends.cudnn.flags(deterministic=True):
        yield


@pytest.mark.usefixtures("deterministic")
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of LSTMs in fp16
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_captured_step_has_the_bits_of_others(name: str, options: str) -> None:
    """It casts the weights as they are at each replay: after its own update, and after that of the program."""
    with hmpx.convert(**OPTIONS[options]):
        plain, training = Training(name), Training(name)
        for _ in range(WARM_UP):
            plain.step()
        expected = plain.results(plain.step)
        actual = training.results(captured(training.step))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert not torch.equal(expected[0][0], expected[1][0])


@pytest.mark.usefixtures("deterministic")
def test_a_captured_step_with_loss_scaling() -> None:
    """The scaler's and the optimizer's steps read the device, so they follow the replay."""
    with hmpx.convert(low_precision_type=FP16):
        plain, training = (Training("perceptron", scales=True) for _ in range(2))

        def finish(each: Training, run: Callable[[], object]) -> None:
            run()
            each.scaler.step(each.optimizer)
            each.scaler.update()

        for each in (plain, training):
            finish(each, each.run)
        expected = plain.results(lambda: finish(plain, plain.run))
        replay = captured(training.run)
        actual = training.results(lambda: finish(training, replay))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("options", ["default", "fp16", "cast again", "legalized", "float8"])
@pytest.mark.parametrize("name", ["perceptron", "attention", "sequences"])
def test_graphed_callables_have_the_bits_of_others(name: str, options: str) -> None:
    """`torch.cuda.make_graphed_callables` runs a model's forward and its backward as a graph each."""
    with hmpx.convert(**OPTIONS[options]):
        plain, training = Training(name), Training(name)
        expected = plain.results(plain.step)
        training.model = torch.cuda.make_graphed_callables(training.model, (training.x,))
        actual = training.results(training.step)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_graphed_callables_keep_histories() -> None:
    """With delayed scaling each optimizer step ends a step of the histories, although only the device saw amaxes."""
    with hmpx.convert(**OPTIONS["delayed"]) as session:
        training = Training("perceptron")
        training.model = torch.cuda.make_graphed_callables(training.model, (training.x,))
        training.step()
        before = session.histories.state_dict()
        for _ in range(3):
            with torch.no_grad():
                training.x.mul_(10)
            training.step()
        after = session.histories.state_dict()
    inputs = [key for key in before if ":input:" in key]
    assert inputs
    assert all(after[key]["steps"] == before[key]["steps"] + 3 for key in before)
    assert any(after[key]["reference"] > 100 * before[key]["reference"] for key in inputs)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("options", ["default", "cast again", "float8"])
def test_compiled_graphs_have_the_bits_of_compiled_code(options: str) -> None:
    """``mode="reduce-overhead"`` replays what the default mode runs; weights change between the replays."""

    def results(mode: str | None) -> list[list[Tensor]]:
        torch.compiler.reset()
        training = Training("perceptron")
        training.model = torch.compile(training.model, mode=mode, fullgraph=True)  # type: ignore[assignment]

        def step() -> None:
            torch.compiler.cudagraph_mark_step_begin()
            training.step()

        for _ in range(WARM_UP):
            step()
        return training.results(step)

    with hmpx.convert(**OPTIONS[options]):
        expected, actual = results(None), results("reduce-overhead")
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_what_may_stand_in_a_capture() -> None:
    """`disable_casts`, logs, and observers that read no values; a graph keeps its casts after `revert`."""
    model, x = network(), torch.randn(8, 16, device="cuda")
    found: list[Tensor] = []

    def step() -> None:
        low = model(x)
        with hmpx.disable_casts():
            found[:] = [low, model(x)]

    with hmpx.convert(verbose="once"), torch.no_grad():
        with hmpx.record() as records, hmpx.watch(mode="collect") as watched:
            replay = captured(step)
        x.normal_()
        expected = [model(x)]
    expected.append(model(x))
    replay()
    assert [each.dtype for each in found] == [BF16, FP32]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert sum(row.calls for row in records.rows if row.op == "linear") == 4 * (WARM_UP + 1)
    assert watched.first is None


# --- kernels that are there, and those that are not -----------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_no_kernel_is_missing_that_is_not_known(dtype: torch.dtype) -> None:
    """What OpInfo says runs, runs, or hmpx computes it in fp32 without trying."""
    missing = []
    for info in op_db:
        name = ops.resolve(info.name)
        lacking = compute.lacking_kernels().get(name) if name is not None else None
        is_known = lacking is not None and ("cuda", dtype) in lacking.always
        if dtype not in info.supported_dtypes("cuda") or is_known or info.name == "sparse.mm":
            continue  # sparse.mm has kernels for some layouts, and is tried
        try:
            samples = info.sample_inputs("cuda", dtype, requires_grad=False)
            sample = next(iter(samples))
        except (RuntimeError, NotImplementedError, StopIteration, TypeError):
            continue
        try:
            info.op(sample.input, *sample.args, **sample.kwargs)
        except (RuntimeError, NotImplementedError):
            missing.append(info.name)
    assert not missing


#: Its OpInfo passes what a wrapped op returns to ATen's own overload, below every wrapper.
POOL_BACKWARD = "max_pool2d_with_indices_backward"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lists", ["hmpx", "hmp", "o2", "autocast-cuda"])
def test_nothing_that_runs_in_fp32_stops(lists: str) -> None:
    """The first sample of each OpInfo, in fp32 and in bf16, under each of the shipped sets."""
    stopped = []
    for info in op_db:
        if FP32 not in info.supported_dtypes("cuda") or info.name in {*LEFT_OUT, POOL_BACKWARD}:
            continue
        try:
            sample = next(iter(info.sample_inputs("cuda", FP32, requires_grad=False)))
            info.op(sample.input, *sample.args, **sample.kwargs)
        except Exception:  # then it is torch's own
            continue
        call = current(info.op)
        with hmpx.convert(lists=lists):
            for dtype in (FP32, BF16):
                low = sample.transform(
                    lambda v, d=dtype: v.to(d) if isinstance(v, Tensor) and v.dtype is FP32 else v
                )
                try:
                    call(low.input, low.args, low.kwargs)
                except Exception as error:
                    stopped.append(f"{info.name} on {dtype}: {error}"[:200])
    assert not stopped


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("with_gradients", [False, True], ids=["outputs", "gradients"])
@pytest.mark.parametrize("part", range(PARTS))
def test_no_op_is_less_right_than_under_autocast(
    part: int, with_gradients: bool, record_property: Callable[[str, object], None]
) -> None:
    """Every OpInfo op on low and mixed inputs; an error is the distance to float64 on the card."""
    peer = functools.partial(torch.autocast, "cuda", BF16)
    found = []
    for info in INFOS[part::PARTS]:
        if info.name.startswith("_"):
            continue
        found += less_right(info, peer, "cuda", with_gradients)
    found = list(dict.fromkeys(found))
    record_property("figure", "; ".join(found))
    assert not found


# --- numbers on the CPU, forks ---------------------------------------------------


def test_numbers_on_the_cpu_beside_low_tensors() -> None:
    x = torch.ones(4, 4, device="cuda", dtype=BF16)
    with hmpx.convert():
        x[torch.tensor([0, 1], device="cuda")] = torch.tensor(0.3)
        assert torch.heaviside(x, torch.tensor(0.5)).dtype is BF16
        assert torch.lerp(x, x, torch.tensor(0.5)).dtype is BF16


FORKS = """
import torch, hmpx
hmpx.convert()
assert not torch.cuda.is_initialized()

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return torch.ones(4, device="cuda") * i

loader = torch.utils.data.DataLoader(Data(), num_workers=2, multiprocessing_context="fork")
print(sum(x.cpu().sum().item() for x in loader))
"""


def test_forked_workers_may_use_the_device() -> None:
    """`convert` initializes nothing."""
    result = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=300, check=False
    )
    assert (result.returncode, result.stdout.strip()) == (0, "24.0"), result.stderr


# --- compiled code, and what the card is said to do -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_code_is_as_eager(record_property: Callable[[str, object], None]) -> None:
    """By Inductor and Triton, forward and backward."""
    x = torch.randn(64, 16, device="cuda")

    def gradients(compile_it: bool) -> list[Tensor]:
        model = network()
        run = torch.compile(model, fullgraph=True) if compile_it else model
        y = run(x)
        y.float().square().mean().backward()
        return [y, *[p.grad for p in model.parameters() if p.grad is not None]]

    with hmpx.convert():
        expected, actual = gradients(False), gradients(True)
    errors = [
        float((a.float() - e.float()).detach().norm() / e.float().detach().norm())
        for a, e in zip(actual, expected, strict=True)
    ]
    record_property("figure", f"relative error {max(errors):.1e}")
    assert max(errors) < 2**-6


@pytest.mark.filterwarnings("ignore")
def test_runs_on_the_cpu_and_on_the_card_are_compared(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """In fp32, in bfloat16, and compiled: rounding explains all. Tracing changes no bit of eager code."""

    def train(
        path: Path | None, device: str, *, low: bool = False, compiled: bool = False
    ) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
        model, x = model.to(device), torch.randn(64, 16).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = torch.compile(model) if compiled else model
        with contextlib.ExitStack() as stack:
            if low:
                stack.enter_context(hmpx.convert())
            if path:
                stack.enter_context(hmpx.trace(path))
            for _ in range(2):
                optimizer.zero_grad()
                run(x).float().square().mean().backward()
                optimizer.step()
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    train(tmp_path / "cpu", "cpu")
    counts = {}
    for name, options in {
        "card": {},
        "low": {"low": True},
        "compiled": {"compiled": True},
        "low, compiled": {"low": True, "compiled": True},
    }.items():
        plain = train(None, "cuda", **options)
        rtol = 2**-6 if options.get("compiled") else 0  # Triton fuses otherwise
        traced = train(tmp_path / name, "cuda", **options)
        torch.testing.assert_close(traced, plain, rtol=rtol, atol=rtol)
        found = hmpx.diff_runs(tmp_path / "cpu", tmp_path / name)
        assert found.first is None, str(found)
        counts[name] = found.counts
    record_property("figure", counts)


def test_the_card_is_measured_once_and_not_legalized(
    record_property: Callable[[str, object], None],
) -> None:
    """A card with bf16 units runs products as they are."""
    with hmpx.convert():
        F.linear(torch.randn(64, 64, device="cuda"), torch.randn(64, 64, device="cuda"))
    known = compute.capability("linear", "cuda:0", BF16)
    record_property("figure", f"reported: {known.reported}, bf16 over fp32: {known.inference}")
    if torch.cuda.is_bf16_supported(including_emulation=False):
        assert known.reported
        assert known.inference is None or known.inference < 2


# --- sums and statistics in fp32 --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_accumulating_products_are_nearer_to_fp64(dtype: torch.dtype) -> None:
    """Outputs and gradients are those of float64, rounded once: no element is off by two units."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs bfloat16 products")
    x = torch.randn(64, 4096, device="cuda")
    weight, bias = torch.randn(32, 4096, device="cuda"), torch.randn(32, device="cuda")

    def outcome(*inputs: Tensor) -> list[Tensor]:
        inputs = tuple(t.detach().requires_grad_() for t in inputs)
        result = F.linear(*inputs)
        ones = torch.ones_like(result)
        return [result.detach(), *torch.autograd.grad(result, inputs, ones)]

    exact = outcome(*[t.to(dtype).double() for t in (x, weight, bias)])
    policy = {"lists": "none", "low": ["linear accumulate=float32"], "low_precision_type": dtype}
    with hmpx.convert(policy=policy):
        actual = outcome(x, weight, bias)
    assert [t.dtype for t in actual] == [dtype, FP32, FP32, FP32]
    unit = torch.finfo(dtype).eps
    for got, wanted in zip(actual, exact, strict=True):
        # Near zero sums of fp32 cancel: 2**-24 of the terms' size, 4096 of them.
        torch.testing.assert_close(got.double(), wanted, rtol=unit, atol=2**-12)


def test_group_norms_keep_exact_statistics() -> None:
    """A mean of a hundred deviations does not cost the deviation its digits."""
    x = torch.randn(4, 8, 16, device="cuda") * 0.1 + 10
    norm = nn.GroupNorm(2, 8).cuda()
    exact = F.group_norm(x.bfloat16().double(), 2)
    with hmpx.convert(lists="lean"):
        actual = norm(x.bfloat16())
    assert actual.dtype is BF16
    torch.testing.assert_close(actual.double(), exact, rtol=2**-7, atol=2**-7)
