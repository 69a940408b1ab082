"""A sample of the zoo's models under `hmpx.watch`: no alarm while all that comes out is finite."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

import hmpx
from zoo import catalogue, measuring
from zoo.entry import Entry

#: One of each family.
FAMILIES = 10


def sample(count: int) -> list[Entry]:
    pytest.importorskip("transformers")
    found = [entry for entry in catalogue.entries() if entry.library == "transformers"]
    return catalogue.sample(found, count)


def is_finite(tensors: Iterable[Tensor | None]) -> bool:
    return all(each is None or each.detach().to_dense().isfinite().all() for each in tensors)


def trained(entry: Entry, model: nn.Module) -> bool:
    """Runs a model forward and backward; returns whether all outputs and gradients are finite."""
    outputs = entry.forward(model, entry.batch(model))
    comes_out = list(measuring.floating_tensors(outputs))
    measuring.backward(outputs)
    torch.optim.AdamW(model.parameters(), lr=1e-3).step()
    return is_finite([*comes_out, *(each.grad for each in model.parameters())])


def alarms(entries: list[Entry], low: torch.dtype) -> dict[str, str]:
    """Returns name of a model -> what is reported of it, though all that comes out of it is finite."""
    found: dict[str, str] = {}
    for entry in entries:
        model = measuring.built(entry)
        try:
            measuring.settle(model, entry, entry.batch(model))
        except RuntimeError:  # it doesn't run in fp32 either
            continue
        entry.compared_mode(model)
        torch.manual_seed(measuring.SEED)
        convert = hmpx.convert(device_types={"cpu"}, low_precision_type=low)
        with convert, hmpx.watch("collect") as w:
            is_expected = not trained(entry, model)
            if entry.generate is not None:
                with torch.no_grad():
                    entry.generate(model, entry.batch(model))
        if w.first is not None and not is_expected:
            found[entry.name] = str(w.first)
    return found


@pytest.mark.models
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("no_search_for_early_names")
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_no_alarm(low: torch.dtype) -> None:
    assert alarms(sample(FAMILIES), low) == {}


@pytest.mark.models
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("no_search_for_early_names")
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_no_alarm_of_more(low: torch.dtype) -> None:
    assert alarms(sample(5 * FAMILIES)[FAMILIES:], low) == {}
