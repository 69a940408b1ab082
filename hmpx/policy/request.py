"""What a policy is asked to be made of: the arguments of `load_policy`, each checked in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from .. import arguments
from ..errors import OptionError, shown
from .decisions import LowType, parse_low_type
from .files.names import is_policy_file

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
        policy: A policy, or what is read as one; None for lists.
        paths: Kind -> the path of its list, ``""`` for none.
        opt_level: ``"O1"`` or ``"O2"``.
        lists: Name or path of a set of lists; None for the default one.
        low_dtype: The low-precision type, where the policy does not say another.
        strict: Whether unknown names in lists are errors.
    """

    policy: object
    paths: Mapping[str, str]
    opt_level: str
    lists: str | None
    low_dtype: LowType
    strict: bool


def path_and_policy(bf16_file_path: object, policy: object) -> tuple[str, object]:
    """Returns the path of the bf16 list, and the policy, whose file may stand in the list's place.

    Raises:
        OptionError: The first is not a path.
    """
    try:
        path = arguments.path("bf16_file_path", bf16_file_path)
    except OptionError as error:
        for kinds, remedy in _MISPLACED:
            if arguments.is_a(bf16_file_path, kinds):
                raise OptionError(f"{error}; {remedy}") from None
        raise
    if policy is None and is_policy_file(path):
        return "", path
    return path, policy


def policy_request(
    bf16_path: str,
    fp32_file_path: object,
    *,
    fp16_file_path: object,
    opt_level: object,
    low_precision_type: object,
    lists: object,
    policy: object,
    strict: object,
) -> PolicyRequest:
    """Returns the request that these arguments make; the first and ``policy`` by `path_and_policy`.

    Raises:
        OptionError: An argument has an invalid value, or two contradict each other.
    """
    paths = {
        "bf16_file_path": bf16_path,
        "fp32_file_path": arguments.path("fp32_file_path", fp32_file_path),
        "fp16_file_path": arguments.path("fp16_file_path", fp16_file_path),
    }
    request = PolicyRequest(
        policy=policy,
        paths=dict(zip(("low", "fp32", "fp16"), paths.values(), strict=True)),
        opt_level=arguments.choice("opt_level", opt_level, ("O1", "O2")),
        lists=None if lists is None else arguments.path("lists", lists),
        strict=arguments.truth("strict", strict),
        low_dtype=parse_low_type(low_precision_type),
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
