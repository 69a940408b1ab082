"""`convert` and `revert`: one conversion of torch, and undo."""

from __future__ import annotations

from .converting import casts_enabled as casts_enabled
from .converting import check_names as check_names
from .converting import checked_policy as checked_policy
from .converting import convert as convert
from .converting import is_converted as is_converted
from .converting import observable as observable
from .converting import refuse_where_off as refuse_where_off
from .converting import restore as restore
from .converting import restoring_conversion as restoring_conversion
from .converting import revert as revert
from .converting import unconverted as unconverted
from .session import Session as Session
from .switching import current as current
