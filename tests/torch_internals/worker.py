"""Breaks one part of torch after the other, and sees what hmpx does without it.

    python tests/torch_internals/worker.py NAME ...

Prints a JSON object: name -> error, warnings, and whether results are those with the part. hmpx is
imported in children only, which are forked, so that torch is imported once.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers import it, and find torch whole
import torch.distributed.tensor
import torch.utils.checkpoint

import torch.utils._device  # isort: skip


def break_part(name: str) -> None:
    """Takes a part away from torch."""
    parts = name.split(".")
    count = next(n for n in range(len(parts) - 1, 0, -1) if ".".join(parts[:n]) in sys.modules)
    owner: Any = sys.modules[".".join(parts[:count])]
    for attribute in parts[count:-1]:
        owner = getattr(owner, attribute)
    sys.modules.pop(name, None)
    delattr(owner, parts[-1])


#: Where hmpx is; to look for it does not import it.
PACKAGE = Path(str(importlib.util.find_spec("hmpx").origin)).parent


def results() -> list[torch.Tensor]:
    """Returns what a few calls give under convert(): training, inference, regions, transforms."""
    hmpx = importlib.import_module("hmpx")
    torch.manual_seed(0)
    with hmpx.convert(device_types={"cpu"}, legalize="always"):
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.GELU(), torch.nn.Linear(8, 8)
        )
        x = torch.randn(4, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = torch.nn.functional.cross_entropy(model(x), torch.tensor([0, 1, 2, 3]))
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            inferred = model.eval()(x)
        with hmpx.disable_casts():
            uncast = model(x)
        with torch.autocast("cpu", enabled=False):
            region = model(x)
        with torch.autocast("cpu", torch.float16):
            lists_win = model(x)
        mapped = torch.func.vmap(model)(x[:, None].expand(4, 4, 8))
        rounded = hmpx.formats.quantize(x, "float8_e4m3fn")
    plain = model(x)
    found = [loss, inferred, uncast, region, lists_win, mapped, rounded, plain]
    return [tensor.detach() for tensor in found] + [p.grad for p in model.parameters()]


def outcome(name: str) -> dict[str, Any]:
    """Returns what hmpx does without a part; with all of them if ``name`` is ``""``."""
    if name:
        break_part(name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = results()
        except Exception as error:  # whatever it is goes into the report
            where = traceback.format_exc() if type(error).__name__ != "TorchError" else ""
            frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
            is_torchs_own = not any(Path(name).is_relative_to(PACKAGE) for name in frames)
            text = f"{type(error).__name__}: {error}\n{where}"
            return {"error": text, "is_torchs_own": is_torchs_own}
    parts = importlib.import_module("hmpx.torch_internals").parts()
    faults = [part.feature for part in parts if part.fault]
    said = [str(each.message) for each in caught if "is not as hmpx knows it" in str(each.message)]
    dtypes, values = [str(t.dtype) for t in found], [t.tolist() for t in found]
    return {"error": "", "warnings": said, "faults": faults, "dtypes": dtypes, "values": values}


def difference(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """Returns how the results differ by more than another kernel's order of rounding; ``""`` if not."""
    if found["dtypes"] != expected["dtypes"]:
        return f"dtypes {found['dtypes']}, not {expected['dtypes']}"
    for position, values in enumerate(zip(found["values"], expected["values"], strict=True)):
        actual, wanted = map(torch.tensor, values)
        if not torch.allclose(actual, wanted, rtol=0.02, atol=0.02):
            return f"result {position} differs by {(actual - wanted).abs().max()}"
    return ""


def in_child(name: str) -> dict[str, Any]:
    """Returns `outcome`, of a forked child."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        with os.fdopen(writing, "w") as pipe:
            pipe.write(json.dumps(outcome(name)))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"error": "the child died", "is_torchs_own": False}


def main() -> None:
    """Prints the outcomes."""
    expected = in_child("")
    if expected["error"]:
        sys.exit(expected["error"])
    report = {}
    for name in sys.argv[1:]:
        report[name] = found = in_child(name)
        if not found["error"]:
            found["difference"] = difference(found, expected)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
