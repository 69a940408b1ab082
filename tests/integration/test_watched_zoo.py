"""A sample of the zoo's models under `hmpx.watch`: no alarm while all that comes out is finite."""

from __future__ import annotations

import re
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


def alarm(entry: Entry) -> str | None:
    """Returns what is reported of a model though all that comes out of it is finite; None if nothing is."""
    model = measuring.built(entry)
    measuring.settle(model, entry, entry.batch(model))
    entry.compared_mode(model)
    torch.manual_seed(measuring.SEED)
    with hmpx.watch("collect") as w:
        is_expected = not trained(entry, model)
        if entry.generate is not None:
            with torch.no_grad():
                entry.generate(model, entry.batch(model))
    return None if w.first is None or is_expected else str(w.first)


def alarms(entries: list[Entry], low: torch.dtype) -> dict[str, str]:
    """Returns name of a model -> what is reported of it without reason."""
    found: dict[str, str] = {}
    with hmpx.convert(device_types={"cpu"}, low_precision_type=low):
        for entry in entries:
            try:
                said = alarm(entry)
            except Exception as error:
                with pytest.raises(type(error), match=re.escape(str(error))):
                    trained(entry, measuring.built(entry))  # unwatched it fails, too
                continue
            if said is not None:
                found[entry.name] = said
    return found


@pytest.mark.sampled(2)
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
