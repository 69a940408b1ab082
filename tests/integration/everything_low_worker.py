"""Runs OpInfo samples with every op in the low-precision list, in each mode of legalization.

    python -m tests.integration.everything_low_worker [--all]

A call that torch runs in fp32 must run, or raise what torch raises where the same inputs were rounded
to bfloat16 by hand. Prints one JSON object: how many calls were made, the most threads that there were
at once, and what else was raised. Gives up after as many seconds as GIVE_UP_AFTER says.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import os
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo

import hmpx
from tests.integration.test_opinfo_conformance import current
from tests.samples import sample_inputs
from tests.values import mapped, tensors

#: Samples of each op, unless all are asked for; more of them take minutes.
FEW = 1

#: OpInfos left out, with the reason.
LEFT_OUT = {
    "max_pool2d_with_indices_backward": (
        "OpInfo gives the ATen overload, below every Python-visible callable, a gradient in the dtype "
        "of the pool's output beside the fp32 input"
    ),
}

most_threads = 0


class CountedThread(threading.Thread):
    """Notes how many there are."""

    def start(self) -> None:
        super().start()
        global most_threads
        most_threads = max(most_threads, threading.active_count())


def with_leaves(call: Any) -> Any:
    """Returns ``call`` with tensors of its own."""
    return mapped(call, lambda t: t.detach().clone().requires_grad_(t.requires_grad))


def rounded(call: Any) -> Any:
    def cast(tensor: Tensor) -> Tensor:
        is_cast = tensor.dtype is torch.float32 and tensor.layout is torch.strided
        return tensor.bfloat16() if is_cast else tensor

    return mapped(call, cast)


def run(function: Callable[..., Any], call: Any) -> str | None:
    """Calls ``function``, and what computes gradients; returns the error, if there is one."""
    torch.default_generator.manual_seed(0)
    try:
        outputs = [t for t in tensors(function(*call)) if t.requires_grad]
        outputs = [t for t in outputs if t.is_floating_point()]
        learning = [t for t in tensors(call) if t.requires_grad]
        if outputs and learning:
            torch.autograd.grad(outputs, learning, [o.clone() for o in outputs], allow_unused=True)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


def samples(info: OpInfo, count: int | None) -> list[Any]:
    found = sample_inputs(info, requires_grad=info.supports_autograd)
    return [(s.input, tuple(s.args), s.kwargs) for s in itertools.islice(found, count)]


def main(count: int | None) -> None:
    faulthandler.dump_traceback_later(float(os.environ.get("GIVE_UP_AFTER", "3600")), exit=True)
    threading.Thread = CountedThread  # type: ignore[misc]
    warnings.simplefilter("ignore")
    infos = [
        info for info in op_db if torch.float32 in info.dtypes and info.full_name not in LEFT_OUT
    ]
    expected = {}
    for info in infos:
        function, found = current(info.op), []
        for call in samples(info, count):
            if run(function, with_leaves(call)) is None:
                found.append((call, run(function, rounded(with_leaves(call)))))
        expected[info.full_name] = found
    ran, raised = 0, []
    for mode in ("auto", "always", "never", "fast"):
        with hmpx.convert(policy={"lists": "none", "low": ["*"]}, legalize=mode):
            for info in infos:
                function = current(info.op)  # builtins are looked up by name at each call
                for index, (call, by_hand) in enumerate(expected[info.full_name]):
                    with hmpx.disable_casts():
                        own = with_leaves(call)
                    error = run(function, own)
                    ran += 1
                    if error is not None and error != by_hand:
                        raised.append(f"{info.full_name}, sample {index}, {mode}: {error}")
    sys.stdout.write(json.dumps({"ran": ran, "threads": most_threads, "raised": raised}))


if __name__ == "__main__":
    main(None if "--all" in sys.argv else FEW)
