"""Weights of RNNs that lie in one chunk of memory, as cuDNN wants them: cast as one, the same numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import hmpx
from tests.fake_cuda import steps
from tests.fake_cuda.flattening import flatten
from tests.values import normal, same

BF16 = torch.bfloat16
TO_COPY = torch.ops.aten._to_copy.default

RNNS = [
    (nn.LSTM, {}),
    (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    (nn.LSTM, {"bias": False}),
    pytest.param(
        nn.LSTM,
        {"num_layers": 2, "proj_size": 5},
        marks=pytest.mark.filterwarnings("ignore:LSTM with projections"),
    ),
    (nn.GRU, {"num_layers": 2}),
    (nn.GRU, {"bias": False, "bidirectional": True}),
    (nn.RNN, {"num_layers": 2}),
    (nn.RNN, {"nonlinearity": "relu"}),
]


class Casts(TorchDispatchMode):
    """Notes the number of elements of each cast, and the ops."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.ops: list[object] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Returns what ``func`` returns."""
        self.ops.append(func)
        if func is TO_COPY:
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def rnn(cls: type[nn.Module] = nn.LSTM, *, is_flat: bool, **options: Any) -> Any:
    torch.manual_seed(0)
    module = cls(12, 16, **options)
    if is_flat:
        flatten(module)
    return module


def size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def storages(tensors: Iterator[Tensor]) -> int:
    return len({t.untyped_storage().data_ptr() for t in tensors})


def step(module: Any, x: Tensor) -> list[Tensor]:
    """Returns the output, and all gradients."""
    output = module(x)[0]
    output.float().pow(2).sum().backward()
    return [output.detach(), x.grad, *[p.grad for p in module.parameters()]]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("cls", "options"), RNNS)
@pytest.mark.parametrize("legalize", ["never", "auto", "always"])
def test_a_chunk_of_weights_is_cast_as_one(
    cls: type[nn.Module], options: dict[str, Any], legalize: str
) -> None:
    """Outputs and gradients are bit for bit those of casts one by one, with and without gradients."""
    found = []
    for is_flat in (False, True):
        module = rnn(cls, is_flat=is_flat, **options)
        with hmpx.convert(lists="autocast-cuda", device_types={"cpu"}, legalize=legalize):
            with Casts() as casts:
                results = step(module, normal(5, 3, 12, seed=1, requires_grad=True))
            with torch.no_grad(), Casts() as without_gradients:
                results.append(module(normal(5, 3, 12, seed=1, requires_grad=True))[0])
        assert results[0].dtype is results[-1].dtype is BF16
        assert (size(module) in casts.sizes) is is_flat
        # Where it is legalized, it is raised as one, too; under "auto" this is for the machine to say.
        counts = {"never": {1}, "always": {2}}.get(legalize, {1, 2}) if is_flat else {0}
        assert without_gradients.sizes.count(size(module)) in counts
        smallest = min(p.numel() for p in module.parameters())
        assert (smallest in without_gradients.sizes) is not is_flat
        found.append(results)
    same(*found)


def test_padding_belongs_to_a_chunk() -> None:
    """What lies between and behind the weights is cast, and nobody sees it; cuDNN wants room for biases."""
    found = []
    for padding in (None, 3):
        module = rnn(is_flat=False)
        if padding is not None:
            flatten(module, padding)
        with hmpx.convert(lists="autocast-cuda", device_types={"cpu"}), Casts() as casts:
            found.append(step(module, normal(5, 3, 12, seed=1, requires_grad=True)))
        assert (size(module) + 12 in casts.sizes) is (padding is not None)
    same(*found)


def second_order(module: Any, x: Tensor) -> list[Tensor]:
    loss = module(x)[0].float().pow(3).sum()
    first = torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
    sum(g.pow(2).sum() for g in first).backward()
    return [x.grad, *[p.grad for p in module.parameters()]]


def frozen(module: Any, x: Tensor) -> list[Tensor]:
    module.requires_grad_(False)
    output = module(x)[0]
    output.float().sum().backward()
    return [output.detach(), x.grad]


def func_grad(module: Any, x: Tensor) -> list[Tensor]:
    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(module, parameters, (x,))[0].float().pow(2).sum()

    return list(
        torch.func.grad(loss)({n: p.detach() for n, p in module.named_parameters()}).values()
    )


