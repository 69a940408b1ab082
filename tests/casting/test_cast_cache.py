"""Casts used again within one module call: as few as can be, and never a stale one."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import hmpx
from tests.values import normal, same

BF16 = torch.bfloat16


class Casts(TorchDispatchMode):
    """Counts casts to bfloat16 of tensors of one shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Returns what ``func`` returns."""
        kwargs = kwargs or {}
        is_cast = func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is BF16
        if is_cast and tuple(args[0].shape) == self.shape:
            self.count += 1
        return func(*args, **kwargs)


class Repeated(nn.Module):
    """Multiplies by one weight several times; ``between`` runs after each."""

    def __init__(self, times: int = 5, between: Callable[[nn.Parameter], object] | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(24, 24) / 5)
        self.times, self.between = times, between

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = F.linear(x, self.weight)
            if self.between is not None:
                self.between(self.weight)
        return x


def outcome(module: nn.Module, x: Tensor, *, reuse_casts: bool) -> list[Tensor]:
    """Returns the output and the gradients of a forward and backward."""
    module.zero_grad()
    with hmpx.convert(reuse_casts=reuse_casts):
        output = module(x)
        output.float().pow(2).sum().backward()
    return [output.detach(), *[p.grad.clone() for p in module.parameters() if p.grad is not None]]


@pytest.mark.parametrize(("reuse_casts", "expected"), [(False, 5), (True, 1)])
@pytest.mark.parametrize("grad", [False, True])
def test_a_weight_is_cast_once_in_a_call(reuse_casts: bool, expected: int, grad: bool) -> None:
    """Once with the option, on each use without it."""
    module, x = Repeated(), normal(3, 24)
    with hmpx.convert(reuse_casts=reuse_casts), torch.set_grad_enabled(grad):
        for _ in range(2):
            with Casts((24, 24)) as casts:
                module(x)
            assert casts.count == expected


def test_gradients_are_those_of_casts_of_their_own() -> None:
    """Rounded use by use and summed in fp32: bit for bit what they are without the option."""
    same(*[outcome(Repeated(20), normal(3, 24), reuse_casts=reuse) for reuse in (True, False)])


class Cell(nn.Module):
    """An LSTM cell over a sequence, and a tied projection."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.LSTMCell(24, 24)
        self.tied = nn.Linear(24, 24)
        self.tied_too = nn.Linear(24, 24)
        self.tied_too.weight = self.tied.weight

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[1], 24)
        for step in x:
            h, c = self.cell(self.tied(step), (h, c))
        return self.tied_too(h)


def test_cells_and_tied_weights() -> None:
    """Results are the same, with fewer casts."""
    same(*[outcome(Cell(), normal(6, 3, 24), reuse_casts=reuse) for reuse in (True, False)])
    counts = []
    for reuse in (True, False):
        with hmpx.convert(reuse_casts=reuse), torch.no_grad(), Casts((24, 24)) as casts:
            Cell()(normal(6, 3, 24))
        counts.append(casts.count)
    assert counts == [1, 7]


HELD: list[Tensor] = []


def write_through_data(weight: nn.Parameter) -> None:
    weight.data.mul_(1.1)


def write_by_foreach(weight: nn.Parameter) -> None:
    torch._foreach_mul_([weight.data], 1.1)


