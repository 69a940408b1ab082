"""Regions of torch.autocast that are off: "fp32 here", as model code says it."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.amp import custom_bwd, custom_fwd
from torch.utils.checkpoint import checkpoint

import hmpx
from hmpx import Policy, torch_state
from hmpx.torch_state import switch
from tests.conftest import opened

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
POLICY = Policy.from_ops(low=["matmul", "linear", "mul"], fp32=["softmax"])

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*target dtype is not supported"
)


@pytest.fixture(autouse=True)
def autocast_is_left_untouched() -> Iterator[None]:
    """Closes regions that torch has lost: interrupted ones, and those of a generator closed elsewhere.

    Within one autocast keeps its casts of parameters, stale ones in tests to come.
    """
    yield
    torch.autocast_increment_nesting()
    while torch.autocast_decrement_nesting() > 0:
        pass
    torch.clear_autocast_cache()


def low(**options: Any) -> hmpx.Session:
    return hmpx.convert(policy=POLICY, legalize="never", **options)


def a() -> Tensor:
    return torch.linspace(-1, 2, 16).reshape(4, 4)


def off(device_type: str = "cpu") -> torch.autocast:
    return torch.autocast(device_type, enabled=False)


def on(device_type: str = "cpu") -> torch.autocast:
    return torch.autocast(device_type, dtype=BF16)


def dtypes() -> set[torch.dtype]:
    """Returns what a function, a method, an operator and a module give."""
    return {
        F.linear(a(), a()).dtype,
        a().matmul(a()).dtype,
        (a() @ a()).dtype,
        nn.Linear(4, 4)(a()).dtype,
    }


def is_clean() -> bool:
    return not opened() and not switch.marked() and not switch.off()


# --- spellings ----------------------------------------------------------------------------------


def entered(region: torch.autocast) -> set[torch.dtype]:
    region.__enter__()
    try:
        return dtypes()
    finally:
        region.__exit__(None, None, None)


def stacked() -> set[torch.dtype]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(off())
        return dtypes()


def within(region: Any) -> set[torch.dtype]:
    with region:
        return dtypes()


before_convert = off()
decorated_before = off()(dtypes)

SPELLINGS: dict[str, Callable[[], set[torch.dtype]]] = {
    "torch.autocast": lambda: within(torch.autocast("cpu", enabled=False)),
    "torch.amp.autocast": lambda: within(torch.amp.autocast("cpu", enabled=False)),
    "torch.cpu.amp.autocast": lambda: within(torch.cpu.amp.autocast(enabled=False)),
    "a dtype that autocast takes for off": lambda: within(torch.autocast("cpu", dtype=FP32)),
    "enter and exit": lambda: entered(off()),
    "ExitStack": stacked,
    "decorator": lambda: off()(dtypes)(),
    "made before": lambda: within(before_convert),
    "decorated before": lambda: decorated_before(),
    "torch.amp._enter_autocast": lambda: by_graph(),
}


def by_graph() -> set[torch.dtype]:
    region = torch.amp._enter_autocast("cpu", None, False, None)
    try:
        return dtypes()
    finally:
        torch.amp._exit_autocast(region)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_casts_are_off_in_a_region_that_is_off(spelling: str) -> None:
    """However it is opened; and on again behind it."""
    with low():
        for _ in range(2):
            assert SPELLINGS[spelling]() == {FP32}
            assert dtypes() == {BF16}
    assert is_clean()


NESTS: dict[str, tuple[list[Callable[[], Any]], torch.dtype]] = {
    "off, on": ([off, on], BF16),
    "on, off": ([on, off], FP32),
    "on, off, on": ([on, off, on], BF16),
    "off, on, off": ([off, on, off], FP32),
    "off, off, on": ([off, off, on], BF16),
    "disable_casts, on": ([hmpx.disable_casts, lambda: torch.autocast("cpu", FP16)], FP16),
    "off, disable_casts, on": (
        [off, hmpx.disable_casts, lambda: torch.autocast("cpu", FP16)],
        FP16,
    ),
    "off, on, disable_casts": ([off, on, hmpx.disable_casts, off], FP32),
    "another device type": ([lambda: off("cuda")], BF16),
    "off, another's on": ([off, lambda: torch.autocast("xpu", BF16)], FP32),
}


@pytest.mark.parametrize("nest", NESTS)
def test_nested_regions(nest: str) -> None:
    """The innermost counts, and each gives back what was around it."""
    opened, expected = NESTS[nest]
    with low(device_types={"cpu"}):
        seen = []
        with contextlib.ExitStack() as stack:
            for open_region in opened:
                seen.append(dtypes())
                stack.callback(lambda: seen.append(dtypes()))
                stack.enter_context(open_region())
            assert dtypes() == {expected}
            # torch.autocast casts no product by elements: the lists do, or nobody.
            assert (a() * a()).dtype is (BF16 if expected is BF16 else FP32)
        half = len(seen) // 2
        assert seen[:half] == seen[half:][::-1]
    assert is_clean()


def test_a_region_is_as_plain_torch() -> None:
    """Bit for bit; and what disable_casts raises, torch's own error, is raised here."""
    plain = (a() @ a(), F.softmax(a().bfloat16(), -1))
    with low():
        with off():
            torch.testing.assert_close(
                (a() @ a(), F.softmax(a().bfloat16(), -1)), plain, rtol=0, atol=0
            )
            with pytest.raises(RuntimeError, match="same dtype") as mixed:
                a() @ a().bfloat16()
            assert not hmpx.casts_enabled()
        with hmpx.disable_casts(), pytest.raises(RuntimeError) as expected:
            a() @ a().bfloat16()
    assert str(mixed.value) == str(expected.value)


