"""Values that spread over steps, lists of tensors, copies and the program's own backwards; and NaN that does not."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hmpx

pytestmark = pytest.mark.usefixtures("no_search_for_early_names")

FP16 = torch.float16


def watched(program: Callable[[], None]) -> list[hmpx.Offence]:
    torch.manual_seed(0)
    with (
        hmpx.convert(low_precision_type=FP16, device_types={"cpu"}, lists="lean"),
        hmpx.watch("collect") as w,
    ):
        program()
    return w.offences


def trained(model: nn.Module, loss_of: Callable[[Tensor], Tensor], steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(torch.randn(4, 8)).backward()
        optimizer.step()


def lists_of_tensors() -> None:
    model = nn.Linear(8, 8)
    gradients = torch.autograd.grad(model(torch.ones(2, 8)).float().sum(), [*model.parameters()])
    squares = torch._foreach_mul([torch.full_like(each, 1e-4).half() for each in gradients], 1e-4)
    torch._foreach_div([each.half() for each in gradients], squares)  # here


def a_list_in_place() -> None:
    values = [torch.zeros(3), torch.ones(3)]
    torch._foreach_div_(values, [torch.zeros(3), torch.ones(3)])  # here


def weights_loaded_from_an_average() -> None:
    model, teacher = nn.Linear(8, 8), nn.Linear(8, 8)
    count = 0

    def loss_of(batch: Tensor) -> Tensor:
        nonlocal count
        with torch.no_grad():
            correction = torch.tensor(float(count))
            state = model.state_dict()
            average = {name: value / correction for name, value in state.items()}  # here
        count += 1
        loss = 0.1 * F.mse_loss(model(batch).float(), teacher(batch).detach().float())
        teacher.load_state_dict(average)
        return loss

    trained(model, loss_of)


class Codebook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("codes", torch.ones(4, 8))
        self.register_buffer("count", torch.ones(4))

    def forward(self, batch: Tensor) -> Tensor:
        found = self.codes[torch.tensor([0, 1, 2, 3])]
        with torch.no_grad():
            self.count.mul_(0.0)
            parts = self.codes / self.count[:, None]  # here
            self.codes.copy_(parts - parts)
        return (self.layer(batch).float() - found).square().mean()


def a_buffer_that_is_indexed_in_the_next_step() -> None:
    model = Codebook()
    trained(model, model)


class Divided(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradient / (x - x)  # here


def a_backward_of_the_programs_own() -> None:
    model = nn.Linear(8, 8)
    trained(model, lambda batch: Divided.apply(model(batch).float()).square().mean())  # type: ignore[no-untyped-call]


def a_weight_divided_by_a_norm_of_zero() -> None:
    model = nn.Linear(8, 1)

    def loss_of(batch: Tensor) -> Tensor:
        loss = F.relu(model(batch).float() - 100.0).mean()
        (gradient,) = torch.autograd.grad(loss, [model.weight], retain_graph=True)
        with torch.no_grad():
            model.weight.add_(gradient * (0.05 / gradient.norm()))  # here
        return F.relu(model(batch).float() - 100.0).mean()

    trained(model, loss_of)


def a_product_of_many() -> None:
    product, factor = torch.ones(4).half(), torch.full((4,), 0.2, requires_grad=True).half()
    for _ in range(20):
        product = product * factor
    (product / product.detach()).float().sum().backward()  # here


SPREAD = {
    lists_of_tensors: ("_foreach_div", "forward", "fp32.txt: _foreach_mul"),
    a_list_in_place: ("_foreach_div", "forward", "none: _foreach_div ran in float32 already"),
    weights_loaded_from_an_average: ("truediv", "forward", "none: truediv ran in float32 already"),
    a_buffer_that_is_indexed_in_the_next_step: (
        "truediv",
        "forward",
        "none: truediv ran in float32",
    ),
    a_backward_of_the_programs_own: ("truediv", "backward", ""),
    a_weight_divided_by_a_norm_of_zero: ("rtruediv", "forward", "none: rtruediv ran in float32"),
    a_product_of_many: ("truediv", "forward", "fp32.txt: mul"),
}


@pytest.mark.parametrize("program", SPREAD, ids=lambda program: program.__name__)
def test_the_call_that_made_the_values_is_named(program: Callable[[], None]) -> None:
    op, phase, remedy = SPREAD[program]
    found = watched(program)
    assert found, "nothing was reported"
    first = found[0]
    owner = {
        "a_buffer_that_is_indexed_in_the_next_step": Codebook,
        "a_backward_of_the_programs_own": Divided,
    }
    lines, start = inspect.getsourcelines(owner.get(program.__name__, program))
    (offset,) = [number for number, text in enumerate(lines) if "# here" in text]
    assert (first.op, first.phase) == (op, phase), str(first)
    assert first.location == f"{__file__}:{start + offset}", str(first)
    assert first.remedy.startswith(remedy), first.remedy


def cleared_by_where() -> None:
    model = nn.Linear(8, 8)

    def loss_of(batch: Tensor) -> Tensor:
        h = model(batch).float()
        with torch.no_grad():
            root = torch.where(h > 0, h.sqrt(), 0.0) + torch.nan_to_num(h.log(), 0.0, 0.0, 0.0)
        return (h - root).square().mean()

    trained(model, loss_of)


def cleared_without_a_backward() -> None:
    given = torch.tensor([-1.0, 1.0])
    torch.where(given > 0, given.sqrt(), 0.0) * 2.0


def cleared_by_an_index() -> None:
    model = nn.Linear(8, 8)

    def loss_of(batch: Tensor) -> Tensor:
        root = batch.log()
        return model(batch).float().square().mean() + root[~root.isnan()].square().mean()

    trained(model, loss_of)


def metrics_of_classes() -> None:
    model = nn.Linear(8, 8)

    def loss_of(batch: Tensor) -> Tensor:
        h = model(batch).float()
        (torch.zeros(4) / torch.zeros(4)).tolist()
        h[h > 100.0].mean().item()
        torch.stack([torch.zeros(2).sum() / 0.0, h.detach().sum()]).tolist()
        return h.square().mean()

    trained(model, loss_of)


def a_metric_of_nothing() -> None:
    model = nn.Linear(8, 8)

    def loss_of(batch: Tensor) -> Tensor:
        h = model(batch).float()
        kept = h.detach()
        kept[kept > 100.0].mean().item()
        return h.square().mean()

    trained(model, loss_of)
    float((torch.zeros(3) / torch.zeros(3)).mean())  # after the last step


def metrics_after_the_last_step() -> None:
    model = nn.Linear(8, 8)
    trained(model, lambda batch: model(batch).float().square().mean())
    with torch.no_grad():
        hits = model(torch.ones(4, 8)).float() > 100.0
    precision = hits.float().sum(0) / hits.float().sum(0)
    (1.0 / precision.nan_to_num()).tolist()


@pytest.mark.parametrize(
    "program",
    [
        cleared_by_where,
        cleared_without_a_backward,
        cleared_by_an_index,
        a_metric_of_nothing,
        metrics_after_the_last_step,
        metrics_of_classes,
    ],
    ids=lambda program: program.__name__,
)
def test_nan_that_reaches_nothing_is_not_reported(program: Callable[[], None]) -> None:
    assert [str(each) for each in watched(program)] == []


def test_a_metric_that_low_precision_alone_makes_nan() -> None:
    """It is made outside of modules, and float32 computes a number there, so it is not the metric of an empty set."""
    model = nn.Linear(8, 8)

    def loss_of(batch: Tensor) -> Tensor:
        with torch.no_grad():
            small = (model(batch).float().abs() * 0.0 + 1e-9).half()
            (small / small).tolist()
        return model(batch).float().square().mean()

    found = watched(lambda: trained(model, loss_of))
    assert found and found[0].op == "truediv" and found[0].kind == "underflow"


def test_a_gradient_that_overflows_in_a_conversion() -> None:
    """The line of the loss scale is not a list's."""

    def program() -> None:
        weight = torch.ones(3, dtype=FP16, requires_grad=True)
        (weight.float() * 1e6).sum().backward()

    (first, *_) = watched(program)
    assert (first.op, first.phase, first.kind) == ("float", "backward", "overflow")
    assert first.remedy.startswith("none: the gradient of float is float16, as its input is")