def write_in_place(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.mul_(1.1)


def write_through_view(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight[0].mul_(1.1)


def write_through_numpy(weight: nn.Parameter) -> None:
    weight.detach().numpy()[:] *= 1.1


def write_through_dlpack(weight: nn.Parameter) -> None:
    torch.from_dlpack(weight.detach()).mul_(1.1)


def write_to_storage(weight: nn.Parameter) -> None:
    storage = weight.untyped_storage()
    with hmpx.disable_casts():
        storage.copy_((weight.detach() * 1.1).untyped_storage())


def write_through_what_was_held(weight: nn.Parameter) -> None:
    HELD[0].mul_(1.1)


def write_through_pointer(weight: nn.Parameter) -> None:
    double(weight.data_ptr(), weight.numel())


def double(address: int, count: int) -> None:
    """Doubles ``count`` numbers of fp32, as a kernel would that is given a pointer."""
    numbers = (ctypes.c_float * count).from_address(address)
    for i in range(count):
        numbers[i] *= 2


WRITES = [
    write_through_pointer,
    write_through_data,
    write_by_foreach,
    write_in_place,
    write_through_view,
    write_through_numpy,
    write_through_dlpack,
    write_to_storage,
    write_through_what_was_held,
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("held", [Tensor.detach, lambda w: w.data, lambda w: None])
def test_no_stale_cast_is_used(
    write: Callable[[nn.Parameter], object], held: Callable[[nn.Parameter], Tensor | None]
) -> None:
    """However the weight is written to between two uses, and whatever shares its memory already."""
    outputs = []
    for reuse in (True, False):
        module = Repeated(3, write)
        HELD[:] = [t for t in [held(module.weight)] if t is not None]
        if write is write_through_what_was_held and not HELD:
            HELD.append(module.weight.data)
        with hmpx.convert(reuse_casts=reuse), torch.no_grad():
            outputs.append(module(normal(3, 24)))
    HELD.clear()
    same([outputs[0]], [outputs[1]])


def test_a_pointer_ends_casts() -> None:
    """Launchers of kernels, like Triton's, read each tensor's pointer. What they write is unknown."""
    module, x, other = Repeated(5), normal(3, 24), torch.ones(3)
    with hmpx.convert(reuse_casts=True), torch.no_grad():
        for between, expected in ((None, 1), (lambda weight: other.data_ptr(), 5)):
            module.between = between or (lambda weight: None)
            with Casts((24, 24)) as casts:
                module(x)
            assert casts.count == expected


def write_to(weight: Tensor) -> None:
    weight.mul_(1.1)


def write_by_pointer(weight: Tensor) -> None:
    numbers = (ctypes.c_int16 * weight.numel()).from_address(weight.data_ptr())
    for i in range(len(numbers)):
        numbers[i] = 0


def test_nothing_lives_beyond_the_outermost_call() -> None:
    """Between two calls even a write that nothing notices is seen; nor is the cast kept alive."""
    module, x = Repeated(), normal(3, 24)
    array = module.weight.detach().numpy()
    with hmpx.convert(reuse_casts=True), torch.no_grad():
        module(x)
        array *= 2
        actual = module(x)
    with hmpx.convert(), torch.no_grad():
        same([actual], [module(x)])


def test_a_cast_under_no_grad_does_not_stop_gradients() -> None:
    """One made under no_grad or inference_mode is none for a use that learns."""

    class Mixed(Repeated):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                h = F.linear(x, self.weight)
            with torch.inference_mode():
                F.linear(x, self.weight)
            return F.linear(h, self.weight) + F.linear(x, self.weight)

    same(*[outcome(Mixed(), normal(3, 24), reuse_casts=reuse) for reuse in (True, False)])


def test_inference_mode() -> None:
    """Weights made in it count no versions, and are cast each time."""
    outputs = []
    for reuse in (True, False):
        with hmpx.convert(reuse_casts=reuse), torch.inference_mode():
            outputs.append(Repeated()(normal(3, 24)))
    same([outputs[0]], [outputs[1]])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint(use_reentrant: bool) -> None:
    """What is recomputed outside of the call is cast anew, with the same gradients."""

    class Checkpointed(Repeated):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            return checkpoint(super().forward, x, use_reentrant=use_reentrant)

    same(*[outcome(Checkpointed(), normal(3, 24), reuse_casts=reuse) for reuse in (True, False)])


@pytest.mark.parametrize("legalize", ["auto", "always", "fast"])
def test_legalized_ops(legalize: str) -> None:
    """They cast as often, and give the same."""
    results = []
    for reuse in (True, False):
        module = Repeated()
        with hmpx.convert(reuse_casts=reuse, legalize=legalize):
            output = module(normal(64, 24))
            output.float().sum().backward()
        results.append([output.detach(), module.weight.grad])
    same(*results)


def test_an_exception_ends_the_call() -> None:
    """After it the next module call is an outermost one again."""

    def fail(weight: nn.Parameter) -> None:
        raise ValueError("stop")

    module, x = Repeated(2, fail), normal(3, 24)
    with hmpx.convert(reuse_casts=True), torch.no_grad():
        with pytest.raises(ValueError, match="stop"):
            module(x)
        module.between = None
        module.weight.mul_(2)
        actual = module(x)
    with hmpx.convert(), torch.no_grad():
        same([actual], [module(x)])


def test_threads_have_casts_of_their_own() -> None:
    """A write in one thread ends the casts of the other."""
    module, x = Repeated(40), normal(3, 24)
    with hmpx.convert(), torch.no_grad():
        expected = module(x)
    outputs: list[Tensor] = []

    def run() -> None:
        with torch.no_grad():
            outputs.extend(module(x) for _ in range(10))

    with hmpx.convert(reuse_casts=True):
        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(outputs) == 30
    same(outputs, [expected] * 30)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_torch_func_and_forward_mode_cast_as_ever() -> None:
    """Transforms see each cast."""
    module, x = Repeated(), normal(3, 24)
    weights = dict(module.named_parameters())

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(module, weights, (x,)).float().sum()

    results = []
    for reuse in (True, False):
        with hmpx.convert(reuse_casts=reuse):
            gradients = torch.func.grad(loss)(weights)
            _, tangent = torch.func.jvp(loss, (weights,), (weights,))
            results.append([gradients["weight"], tangent])
    same(*results)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_casts_as_ever(backend: str) -> None:
    """torch.compile traces the module without a graph break, ``.data`` and all."""
    module, x = Repeated(), normal(3, 24)
    module.between = lambda weight: weight.data.shape
    results = []
    for reuse in (True, False):
        with hmpx.convert(reuse_casts=reuse):
            results.append(torch.compile(module, backend=backend, fullgraph=True)(x).detach())
    same([results[0]], [results[1]])