# --- several device types -----------------------------------------------------------------------


def each(tensor: Tensor) -> list[torch.dtype]:
    low_input = tensor.bfloat16()
    return [
        F.linear(tensor, tensor).dtype,
        (tensor @ tensor).dtype,
        torch.matmul(tensor, other=tensor).dtype,
        torch.einsum("ij,jk", tensor, tensor).dtype,
        F.softmax(low_input, -1).dtype,
    ]


CASTED, UNCAST = [BF16] * 4 + [FP32], [FP32] * 4 + [BF16]


@pytest.mark.parametrize("how", ["lists", "log", "rules"])
def test_casts_on_other_device_types_go_on(how: str) -> None:
    """With two covered types, each region is that of its own."""
    policy = Policy.from_ops(low=["matmul", "linear", "einsum"], fp32=["softmax"])
    verbose = "once" if how == "log" else False
    with contextlib.ExitStack() as stack:
        options: Any = {"device_types": {"cpu", "cuda"}, "legalize": "never"}
        stack.enter_context(hmpx.convert(policy=policy, isVerbose=verbose, **options))
        if how == "rules":
            hmpx.register_rule("matmul", lambda call: None)
            stack.callback(hmpx.unregister_rule, "matmul")
        stack.enter_context(FakeTensorMode())
        cpu, cuda = torch.ones(4, 4), torch.ones(4, 4, device="cuda")
        assert (each(cpu), each(cuda)) == (CASTED, CASTED)
        with off("cuda"):
            assert (each(cpu), each(cuda)) == (CASTED, UNCAST)
            assert hmpx.casts_enabled()
            with off("cpu"):
                assert (each(cpu), each(cuda)) == (UNCAST, UNCAST)
                assert not hmpx.casts_enabled()
                with on("cpu"):
                    assert (each(cpu), each(cuda)) == (CASTED, UNCAST)
            with hmpx.disable_casts():
                assert (each(cpu), each(cuda)) == (UNCAST, UNCAST)
            checked = torch_state.keeps_state(lambda: (each(cpu), each(cuda)))
        with off("cpu"):
            assert (each(cpu), each(cuda)) == (UNCAST, CASTED)
            assert checked() == (CASTED, UNCAST)
    assert is_clean()


# --- who asks first -----------------------------------------------------------------------------


def asks_first() -> Any:
    """As `maybe_autocast` of transformers does: a region only where autocast is on."""
    if torch.is_autocast_enabled("cpu"):
        return torch.autocast(device_type="cpu", enabled=False)
    return contextlib.nullcontext()


def only_asks() -> bool:
    return torch.is_autocast_enabled("cpu")


@pytest.mark.filterwarnings("ignore:nothing will be cast")
def test_code_that_opens_a_region_only_where_autocast_is_on() -> None:
    """It finds casts; who does not open a region with ``enabled=`` is told of autocast alone."""
    with low():
        with asks_first():
            assert dtypes() == {FP32}
            assert isinstance(asks_first(), contextlib.nullcontext)
        assert not only_asks()
        with on():
            assert only_asks()
        with hmpx.disable_casts():
            assert isinstance(asks_first(), contextlib.nullcontext)
    assert isinstance(asks_first(), contextlib.nullcontext)
    with low(device_types={"cuda"}):
        assert isinstance(asks_first(), contextlib.nullcontext)


