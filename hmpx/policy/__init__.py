"""The decision for each op, and its reason: op lists, policy files, sections. A policy is data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..later import shown_later
from .calls import FIELDS, Call, Rule, Verdict, leaves_pointwise_einsums
from .decisions import (
    ALLOW,
    DENY,
    FOLLOW,
    INPUT,
    RELATIVE,
    SHIPPED,
    UNDECIDED,
    UNNAMED,
    CastPolicy,
    Decision,
    LowType,
    parse_format,
    parse_low_type,
    settled_dtype,
)
from .faults import check_files
from .lists import directory, of_libraries, read_list, set_names
from .loading import load_policy, made_policy, options_of_lists, reading_options
from .op_lists import (
    FILE_NAMES,
    HARDWARE_MODES,
    LEGALIZE_MODES,
    LIST_KINDS,
    OPTIONS_NAME,
    POLICY_NAME,
    PolicySource,
    is_policy_file,
)
from .patterns import fullmatcher
from .policy import Policy, every_decision, policy_line
from .sections import CONDITIONS, Section, matches

if TYPE_CHECKING:
    from .engines import EngineSettings
    from .files import read_policy_file
    from .nodes import Reader, of_mapping, of_yaml
else:  # YAML, and other engines
    __getattr__ = shown_later(
        __name__,
        {
            "engines": "EngineSettings",
            "nodes": "Reader of_mapping of_yaml",
            "files": "read_policy_file",
        },
    )
