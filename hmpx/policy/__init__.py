"""Which decision each op has, and why: op lists, policy files, sections. A policy is data."""

from __future__ import annotations

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
)
from .files import PolicySource, is_policy_file, read_policy_file
from .op_lists import FILE_NAMES, SHIPPED, read_list
from .policy import Policy, check_files, load_policy, read_source
from .tables import policy_line

__all__ = [
    "ALLOW",
    "DENY",
    "FIELDS",
    "FILE_NAMES",
    "FOLLOW",
    "INPUT",
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
    "load_policy",
    "policy_line",
    "read_list",
    "read_policy_file",
    "read_source",
]