def dtype_for_kernel(x: Tensor) -> torch.dtype:
    """As FlashAttention's callers do: what to cast fp32 queries to for a kernel that takes none."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def dtype_for_kernel_on_gpus() -> torch.dtype | None:
    return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None


def state_to_restore() -> dict[str, Any]:
    """As checkpoints of other libraries keep it."""
    return {
        "enabled": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_autocast_dtype("cpu"),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }


def dtype_in_region_for_kernel(x: Tensor) -> torch.dtype:
    """As fast norms do: casts by hand, then calls the kernel where autocast is off."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
        with torch.autocast(device_type=x.device.type, enabled=False):
            return x.dtype
    return x.dtype


def dtype_in_same_region(x: Tensor) -> torch.dtype:
    """Opens a region as it finds autocast."""
    is_on, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    with torch.autocast("cpu", dtype=dtype, enabled=is_on):
        return torch.get_autocast_dtype("cpu") if is_on else x.dtype


@pytest.mark.parametrize("dtype_for", [dtype_in_region_for_kernel, dtype_in_same_region])
def test_code_that_opens_a_region_is_told_the_dtype_of_the_casts(
    dtype_for: Callable[[Tensor], torch.dtype],
) -> None:
    """Where it is told that casts are on; autocast's own dtype need not be the conversion's."""
    x = a()
    with hmpx.convert(low_precision_type=FP16, legalize="never"):
        assert dtype_for(x) is FP16
        with on():
            assert dtype_for(x) is BF16
        with hmpx.disable_casts():
            assert dtype_for(x) is FP32
    assert dtype_for(x) is FP32


@pytest.mark.filterwarnings("ignore:nothing will be cast")
def test_code_that_casts_to_the_dtype_of_autocast() -> None:
    """It casts to the conversion's; who keeps the state to restore it is told of autocast alone."""
    x, before = a(), state_to_restore()
    with hmpx.convert(low_precision_type=FP16, legalize="never"):
        assert dtype_for_kernel(x) is FP16
        assert dtype_for_kernel_on_gpus() is None
        assert state_to_restore() == before
        with on():
            assert dtype_for_kernel(x) is BF16  # what the region says
            assert state_to_restore()["enabled"]
        for around in (hmpx.disable_casts(), off()):
            with around:
                assert dtype_for_kernel(x) is FP32
    with low(device_types={"cuda"}):
        assert dtype_for_kernel(x) is FP32
        assert dtype_for_kernel_on_gpus() is BF16
    with hmpx.convert(low_precision_type="posit16_1"):
        assert dtype_for_kernel(x) is FP32
    assert dtype_for_kernel(x) is FP32


class Custom(torch.autograd.Function):
    """A product in forward and backward, whose dtypes are recorded."""

    seen: list[torch.dtype] = []  # noqa: RUF012

    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        Custom.seen.append((x @ x).dtype)
        return (x @ x).float()

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        Custom.seen.append((gradient @ x).dtype)
        return (gradient @ x).float()


class CustomCastInputs(Custom):
    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=FP32)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        Custom.seen.append((x @ x).dtype)
        return x @ x


@pytest.mark.parametrize("region", [contextlib.nullcontext, off, on, hmpx.disable_casts])
@pytest.mark.parametrize("function", [Custom, CustomCastInputs])
def test_custom_functions_run_backward_as_forward(function: Any, region: Callable[[], Any]) -> None:
    """With ``cast_inputs`` in a region that is off, as torch says; else as the forward was."""
    Custom.seen.clear()
    with low():
        leaf = a().requires_grad_()
        with region():
            output = function.apply(leaf)
        output.sum().backward()
        assert torch.get_autocast_dtype("cpu") is BF16
    is_fp32 = function is CustomCastInputs or region in (off, hmpx.disable_casts)
    assert Custom.seen == [FP32 if is_fp32 else BF16] * 2


class CustomLinear(torch.autograd.Function):
    """A product whose output, and whose gradient, is in low precision."""

    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        Custom.seen.append((gradient @ weight.T).dtype)
        return gradient @ weight.T, x.T @ gradient


@pytest.mark.filterwarnings("ignore:nothing will be cast")
@pytest.mark.parametrize("low_precision_type", [BF16, torch.float16])
@pytest.mark.parametrize(
    "where", ["inside", "behind", "disable_casts", "off", "on", "other devices"]
)
def test_custom_functions_run_backward_anywhere(
    where: str, low_precision_type: torch.dtype
) -> None:
    Custom.seen.clear()
    x, weight = a().requires_grad_(), a().requires_grad_()
    with hmpx.convert(device_types={"cpu"}, low_precision_type=low_precision_type):
        loss = CustomLinear.apply(x, weight).float().sum()
        around = {"disable_casts": hmpx.disable_casts, "off": off, "on": on}
        if where in ("inside", *around):
            with around.get(where, contextlib.nullcontext)():
                loss.backward()
                assert (a() @ a()).dtype is (
                    FP32 if where in ("disable_casts", "off") else low_precision_type
                )
    if where == "other devices":
        with low(device_types={"cuda"}):
            loss.backward()
    if where == "behind":
        loss.backward()
    assert not torch.is_autocast_enabled("cpu")
    assert Custom.seen == [low_precision_type] and x.grad.dtype is weight.grad.dtype is FP32


