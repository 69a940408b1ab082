"""Decisions for ops: the `CastPolicy`, and the dtypes that an op computes in and returns."""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import torch

from .. import arguments, number_formats, tensors
from ..errors import OptionError, shown, suggestion
from ..number_formats import OVERFLOWS, ROUNDING_MODES, is_format

if TYPE_CHECKING:
    from ..number_formats import Format

#: A low-precision type: a dtype of torch's, or a number format, which is emulated.
LowType: TypeAlias = "torch.dtype | Format"


class CastPolicy(enum.Enum):
    """How an op's inputs are cast.

    Example:
        >>> hmpx.load_policy()["softmax"].cast_policy
        <CastPolicy.FP32: 'fp32'>
        >>> hmpx.ALLOW is hmpx.CastPolicy.LOW
        True
    """

    LOW = "low"  #: every eligible input -> the low-precision dtype
    FP32 = "fp32"  #: every bfloat16 or float16 input -> float32
    WIDEST = "widest"  #: all floating inputs -> the widest dtype among them
    FOLLOW = "follow"  #: nothing if all have one low-precision dtype; else all -> float32
    FIRST = "first"  #: the other eligible inputs -> the dtype of the first floating one
    PASS = "pass"  #: nothing


#: With these, the target dtype depends on the call.
RELATIVE: Final = frozenset({CastPolicy.WIDEST, CastPolicy.FIRST, CastPolicy.FOLLOW})

#: Lists of these yield to all other lists. A list of FOLLOW does not: it is always the user's.
YIELDING: Final = RELATIVE - {CastPolicy.FOLLOW}

#: Prefix of the names of shipped lists.
SHIPPED: Final = "lists/"

#: Prefix of the reason of unlisted ops whose kernels reject mixed dtypes.
UNNAMED: Final = "lists/first.txt:"

#: An output dtype: that of the call's first floating input, before casts.
INPUT: Final = "input"

#: Fields for the format of some of an op's tensors.
ROLES: Final = ("weights", "activations", "gradients")

#: The names in TVM's mixed-precision pass.
ALLOW: Final = CastPolicy.LOW
FOLLOW: Final = CastPolicy.FOLLOW
DENY: Final = CastPolicy.FP32


@dataclass(frozen=True, slots=True)
class Decision:
    """How one op runs: the casts of its inputs and outputs.

    Attributes:
        cast_policy: The rule for its inputs.
        dtype: The dtype that `CastPolicy.LOW` and `CastPolicy.FP32` cast to, or the number format
            that `CastPolicy.LOW` rounds to; None: the policy's low-precision type, or no cast to a
            fixed dtype.
        accumulate_dtype: The op computes in it: inputs are rounded as usual, then upcast to it.
            None: as the kernel does.
        output_dtype: Floating outputs are cast to it, not rounded to a number format; ``"input"``:
            to the first floating input's dtype before casts. None: the inputs' dtype.
        weights: The number format, or its name, of weights; see
            [roles](formats.md#formats-by-role). None: ``dtype``. If any of these three is given, a
            ``dtype`` of torch's is emulated as a format, too.
        activations: The format of all other inputs; None: ``dtype``.
        gradients: The format of gradients, ``"float32"`` for none; None: by ``round_gradients`` of
            `convert`.
        rounding: How values are rounded to these formats; None: by ``rounding`` of `convert`.
        overflow: How values beyond a format's largest are handled; None: by ``overflow`` of `convert`.
        reason: Its origin: ``"my_bf16.txt:3"``. Not part of equality.

    Raises:
        OptionError: A value is not one of these.

    Example:
        >>> decision = hmpx.Decision(hmpx.ALLOW, torch.float16, output_dtype=torch.float32)
        >>> fn = hmpx.register_rule("mm", lambda call: decision)
        >>> with hmpx.convert(device_types={"cpu"}):
        ...     torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype
        torch.float32
        >>> hmpx.unregister_rule("mm")
    """

    cast_policy: CastPolicy
    dtype: LowType | None = None
    accumulate_dtype: torch.dtype | None = field(default=None, kw_only=True)
    output_dtype: torch.dtype | Literal["input"] | None = field(default=None, kw_only=True)
    weights: Format | None = field(default=None, kw_only=True)
    activations: Format | None = field(default=None, kw_only=True)
    gradients: Format | None = field(default=None, kw_only=True)
    rounding: str | None = field(default=None, kw_only=True)
    overflow: str | None = field(default=None, kw_only=True)
    reason: str = field(default="", compare=False, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.cast_policy, CastPolicy):
            raise OptionError(
                "a decision's policy must be hmpx.ALLOW, FOLLOW or DENY, or another "
                f"hmpx.CastPolicy, not {shown(self.cast_policy)}"
            )
        if self.dtype is not None and not (
            self.cast_policy is CastPolicy.LOW and is_format(self.dtype)
        ):
            allowed: tuple[torch.dtype, ...] = {
                CastPolicy.LOW: tensors.LOW_PRECISION,
                CastPolicy.FP32: (torch.float32,),
            }.get(self.cast_policy, ())
            if not isinstance(self.dtype, torch.dtype) or self.dtype not in allowed:
                kinds = " or ".join(map(str, allowed)) or "left out"
                if self.cast_policy is CastPolicy.LOW:
                    kinds += " or an hmpx.formats format"
                raise OptionError(
                    f"dtype of {self.cast_policy.name} must be {kinds}, not {shown(self.dtype)}"
                )
        self._check_formats()
        for name in ("accumulate_dtype", "output_dtype"):
            value = getattr(self, name)
            if name == "output_dtype" and isinstance(value, str) and value == INPUT:
                if is_format(self.dtype):
                    raise OptionError(
                        "output_dtype 'input' is for dtypes; an op in a number format returns what "
                        "is rounded to it, or a dtype such as torch.float32"
                    )
                continue
            if value is not None and not (
                isinstance(value, torch.dtype) and value in tensors.COMPUTED
            ):
                known = ", ".join(str(dtype) for dtype in tensors.COMPUTED)
                raise OptionError(f"{name} must be one of {known}, not {shown(value)}")
        if self.cast_policy is CastPolicy.PASS and self.is_composed:
            raise OptionError("an op of CastPolicy.PASS has no accumulate_dtype or output_dtype")
        object.__setattr__(self, "reason", arguments.text("reason", self.reason))

    def _check_formats(self) -> None:
        given = [
            name for name in (*ROLES, "rounding", "overflow") if getattr(self, name) is not None
        ]
        if not given:
            return
        if self.cast_policy is not CastPolicy.LOW:
            raise OptionError(
                f"{given[0]} is for ops in low precision, not for those of {self.cast_policy.name}"
            )
        for role in ROLES:
            value = getattr(self, role)
            if value is not None:
                object.__setattr__(self, role, parse_format(role, value))
        for name, known in (("rounding", ROUNDING_MODES), ("overflow", OVERFLOWS)):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, arguments.choice(name, value, known))
        if isinstance(self.dtype, torch.dtype):
            if not set(given) & set(ROLES):
                raise OptionError(
                    f"{given[0]} has no effect on {self.dtype}, which torch rounds to; take a number "
                    f"format, such as hmpx.formats.get({tensors.long_name(self.dtype)!r})"
                )
            object.__setattr__(self, "dtype", parse_format("dtype", self.dtype))

    def __repr__(self) -> str:
        always = {"cast_policy", "dtype", "reason"}
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        shown = {n: value for n, value in values.items() if n in always or value is not None}
        return f"Decision({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @property
    def is_named(self) -> bool:
        """Whether a list other than ``first.txt``, a section or a rule names the op."""
        return self.cast_policy is not CastPolicy.PASS and not self.reason.startswith(UNNAMED)

    @property
    def returns_input_dtype(self) -> bool:
        """Whether floating outputs are cast to the first input's dtype before casts."""
        return self.output_dtype == INPUT

    @property
    def is_composed(self) -> bool:
        """Whether it does more than cast inputs."""
        return self.accumulate_dtype is not None or self.output_dtype is not None

    def options(self) -> Iterator[tuple[str, Any]]:
        """Yields the words after the type in a list line that makes this decision, and their values."""
        for word, (name, _) in LINE_OPTIONS.items():
            value = getattr(self, name)
            if value is not None and word != "dtype":
                yield word, value


