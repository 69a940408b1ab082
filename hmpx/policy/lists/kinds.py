"""The kinds of op lists: one row each, from which all that differs between them follows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import torch

from ..decisions import CastPolicy, Decision, LowType


class ListKind(NamedTuple):
    """What is true of all op lists of a kind.

    Attributes:
        name: What messages and policy files call the kind.
        cast_policy: What is decided for its ops.
        dtype: What they are cast to; None for the policy's low-precision type, or where the cast
            policy has no dtype of its own.
        is_key: Policy files, and the sections in them, have lists of this kind.
        file_name: Its file in a directory of lists; None if directories have none.
        float16_file_name: In a shipped set, the file that takes its place where the low-precision
            type is float16.
        stand_in: The shipped list that is used where a directory has no such file; ``""`` for none.
        included_as: The kind of the shipped list that an ``@`` line brings in; ``""`` for its own.
        takes_dtype: A line may name a low-precision type of its own.
        takes_options: A line may name dtypes at all.
    """

    name: str
    cast_policy: CastPolicy
    dtype: torch.dtype | None = None
    is_key: bool = True
    file_name: str | None = None
    float16_file_name: str | None = None
    stand_in: str = ""
    included_as: str = ""
    takes_dtype: bool = False
    takes_options: bool = True

    def decision(self, low_dtype: LowType) -> Decision:
        """Returns the decision for its ops where ``low_dtype`` is the low-precision type."""
        is_low = self.cast_policy is CastPolicy.LOW
        return Decision(self.cast_policy, self.dtype or (low_dtype if is_low else None))


_ROWS: Final = (
    ListKind(
        "low",
        CastPolicy.LOW,
        file_name="bf16.txt",
        float16_file_name="fp16.txt",
        takes_dtype=True,
    ),
    ListKind(
        "fp16",
        CastPolicy.LOW,
        torch.float16,
        is_key=False,
        included_as="low",
        takes_dtype=True,
    ),
    ListKind("fp32", CastPolicy.FP32, torch.float32, file_name="fp32.txt"),
    ListKind("widest", CastPolicy.WIDEST, file_name="widest.txt", stand_in="hmp/widest"),
    ListKind("first", CastPolicy.FIRST),
    ListKind("follow", CastPolicy.FOLLOW),
    ListKind("pass", CastPolicy.PASS, takes_options=False),
)

#: Name -> kind.
KINDS: Final[Mapping[str, ListKind]] = {kind.name: kind for kind in _ROWS}

#: Names of the kinds.
LIST_KINDS: Final = tuple(KINDS)

#: The lists that a policy file, and each section in it, may hold.
KEYS: Final = tuple(kind.name for kind in _ROWS if kind.is_key)

#: Kind of list -> its file name in a shipped set, or in a directory given as ``lists``.
FILE_NAMES: Final[Mapping[str, str]] = {
    kind.name: kind.file_name for kind in _ROWS if kind.file_name is not None
}
