"""Which decision each op has, and why: op lists, policy files, sections. A policy is data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..later import shown_later
from .calls import FIELDS, Call, Rule, Verdict
from .decisions import (
    ALLOW,
    DENY,
    FOLLOW,
    INPUT,
    RELATIVE,
    UNDECIDED,
    CastPolicy,
    Decision,
    LowType,
    parse_format,
    settled_dtype,
)
from .einsums import leaves_pointwise_einsums
from .files.names import is_policy_file
from .files.sources import PolicySource
from .lists.kinds import FILE_NAMES, LIST_KINDS
from .lists.sets import SHIPPED, of_libraries, read_list, set_names
from .loading import load_policy, requested_policy
from .policy import Policy
from .request import policy_request

if TYPE_CHECKING:
    from .checking import check_files
    from .files.reading import read_policy_file
    from .tables import policy_line
else:  # files in YAML, and tables for people to read
    __getattr__ = shown_later(
        __name__,
        {
            "checking": "check_files",
            "files.reading": "read_policy_file",
            "tables": "policy_line",
        },
    )

__all__ = [
    "ALLOW",
    "DENY",
    "FIELDS",
    "FILE_NAMES",
    "FOLLOW",
    "INPUT",
    "LIST_KINDS",
    "RELATIVE",
    "SHIPPED",
    "UNDECIDED",
    "Call",
    "CastPolicy",
    "Decision",
    "LowType",
    "Policy",
    "PolicySource",
    "Rule",
    "Verdict",
    "check_files",
    "is_policy_file",
    "leaves_pointwise_einsums",
    "load_policy",
    "of_libraries",
    "parse_format",
    "policy_line",
    "policy_request",
    "read_list",
    "read_policy_file",
    "requested_policy",
    "set_names",
    "settled_dtype",
]
