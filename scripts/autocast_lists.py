"""Writes ``scripts/autocast_lists.json``: torch.autocast's ops by device and policy, of each torch.

    /path/to/python scripts/autocast_lists.py    # adds the torch of this Python; needs nothing else

What is registered comes from torch's dispatcher, also for devices that are not there; the policy on
CUDA from the header that torch ships; on the CPU from what torch.autocast casts inputs to. The lists
under ``lists/autocast-*`` are tested against each version.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

DATA = Path(__file__).with_suffix(".json")

#: The header's macros -> the list that holds what they name.
MACROS = {
    "AT_FORALL_LOWER_PRECISION_FP": "low",
    "AT_FORALL_FP32": "fp32",
    "AT_FORALL_FP32_SET_OPT_DTYPE": "fp32",
    "AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE": "fp32",
    "AT_FORALL_PROMOTE": "widest",
}


def of_header() -> dict[str, set[str]]:
    """Returns kind -> ops of ``ATen/autocast_mode.h``, the policy on CUDA and XPU."""
    text = (Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h").read_text()
    found: dict[str, set[str]] = defaultdict(set)
    macros = re.findall(r"^#define (AT_FORALL_\w+)\(_\)((?:.*\\\n)*.*)$", text, re.MULTILINE)
    for macro, body in macros:
        if macro in MACROS:
            found[MACROS[macro]] |= set(re.findall(r"\b_\((?:ADD_NS\()?(\w+)", body))
    return found


def registered(key: str) -> set[str]:
    """Returns the names of the ops with a kernel for an autocast key of the dispatcher."""
    return {
        name.removeprefix("aten::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    }


class CastsFirst(TorchDispatchMode):
    """Collects the dtypes that inputs are cast to before anything else runs."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()
        self.is_done = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and not self.is_done:
            self.dtypes.add(kwargs["dtype"])
        else:
            self.is_done = True
        return func(*args, **kwargs)


def any_argument(type_name: str, dtypes: Iterator[torch.dtype]) -> Any:
    """Returns some value of a schema's type; its shape need not suit the op."""
    if type_name.startswith("Optional"):
        return None
    if type_name == "Tensor":
        return torch.ones(2, 2, 2, dtype=next(dtypes))
    if type_name.startswith("List"):
        item = type_name.removeprefix("List[").removesuffix("]")
        return [any_argument(item, dtypes) for _ in range(3)]
    return {"int": 1, "float": 0.5, "number": 1, "bool": False, "str": "valid"}[type_name]


def first_casts(schema: Any, dtypes: tuple[torch.dtype, torch.dtype]) -> set[torch.dtype]:
    """Returns the dtypes to which torch.autocast casts alternating inputs of these dtypes."""
    overload = getattr(getattr(torch.ops.aten, schema.name[6:]), schema.overload_name or "default")
    alternating = itertools.cycle(dtypes)
    args = [any_argument(str(a.type), alternating) for a in schema.arguments if not a.kwarg_only]
    # Autocast casts before the kernel looks at the shapes, which it then may refuse.
    refusal = contextlib.suppress(RuntimeError, IndexError, NotImplementedError, ValueError)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), CastsFirst() as casts, refusal:
        overload(*args)
    return casts.dtypes


def kind_by_behaviour(schema: Any) -> str:
    """Returns the list in which an op belongs by what torch.autocast does with its inputs."""
    fp32, bf16 = torch.float32, torch.bfloat16
    if bf16 in first_casts(schema, (fp32, fp32)):
        return "low"
    if fp32 in first_casts(schema, (bf16, bf16)):
        return "fp32"
    return "widest" if fp32 in first_casts(schema, (fp32, bf16)) else ""


def of_cpu() -> dict[str, set[str]]:
    """Returns kind -> ops of torch.autocast on the CPU; ``""`` for overloads without a suitable sample."""
    on_cpu = registered("AutocastCPU") - {"mkldnn_rnn_layer"}
    found: dict[str, set[str]] = defaultdict(set)
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name.removeprefix("aten::")
        full = f"{schema.name}.{schema.overload_name}".removesuffix(".")
        if schema.name.startswith("aten::") and name in on_cpu:
            with contextlib.suppress(RuntimeError):  # an op of TorchScript's interpreter
                if torch._C._dispatch_has_kernel_for_dispatch_key(full, "AutocastCPU"):
                    found[kind_by_behaviour(schema)].add(name)
    return found


def main() -> None:
    """Adds the installed torch to the file."""
    warnings.simplefilter("ignore")
    version = ".".join(torch.__version__.split(".")[:2])
    data = json.loads(DATA.read_text()) if DATA.is_file() else {}
    kinds = {"cuda": of_header(), "cpu": of_cpu()}
    data[version] = {
        **{
            device: {k: sorted(v) for k, v in sorted(of.items()) if k}
            for device, of in kinds.items()
        },
        **{device: sorted(registered(f"Autocast{device.upper()}")) for device in ("mps", "xpu")},
    }
    ordered = sorted(data.items(), key=lambda each: [int(part) for part in each[0].split(".")])
    text = json.dumps(dict(ordered), indent=1)
    # One line for each list of ops
    text = re.sub(r"\[[^\[\]]*\]", lambda ops: re.sub(r"\s+", " ", ops[0]), text)
    DATA.write_text(text + "\n")


if __name__ == "__main__":
    main()