def in_checkpoint(use_reentrant: bool) -> Callable[[Any, Tensor], list[Tensor]]:
    def run(module: Any, x: Tensor) -> list[Tensor]:
        output = checkpoint(lambda x: module(x)[0], x, use_reentrant=use_reentrant)
        output.float().pow(2).sum().backward()
        return [x.grad, *[p.grad for p in module.parameters()]]

    return run


def in_inference_mode(module: Any, x: Tensor) -> list[Tensor]:
    with torch.inference_mode():
        return [module(x)[0].clone()]


def compiled(module: Any, x: Tensor) -> list[Tensor]:
    return step(torch.compile(module, backend="aot_eager"), x)


def exported(module: Any, x: Tensor) -> list[Tensor]:
    program = torch.export.export(module, (x.detach(),))
    return [program.module()(x.detach())[0].detach()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "run",
    [
        second_order,
        frozen,
        func_grad,
        in_checkpoint(True),
        in_checkpoint(False),
        in_inference_mode,
        pytest.param(compiled, marks=pytest.mark.slow),
        exported,
    ],
)
def test_a_chunk_under_all_that_torch_does(run: Callable[[Any, Tensor], list[Tensor]]) -> None:
    """The same numbers as from weights that lie apart."""
    found = []
    for is_flat in (False, True):
        with hmpx.convert(lists="autocast-cuda", device_types={"cpu"}, legalize="never"):
            found.append(run(rnn(is_flat=is_flat), normal(5, 3, 12, seed=1, requires_grad=True)))
    same(*found)


def test_packed_sequences() -> None:
    """The other overloads take the weights in another place."""
    found = []
    for cls, is_flat in itertools.product([nn.LSTM, nn.GRU], [False, True]):
        module = rnn(cls, is_flat=is_flat)
        packed = nn.utils.rnn.pack_padded_sequence(
            normal(5, 3, 12, seed=1, requires_grad=True).detach(), torch.tensor([5, 4, 2])
        )
        with hmpx.convert(lists="autocast-cuda", device_types={"cpu"}), Casts() as casts:
            output = module(packed)[0].data
        assert (size(module) in casts.sizes) is is_flat
        found.append(output.detach())
    same([found[0], found[2]], [found[1], found[3]])


def casts_on_cuda() -> list[int]:
    """Returns how many casts of weights a step takes: apart and in a chunk, under two lists."""
    counts = []
    with steps.fake("cuda"):
        for lists, is_flat in itertools.product(["autocast-cuda", None], [False, True]):
            module, x = rnn(is_flat=is_flat, num_layers=2), torch.randn(5, 3, 12, dtype=BF16)
            kernels = steps.Kernels("cuda", module.parameters())
            with hmpx.convert(lists=lists, device_types={"cuda"}), kernels:
                module(x)[0].float().sum().backward()
            counts.append(steps.summary(kernels.list)["casts_of_parameters"])
    return counts


@pytest.mark.sampled(2)
def test_on_cuda_the_weights_take_one_cast(on_fake_cuda: Callable[..., Any]) -> None:
    """Where ``flatten_parameters`` has put them into a chunk, rather than eight."""
    assert on_fake_cuda(casts_on_cuda) == [8, 1, 8, 1]


def test_a_frozen_rnn_has_one_chunk() -> None:
    """In the low-precision type, each weight where it lay; undoing gives the chunk back that was."""
    results = []
    for is_flat in (False, True):
        module, x = (
            rnn(is_flat=is_flat, num_layers=2).eval(),
            normal(5, 3, 12, seed=1, requires_grad=True).detach(),
        )
        places = [p.data_ptr() for p in module.parameters()]
        before = [p.detach().clone() for p in module.parameters()]
        with hmpx.convert(lists="autocast-cuda", device_types={"cpu"}), torch.no_grad():
            results.append(module(x)[0])
            with hmpx.freeze(module, x, outputs="keep"):
                parameters = list(module.parameters())
                assert {p.dtype for p in parameters} == {BF16}
                assert storages(iter(parameters)) == (1 if is_flat else len(parameters))
                results.append(module(x)[0])
        same([p.detach() for p in module.parameters()], before)
        assert [p.data_ptr() for p in module.parameters()] == places
    same(results[1:], results[:1] * 3)