def test_regions_by_which_torch_restores_a_state_change_nothing() -> None:
    """As in DataParallel's threads, and where AOTAutograd traces a backward."""
    source = "import torch\ndef worker(run):\n with torch.amp.autocast('cpu', enabled=False):\n  return run()"
    names: dict[str, Any] = {"__name__": "torch.nn.parallel.parallel_apply"}
    exec(source, names)
    with low():
        assert names["worker"](dtypes) == {BF16}
        with off():
            assert names["worker"](dtypes) == {FP32}


# --- checkpoints, backward ----------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("where", ["inside", "around forward", "around backward", "on in off"])
def test_recomputation_sees_what_the_forward_saw(use_reentrant: bool, where: str) -> None:
    seen = []

    def forward(x: Tensor) -> Tensor:
        with off() if where == "inside" else contextlib.nullcontext():
            output = x @ x
        seen.append(output.dtype)
        return torch.tanh(output.float())

    with low():
        x = a().requires_grad_()
        regions = {"around forward": [off], "on in off": [off, on]}.get(where, [])
        with contextlib.ExitStack() as stack:
            for region in regions:
                stack.enter_context(region())
            output = checkpoint(forward, x, use_reentrant=use_reentrant)
        with off() if where in ("around backward", "on in off") else contextlib.nullcontext():
            output.sum().backward()
    assert seen == [FP32 if where in ("inside", "around forward") else BF16] * 2


def test_threads_tasks_and_generators() -> None:
    """A region is its thread's and its task's, as `disable_casts` is."""

    def paused() -> Iterator[None]:
        with off():
            yield

    async def task(opens: bool, turns: list[asyncio.Event], mine: int) -> set[torch.dtype]:
        with off() if opens else contextlib.nullcontext():
            turns[mine].set()
            await turns[1 - mine].wait()
            return dtypes()

    async def both() -> list[set[torch.dtype]]:
        turns = [asyncio.Event(), asyncio.Event()]
        return await asyncio.gather(task(True, turns, 0), task(False, turns, 1))

    with low():
        found: list[Any] = []
        with off():
            thread = threading.Thread(target=lambda: found.append(dtypes()))
            thread.start()
            thread.join()
        assert found == [{BF16}]
        assert asyncio.run(both()) == [{FP32}, {BF16}]
        generator = paused()
        next(generator)
        assert dtypes() == {FP32}
        thread = threading.Thread(target=generator.close)
        thread.start()
        thread.join()
        assert contextvars.copy_context().run(dtypes) == {BF16}
        assert dtypes() == {BF16}
    assert is_clean()


# --- conversions that come and go ---------------------------------------------------------------


def test_regions_that_are_open_while_conversions_come_and_go() -> None:
    """Each ends where its block does; of those in one place the latest that was written counts."""
    with off(), low():
        assert dtypes() == {BF16}  # convert came after the region
    hmpx.convert(policy=POLICY, legalize="never")
    region, late = off(), off()
    region.__enter__()
    late.__enter__()
    hmpx.convert(policy=Policy.from_ops(low=["matmul", "linear"]), legalize="never")
    assert dtypes() == {FP32}  # the conversion goes on, with other lists
    late.__exit__(None, None, None)
    hmpx.revert()
    assert dtypes() == {FP32}
    with low():
        assert dtypes() == {FP32}
        region.__exit__(None, None, None)
        assert dtypes() == {BF16}
    with low(), off():
        hmpx.revert()
    with low():
        assert dtypes() == {BF16}
        region.__enter__()
        hmpx.revert()
        region.__exit__(None, None, None)  # torch's own: the region lasts as long as the object
    del region
    with low():
        assert dtypes() == {BF16}
    assert is_clean()


@pytest.mark.filterwarnings("ignore:nothing will be cast")
def test_calls_look_closer_as_long_as_autocast_is_on_for_another_device_type() -> None:
    outer, inner = on(), on()
    with low(device_types={"cuda"}):
        outer.__enter__()
        inner.__enter__()
        inner.__exit__(None, None, None)
        assert opened()
        outer.__exit__(None, None, None)
        assert not opened()
        with off():
            assert not torch.is_autocast_enabled("cpu")
        assert not opened()
        with pytest.raises(RuntimeError), torch.autocast("cpu", dtype=BF16):
            raise RuntimeError
        assert not opened()
    with on(), low(device_types={"cuda"}):  # on since before convert
        assert opened()
    assert is_clean()


