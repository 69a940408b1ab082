"""What torch.compile keeps of a conversion: traced code in the process, artefacts on the disk.

Neither knows of hmpx: a graph is traced with the wrappers in it, and cached under a key made before
their casts are. So both are told.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from typing import Any

from .policy import Policy


def forget() -> None:
    """Makes torch.compile trace again, and learn anew what the functions of torch are.

    It sets no guard on the wrappers of methods and operators. What it finds under the names of
    torch's functions, wrappers now, it puts into the graph as they are; they cast when that runs.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None or not hasattr(dynamo, "reset"):  # not imported, or not to its end
        return
    dynamo.reset()
    if hasattr(dynamo.trace_rules, "clear_lru_cache"):
        dynamo.trace_rules.clear_lru_cache()


def tag_caches(policy: Policy, device_types: frozenset[str]) -> Callable[[], None]:
    """Keeps the disk caches of each policy, and of unconverted torch, apart.

    Returns:
        What undoes it.
    """
    config: Any = sys.modules.get("torch.compiler.config")
    if config is None or not hasattr(config, "cache_key_tag"):  # a torch older than the tag

        def nothing() -> None:
            pass

        return nothing
    before = config.cache_key_tag
    config.cache_key_tag = tagged = f"{before}hmpx-{_digest(policy, device_types)}"

    def restore() -> None:
        if config.cache_key_tag == tagged:
            config.cache_key_tag = before

    return restore


def _digest(policy: Policy, device_types: frozenset[str]) -> str:
    decisions = sorted((n, d.cast_policy.name, str(d.dtype)) for n, d in policy.decisions.items())
    state = repr((decisions, sorted(device_types)))
    return hashlib.sha256(state.encode()).hexdigest()[:16]