class Scaled(nn.Module):
    """Keeps a scale, which becomes NaN and is not used in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, batch: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.mul_(0.9).add_((batch.mean() - 100.0).sqrt() * 0.1)
        return self.layer(batch).float().square().mean()


def test_a_buffer_is_no_metric() -> None:
    """It would be saved with the model."""
    model = Scaled()
    found = watched(lambda: trained(model, model))
    assert found and found[0].op == "sqrt", [str(each) for each in found]


def test_logits_that_only_their_largest_is_taken_of() -> None:
    class Logits(nn.Module):
        def forward(self, batch: Tensor) -> Tensor:
            return batch.sqrt()

    model, logits = nn.Linear(8, 8), Logits()

    def loss_of(batch: Tensor) -> Tensor:
        with torch.no_grad():
            logits(-batch.abs() - 1.0).argmax(-1)
        return model(batch).float().square().mean()

    found = watched(lambda: trained(model, loss_of))
    assert found and found[0].op == "sqrt"


def test_graphs_without_a_backward_are_freed() -> None:
    """Watched memory is not kept alive."""
    model, seen = nn.Linear(256, 256), []
    with hmpx.watch("collect"):
        for _ in range(3):
            h = model(torch.ones(256, 256))
            seen.append(weakref.ref(h.untyped_storage()))
            h.mean()
        del h
        assert [each() for each in seen] == [None, None, None]
