"""What a policy is asked to be made of: the arguments of `load_policy`, each checked in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from .. import arguments
from ..arguments import is_a
from ..errors import OptionError, shown
from .decisions import LowType, parse_low_type
from .files.names import is_policy_file
from .files.sources import PolicySource
from .policy import Policy

#: What is given in the place of the first list by mistake -> what to do.
_MISPLACED: Final = (
    (nn.Module, "leave the model out: it is torch that is converted, for all models"),
    ((list, tuple, set, frozenset), "names of ops go in policy=hmpx.Policy.from_ops(low=[...])"),
    (Mapping, "pass it by name: policy=..."),
    (torch.dtype, "pass it by name: low_precision_type=..."),
)


@dataclass(frozen=True, slots=True)
class PolicyRequest:
    """The checked arguments of `load_policy`.

    Attributes:
        policy: A policy, or the content of a policy file; None for lists.
        paths: Kind -> the path of its list, ``""`` for none.
        opt_level: ``"O1"`` or ``"O2"``.
        lists: Name or path of a set of lists; None for the default one.
        low_dtype: The low-precision type, where the policy does not say another.
        strict: Whether unknown names in lists are errors.
    """

    policy: Policy | PolicySource | None
    paths: Mapping[str, str]
    opt_level: str
    lists: str | None
    low_dtype: LowType
    strict: bool

    @property
    def is_verbose(self) -> bool:
        """Whether a policy file asks for logging."""
        return isinstance(self.policy, PolicySource) and self.policy.is_verbose


def policy_request(given: Mapping[str, Any]) -> PolicyRequest:
    """Returns the request that the arguments of `load_policy` make; a policy file is read.

    Raises:
        OptionError: An argument has an invalid value, or two contradict each other.
        PolicyFileError: The policy file can't be read, or is not a policy.
    """
    bf16_path, policy = _path_and_policy(given["bf16_file_path"], given["policy"])
    source = policy if policy is None or isinstance(policy, Policy) else read_source(policy)
    paths = {"bf16_file_path": bf16_path} | {
        name: arguments.path(name, given[name]) for name in ("fp32_file_path", "fp16_file_path")
    }
    lists = given["lists"]
    request = PolicyRequest(
        policy=source,
        paths=dict(zip(("low", "fp32", "fp16"), paths.values(), strict=True)),
        opt_level=arguments.choice("opt_level", given["opt_level"], ("O1", "O2")),
        lists=None if lists is None else arguments.path("lists", lists),
        strict=arguments.truth("strict", given["strict"]),
        low_dtype=parse_low_type(given["low_precision_type"]),
    )
    if policy is not None:
        if any(paths.values()) or request.lists or request.opt_level != "O1":
            raise OptionError("policy holds every decision; leave out lists, paths and opt_level")
        return request
    for argument, path in paths.items():
        if path in ("O1", "O2"):
            raise OptionError(f"{argument} is {path!r}; pass it by name: opt_level={path!r}")
        if is_policy_file(path):
            found = shown(path)
            raise OptionError(f"{argument} is {found}; pass it by name: policy={found}")
    if request.opt_level == "O2" and lists is not None:
        raise OptionError("opt_level 'O2' has its own lists; leave out lists, or use 'O1'")
    return request


def _path_and_policy(bf16_file_path: object, policy: object) -> tuple[str, object]:
    """Returns the path of the bf16 list, and the policy, whose file may stand in the list's place."""
    try:
        path = arguments.path("bf16_file_path", bf16_file_path)
    except OptionError as error:
        for kinds, remedy in _MISPLACED:
            if is_a(bf16_file_path, kinds):
                raise OptionError(f"{error}; {remedy}") from None
        raise
    if policy is None and is_policy_file(path):
        return "", path
    return path, policy


def read_source(policy: object) -> PolicySource:
    """Returns the content of a policy file, or of a mapping like one.

    Raises:
        OptionError: ``policy`` is neither.
        PolicyFileError: It can't be read, or is not a policy.
    """
    if isinstance(policy, PolicySource):
        return policy
    from .files import reading  # yaml

    if is_a(policy, Mapping):
        return reading.from_mapping(policy)  # type: ignore[arg-type]
    if is_a(policy, str) or hasattr(type(policy), "__fspath__"):
        return reading.read_policy_file(arguments.path("policy", policy))
    raise OptionError(
        f"policy must be an hmpx.Policy, the path of a policy file, or a dict, not {shown(policy)}"
    )