#: For ops that no list names and no rule decides.
UNDECIDED: Final = Decision(CastPolicy.PASS, reason="in no list")


def settled_dtype(decision: Decision, low_dtype: LowType) -> LowType | None:
    """Returns the dtype that a decision casts to; ``low_dtype`` where the decision has none."""
    if decision.dtype is None and decision.cast_policy is CastPolicy.LOW:
        return low_dtype
    if decision.dtype is None and decision.cast_policy is CastPolicy.FP32:
        return torch.float32
    return decision.dtype


def parse_low_type(value: object) -> LowType:
    """Returns the low-precision type ``value``: one of torch's dtypes, a number format, or a name of one."""
    if is_format(value):
        return value
    if isinstance(value, torch.dtype) and value in tensors.LOW_PRECISION:
        return value
    native = {tensors.long_name(dtype): dtype for dtype in tensors.LOW_PRECISION}
    given = number_formats.name_of(value) or ""
    name = given if given in native else number_formats.canonical(given)
    if name in native:
        return native[name]
    if isinstance(value, torch.dtype) and value in tensors.COMPUTED:
        name = ""  # the format float32 is available by name
    if name in number_formats.names() or re.match(r"custom\[|e\d+m\d+$", name):
        return number_formats.get(name)
    known = " or ".join(str(dtype) for dtype in tensors.LOW_PRECISION)
    hint = number_formats.said_of(given)
    if not hint and name:
        hint = suggestion(name, [*native, *number_formats.names()])
    raise OptionError(
        f"low_precision_type must be {known}, or a number format, not {shown(value)}{hint}"
    )


def parse_format(name: str, value: object) -> Format:
    """Returns the number format ``value``, or the one of that name; for a dtype, the format that emulates it."""
    if isinstance(value, torch.dtype) and value in tensors.COMPUTED:
        value = tensors.long_name(value)
    try:
        return number_formats.get(value)  # type: ignore[arg-type]
    except OptionError as error:
        raise OptionError(f"{name}: {error}") from None


#: A word that may follow a name on a list's line, ``output=float32`` -> the field of `Decision` that it
#: sets, and the parser of its value. ``dtype`` stands alone: ``conv2d float16``.
LINE_OPTIONS: Final[Mapping[str, tuple[str, Callable[[str], Any]]]] = {
    "dtype": ("dtype", parse_low_type),
    "accumulate": ("accumulate_dtype", tensors.parse_name),
    "output": ("output_dtype", lambda name: INPUT if name == INPUT else tensors.parse_name(name)),
    **{role: (role, functools.partial(parse_format, role)) for role in ROLES},
    "rounding": ("rounding", functools.partial(arguments.choice, "rounding", known=ROUNDING_MODES)),
    "overflow": ("overflow", functools.partial(arguments.choice, "overflow", known=OVERFLOWS)),
}

#: Options of lines in all lists; the others are for low-precision lists.
OF_ALL_LINES: Final = frozenset({"accumulate_dtype", "output_dtype"})