# --- interruptions ------------------------------------------------------------------------------


# --- compiled and exported ----------------------------------------------------------------------


def regions_inside(x: Tensor) -> list[Tensor]:
    with torch.autocast("cpu", enabled=False):
        results = [F.linear(x, x), x @ x]
        with torch.autocast("cpu"):
            results += [F.linear(x, x), x.matmul(x)]
        with hmpx.disable_casts(), torch.autocast("cpu", enabled=False):
            results += [F.linear(x, x), x @ x]
        results += [decorated(x), x @ x]
    with asks_first():
        results += [F.linear(x, x), x @ x]
    with torch.autocast("cuda", enabled=False):
        results += [F.linear(x, x), x @ x]
    with hmpx.disable_casts():
        with torch.autocast("cpu", enabled=False):
            results += [F.linear(x, x)]
        results += [F.linear(x, x), x @ x]
    return [*results, F.linear(x, x), x @ x]


@torch.autocast("cpu")
def decorated(x: Tensor) -> Tensor:
    return x @ x


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_compiled_regions_are_those_of_eager_mode(backend: str) -> None:
    """In compiled code, and around it: no graph break, one graph for each state."""
    compiled = torch.compile(regions_inside, backend=backend, fullgraph=True)
    with low(device_types={"cpu"}):
        for _ in range(2):
            for around in (contextlib.nullcontext, off):
                with around():
                    expected, actual = regions_inside(a()), compiled(a())
                    assert [t.dtype for t in actual] == [t.dtype for t in expected]
                    # Inductor keeps bf16 intermediates in fp32 registers: 2^-8 is bf16's spacing.
                    torch.testing.assert_close(actual, expected, rtol=2**-8, atol=2**-8)
        assert {t.dtype for t in expected} == {FP32, BF16}
    assert is_clean()


def casts_by_hand(x: Tensor) -> Tensor:
    return x.to(dtype_for_kernel(x))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("fullgraph", [True, False])
def test_compiled_code_casts_to_the_dtype_of_autocast(fullgraph: bool) -> None:
    compiled = torch.compile(casts_by_hand, backend="eager", fullgraph=fullgraph)
    with low():
        for around in (contextlib.nullcontext, off, on, hmpx.disable_casts):
            with around():
                assert compiled(a()).dtype is casts_by_hand(a()).dtype
    assert compiled(a()).dtype is FP32


class Exported(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", enabled=False):
            inner = x @ x
        with asks_first():
            asked = x @ x
        return inner, asked, F.linear(x, x)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("strict", [True, False])
def test_exported_programs_have_no_casts_in_the_region(strict: bool) -> None:
    """They run without hmpx as they ran with it."""
    with low(device_types={"cpu"}):
        expected = Exported()(a())
        program = torch.export.export(Exported(), (a(),), strict=strict)
    assert [t.dtype for t in expected] == [FP32, FP32, BF16]
    torch.testing.assert_close(program.module()(a()), expected, rtol=0, atol=0)
    with low(device_types={"cpu"}), off():
        around = torch.export.export(Exported(), (a(),), strict=strict)
    assert {t.dtype for t in around.module()(a())} == {FP32}


# --- models -------------------------------------------------------------------------------------


class Rotary(nn.Module):
    """Rotary positions as models write them."""

    def __init__(self) -> None:
        super().__init__()
        self.inv_freq = nn.Buffer(1.0 / (10_000 ** (torch.arange(0, 16, 2).float() / 16)))

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        inv_freq = self.inv_freq[None, :, None].float()
        with torch.autocast(device_type=x.device.type, enabled=False):  # Force float32
            freqs = (inv_freq @ positions[:, None, :].float()).transpose(1, 2)
            emb = torch.cat((freqs, freqs), dim=-1)
            cos, sin = emb.cos() * 2.0, emb.sin() * 2.0
        return cos.to(x.dtype), sin.to(x.dtype)


def test_positions_are_fp32_bit_for_bit() -> None:
    """Under HMP's lists, in which `mul` and `matmul` are low."""
    rotary, x, positions = Rotary(), torch.ones(1), torch.arange(4096)[None]
    expected = rotary(x, positions)
    with hmpx.convert(lists="hmp", device_types={"cpu"}):
        torch.testing.assert_close(rotary(x, positions), expected, rtol=0, atol=0)
