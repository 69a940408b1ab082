"""The decision for each op, and its reason: op lists, policy files, sections. A policy is data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..later import shown_later
from .calls import FIELDS as FIELDS
from .calls import Call as Call
from .calls import Rule as Rule
from .calls import Verdict as Verdict
from .calls import leaves_pointwise_einsums as leaves_pointwise_einsums
from .decisions import ALLOW as ALLOW
from .decisions import DENY as DENY
from .decisions import FOLLOW as FOLLOW
from .decisions import INPUT as INPUT
from .decisions import RELATIVE as RELATIVE
from .decisions import SHIPPED as SHIPPED
from .decisions import UNDECIDED as UNDECIDED
from .decisions import UNNAMED as UNNAMED
from .decisions import CastPolicy as CastPolicy
from .decisions import Decision as Decision
from .decisions import LowType as LowType
from .decisions import parse_format as parse_format
from .decisions import settled_dtype as settled_dtype
from .faults import check_files as check_files
from .lists import directory as directory
from .lists import of_libraries as of_libraries
from .lists import read_list as read_list
from .lists import set_names as set_names
from .loading import load_policy as load_policy
from .loading import made_policy as made_policy
from .op_lists import FILE_NAMES as FILE_NAMES
from .op_lists import LIST_KINDS as LIST_KINDS
from .op_lists import PolicySource as PolicySource
from .op_lists import is_policy_file as is_policy_file
from .policy import Policy as Policy
from .sections import CONDITIONS as CONDITIONS
from .sections import Section as Section
from .sections import matches as matches

if TYPE_CHECKING:
    from .files import read_policy_file as read_policy_file
    from .nodes import Reader as Reader
    from .nodes import of_mapping as of_mapping
    from .nodes import of_yaml as of_yaml
    from .texts import policy_line as policy_line
else:  # YAML files and tables for people
    __getattr__ = shown_later(
        __name__,
        {
            "nodes": "Reader of_mapping of_yaml",
            "files": "read_policy_file",
            "texts": "policy_line",
        },
    )
