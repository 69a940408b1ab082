"""Which ops a name or a pattern means, where they are called, and a decision in a few words."""

from __future__ import annotations

import fnmatch

from .. import ops
from ..errors import shown, suggestion
from ..policy import CastPolicy, Decision, Policy
from ..tensors import short_name
from ..torch_internals import VF_NAMESPACE


def listable(policy: Policy) -> list[str]:
    """Returns the name of every op that a list may hold; of other libraries' ops, those that one does."""
    names = [name for name in ops.table() if ops.is_castable(name)]
    decided = (*policy.decisions, *policy.section_rules())
    names += dict.fromkeys(filter(ops.is_foreign, decided))
    return sorted(names, key=lambda name: (name.startswith("_"), name.lower()))


def is_glob(pattern: str) -> bool:
    """Whether ``pattern`` may mean several ops."""
    return any(character in pattern for character in "*?[")


def matching(pattern: str, names: list[str]) -> list[str]:
    """Returns the ``names`` that ``pattern`` means: one by any spelling first, then the others."""
    if is_glob(pattern):
        return [
            name
            for name in names
            if fnmatch.fnmatchcase(name, pattern)
            or any(fnmatch.fnmatchcase(site, pattern) for site in call_sites(name))
        ]
    resolved = ops.resolve(pattern)
    first = [resolved] if resolved in names else []
    return first + [name for name in names if pattern in name and name != resolved]


def why_no_match(pattern: str, names: list[str], otherwise: str) -> str:
    """Returns a message for a pattern that matches none of ``names``.

    Args:
        pattern: A name or a glob.
        names: Those of the ops that a list may hold.
        otherwise: The remedy where no name is near.
    """
    resolved = ops.resolve(pattern)
    if resolved is not None and ops.is_foreign(resolved):
        return f"{shown(pattern)}, an op of another library, is in no list"
    if resolved is not None:
        return f"{shown(pattern)} computes nothing from tensors, so there is nothing to cast"
    spellings = [spelling for spelling, name in ops.names().items() if name in names]
    return f"no op matches {shown(pattern)}{suggestion(pattern, spellings, ops.of_modules()) or otherwise}"


def outcome(decision: Decision) -> str:
    """Returns a decision in a few words: ``"LOW bf16"``; ``"-"`` where inputs are left alone."""
    if decision.cast_policy is CastPolicy.PASS:
        return "-"
    words = [decision.cast_policy.name]
    if decision.cast_policy is CastPolicy.LOW and decision.dtype is not None:
        words.append(short_name(decision.dtype))
    words += [f"{word}={short_name(value)}" for word, value in decision.options()]
    return " ".join(words)


def call_sites(name: str) -> list[str]:
    """Returns the places in torch where op ``name`` is called, its Python functions among them."""
    if ops.is_foreign(name):
        return [name]
    op = ops.table()[name]
    return _public([site.qualified for site in (*op.sites, *op.followers)])


def in_place_sites(name: str) -> list[str]:
    """Returns those that write to their first argument."""
    if ops.is_foreign(name):
        return []
    return _public([site.qualified for site in ops.table()[name].sites if site.in_place])


def takes_out(name: str) -> bool:
    """Whether some call of op ``name`` takes ``out=``; methods of tensors don't."""
    if ops.is_foreign(name):
        return False
    sites = [site for site in ops.table()[name].sites if site.namespace != "torch.Tensor"]
    return any("out" in ops.parameters(site).names for site in sites)


def _public(sites: list[str]) -> list[str]:
    """Returns ``sites`` without those of an internal namespace, where there are others."""
    return [site for site in sites if not site.startswith(f"{VF_NAMESPACE}.")] or sites
