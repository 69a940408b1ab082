"""Differences planted in ten models of the zoo, to be found by `hmpx.diff_runs`.

    python benchmarks/planted.py [MODEL ...] [--save]

Prints a line for each. A difference is planted in the second of two runs of a model; which module has it is known
from the run, not from the trace.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timing
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hmpx

sys.path.insert(0, str(Path(__file__).parents[1]))
from zoo.catalogue import entries
from zoo.entry import Entry, call

MODELS = ("gpt2", "llama", "mixtral", "mamba", "bert", "t5", "vit", "resnet", "hubert", "patchtst")


@dataclass(frozen=True)
class Plant:
    """A difference: what changes the second run, and which module has it."""

    kind: str
    change: Callable[[nn.Module, dict[str, Any]], str]
    is_in_call: bool = False
    precisions: tuple[str, str] = ("fp32", "fp32")


class InCall(TorchDispatchMode):  # type: ignore[misc]
    """Changes the first floating result of the kernels of one call of a module's forward."""

    def __init__(self, module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._change, self._is_inside, self.is_done = change, False, False
        module.register_forward_pre_hook(self._enter)
        module.register_forward_hook(self._leave)

    def _enter(self, *_: Any) -> None:
        self._is_inside = True

    def _leave(self, *_: Any) -> None:
        self._is_inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        several = result if isinstance(result, tuple) else (result,)
        first = several[0] if several else None
        is_plain = isinstance(first, Tensor) and first.is_floating_point() and not func.is_view
        is_made = func.overloadpacket not in (torch.ops.aten.empty, torch.ops.aten.detach)
        if not (
            self._is_inside and not self.is_done and is_plain and is_made and first.numel() > 8
        ):
            return result
        self.is_done = True
        changed = self._change(first)
        return (changed, *several[1:]) if isinstance(result, tuple) else changed


def one_ulp(result: Tensor) -> Tensor:
    """Moves one value by a unit in the last place."""
    changed, first = result.clone(), (0,) * result.dim()
    changed[first] = torch.nextafter(result[first], result.new_tensor(torch.inf))
    return changed


def other_order(result: Tensor) -> Tensor:
    """Moves every other value by a unit in the last place, as another order of sums may."""
    up = torch.arange(result.numel()).view(result.shape) % 2 == 0
    return torch.where(up, torch.nextafter(result, torch.full_like(result, torch.inf)), result)


def late_upcast(result: Tensor) -> Tensor:
    """Rounds all values to bfloat16."""
    return result.bfloat16().to(result.dtype)


def norms(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the norms with parameters."""
    found = [(n, m) for n, m in model.named_modules() if "norm" in type(m).__name__.lower()]
    return [each for each in found if any(True for _ in each[1].parameters(recurse=False))]


def products(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the linear layers and convolutions."""
    kinds = ("Linear", "Conv1D", "Conv1d", "Conv2d")
    return [(n, m) for n, m in model.named_modules() if type(m).__name__ in kinds]


def middle(found: list[tuple[str, nn.Module]]) -> tuple[str, nn.Module]:
    """Returns the one in the middle of the model."""
    return found[len(found) // 2]


def eps(model: nn.Module, batch: dict[str, Any]) -> str:
    """Multiplies the eps of a norm by ten."""
    name, module = middle(norms(model))
    key = next(each for each in ("eps", "variance_epsilon") if hasattr(module, each))
    setattr(module, key, getattr(module, key) * 10)
    return name


def weight(model: nn.Module, batch: dict[str, Any]) -> str:
    """Changes one weight of a product."""
    name, module = middle(products(model))
    with torch.no_grad():
        module.weight.view(-1)[5] *= 1.5
    return name


def swapped_norm(model: nn.Module, batch: dict[str, Any]) -> str:
    """Puts a norm of another kind in place of one."""
    name, module = middle(norms(model))
    size = module.weight.shape[-1]

    class Other(nn.Module):
        def forward(self, x: Tensor, *args: Any) -> Tensor:
            if isinstance(module, nn.BatchNorm2d):
                return nn.functional.instance_norm(x)
            if isinstance(module, nn.LayerNorm):
                return nn.functional.rms_norm(x, (size,))
            return nn.functional.layer_norm(x, (size,))

    model.set_submodule(name, Other())
    return name


def dropout(model: nn.Module, batch: dict[str, Any]) -> str:
    """Leaves one dropout on."""
    name, module = middle([(n, m) for n, m in model.named_modules() if isinstance(m, nn.Dropout)])
    module.p = 0.1
    module.train()
    return name


def batch_values(model: nn.Module, batch: dict[str, Any]) -> str:
    """Changes one value of the batch."""
    key = next(k for k, v in batch.items() if isinstance(v, Tensor) and v.dim() > 1)
    batch[key] = batch[key].clone()
    flat = batch[key].view(-1)
    flat[2] = flat[2] + 0.5 if flat.is_floating_point() else int(flat[2] == 0)
    return "*"


def inside(change: Callable[[Tensor], Tensor], kinds: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a plant that changes the result of a kernel within a module."""

    def plant(model: nn.Module, batch: dict[str, Any]) -> Any:
        ran: list[nn.Module] = []
        hooks = [m.register_forward_hook(lambda m, *_: ran.append(m)) for _, m in kinds(model)]
        with torch.no_grad():
            call(model, batch)
        for each in hooks:
            each.remove()
        name, module = middle([(n, m) for n, m in kinds(model) if any(m is each for each in ran)])
        return name, InCall(module, change)

    return plant


def plants() -> Iterator[tuple[str, Plant]]:
    """Yields models and their plants, four each."""
    ulp = Plant("one ulp", inside(one_ulp, products))
    order = Plant("other order of a sum", inside(other_order, products))
    late = Plant("bf16 upcast too late", inside(late_upcast, norms))
    low = Plant("one ulp", inside(one_ulp, products), precisions=("bf16", "bf16"))
    for model in MODELS:
        yield model, ulp
        yield model, late
    for model in MODELS[::2]:
        yield model, order
        yield model, Plant("wrong weight", weight)
    for model in MODELS[1::2]:
        yield model, Plant("wrong eps", eps)
        yield model, low
    for model in ("gpt2", "llama", "mixtral", "vit"):
        yield model, Plant("swapped norm", swapped_norm)
        yield model, Plant("other input or mask", batch_values)
    yield "bert", Plant("dropout left on", dropout)
    yield "vit", Plant("dropout left on", dropout)
    yield "bert", Plant("swapped norm", swapped_norm, precisions=("fp32", "bf16"))
    yield "t5", Plant("wrong weight", weight, precisions=("fp32", "bf16"))


def model_of(entry: Entry) -> tuple[nn.Module, dict[str, Any]]:
    """Returns a new model, without dropout, and its batch."""
    torch.manual_seed(0)
    model = entry.build().eval()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model, dict(entry.batch(model))


def run(model: nn.Module, batch: dict[str, Any], path: Path, precision: str = "fp32") -> None:
    """Traces a forward and a backward."""
    low = hmpx.convert(device_types={"cpu"}) if precision == "bf16" else contextlib.nullcontext()
    torch.manual_seed(0)
    with low, hmpx.trace(path):
        found = pytree.tree_leaves(dict(call(model, batch)))
        outputs = [x for x in found if isinstance(x, Tensor) and x.requires_grad]
        sum(x.float().square().mean() for x in outputs).backward()


def find(entry: Entry, plant: Plant, folder: Path) -> tuple[bool, str]:
    """Returns whether the planted difference is the first unexplained one, and what is."""
    run(*model_of(entry), folder / "a", plant.precisions[0])
    model, batch = model_of(entry)
    planted = plant.change(model, batch)
    name, mode = planted if isinstance(planted, tuple) else (planted, contextlib.nullcontext())
    with mode:
        run(model, batch, folder / "b", plant.precisions[1])
    assert getattr(mode, "is_done", True)
    first = hmpx.diff_runs(folder / "a", folder / "b").first
    if first is None:
        return False, "nothing"
    inner = first.module == name or first.module.startswith(f"{name}.")
    return inner or (name == "*" and "made outside" in first.cause), f"{first}: {first.cause}"


def main() -> None:
    """Prints whether each difference was the first that is unexplained."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help="default: all ten")
    parser.add_argument("--save", action="store_const", const=Path(__file__).parent / "results")
    options = parser.parse_args()
    known = {entry.name: entry for entry in entries() if entry.name in MODELS}
    found: list[bool] = []
    rows = []
    for model, plant in plants():
        if options.models and model not in options.models:
            continue
        with tempfile.TemporaryDirectory() as folder:
            is_found, said = find(known[model], plant, Path(folder))
        found.append(is_found)
        rows.append([model, plant.kind, " and ".join(plant.precisions), is_found, said])
        print(
            f"{'found' if is_found else 'MISSED':7}{model:10}{plant.kind:24}{said[:150]}",
            flush=True,
        )
    print(f"{sum(found)} of {len(found)}")
    figures = {"planted": len(found), "found": sum(found)}
    timing.save(
        options.save, "planted", {"figures": figures, "rows": rows}, device="cpu", threads=1
    )


if __name__ == "__main__":
    main()
