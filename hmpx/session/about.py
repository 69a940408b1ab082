"""What a result was measured with, as its page and files say."""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path
from typing import Final

import torch

from ..policy import Policy, policy_line
from ..version import __version__
from .switching import current

#: Longer command lines are cut.
_LONGEST: Final = 300


def about_run(policy: Policy | None = None) -> dict[str, str]:
    """Returns the command, date, device, versions, policy (None: that in force) and its digest, and the rank.

    Equal digests mean equal decisions.
    """
    session = current()
    threads = torch.get_num_threads()
    command = [Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]]
    found = {
        "command": shlex.join(command)[:_LONGEST],
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "device": f"cpu, {torch.backends.cpu.get_cpu_capability()}, {threads} thread{'s' * (threads > 1)}",
        "torch": str(torch.__version__),
        "hmpx": __version__,
    }
    # Naming a device that nobody used would initialize CUDA.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["device"] = f"{torch.cuda.get_device_name()}; {found['device']}"
    if policy is None and session is not None:
        policy = session.policy
        found["device types"] = ", ".join(sorted(session.device_types))
        found["legalize"] = session.options.legalize
        if session.options.within is not None:
            found["within"] = type(session.options.within()).__name__
    if policy is not None:
        found["policy"] = policy_line(policy)
        found["digest of the policy"] = policy.fingerprint()[:12]
    if "RANK" in os.environ:
        found["rank"] = os.environ["RANK"]
    return found
