"""Calls as rules see them, the verdicts that rules return, and hmpx's own rule, for einsum."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch

from ..places import Place
from .decisions import SHIPPED, CastPolicy, Decision

Verdict = Decision | CastPolicy | None

#: The parts of a call that a rule may read, and that its verdicts may depend on.
FIELDS: Final = ("shapes", "dtypes", "devices", "kwargs", "place")


class Call:
    """A call as a rule sees it, without the values in its tensors.

    Tensors are listed in the order of the op's parameters, also those in lists.

    Attributes:
        op: Op name.

    Example:
        >>> def look(call):
        ...     print(call.op, call.dtypes, [tuple(shape) for shape in call.shapes])
        >>> fn = hmpx.register_rule("mm", look)
        >>> with hmpx.convert(device_types={"cpu"}):
        ...     y = torch.mm(torch.ones(2, 3), torch.ones(3, 4))
        mm (torch.float32, torch.float32) [(2, 3), (3, 4)]
        >>> hmpx.unregister_rule("mm")
    """

    __slots__ = ("_read", "_values", "op")

    def __init__(self, op: str, values: Mapping[str, Any], read: set[str]) -> None:
        self.op, self._values, self._read = op, values, read

    def _get(self, field: str) -> Any:
        self._read.add(field)
        return self._values[field]

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        """Shapes of the tensors."""
        return self._get("shapes")  # type: ignore[no-any-return]

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes of the tensors, before any cast."""
        return self._get("dtypes")  # type: ignore[no-any-return]

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Devices of the tensors."""
        return self._get("devices")  # type: ignore[no-any-return]

    @property
    def device(self) -> str | None:
        """Device type of the first tensor, such as ``"cuda"``; None if there is none."""
        return self.devices[0].type if self.devices else None

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """The arguments that are not tensors, by name, also those given by position: ``{"stride": 2}``.

        Numbers, strings, dtypes, and tuples of these; lists are tuples here.
        """
        return self._get("kwargs")  # type: ignore[no-any-return]

    @property
    def module(self) -> str:
        """Qualified name of the innermost running module: ``"encoder.layer.3.attention"``.

        As in ``named_modules`` of the outermost running module; ``""`` for that module itself, and
        outside of modules.
        """
        return self._place().path

    @property
    def module_class(self) -> str:
        """Class name of that module; ``""`` outside of modules."""
        classes = self._place().classes
        return classes[-1] if classes else ""

    @property
    def module_classes(self) -> tuple[str, ...]:
        """Class names of all running modules, the outermost first."""
        return self._place().classes

    @property
    def training(self) -> bool | None:
        """Whether that module is in training mode; None outside of modules."""
        return self._place().training

    def _place(self) -> Place:
        return self._get("place")()  # type: ignore[no-any-return]


#: Decides one op's calls; None leaves the call to the next rule, and then to the lists.
Rule: TypeAlias = Callable[[Call], Verdict]


# --- einsum --------------------------------------------------------------------------------------

# Shipped lists run einsum in low precision only where it sums products, as torch.autocast does. torch
# computes other equations elementwise, such as ``"i,j->ij"`` of positions and frequencies. Rounded to
# bfloat16, positions above 256 would coincide.


def leaves_pointwise_einsums(decisions: Mapping[str, Decision]) -> bool:
    """Whether a shipped list puts einsum in low precision, so that `pass_pointwise` must decide first."""
    decision = decisions.get("einsum")
    if decision is None or decision.cast_policy is not CastPolicy.LOW:
        return False
    return decision.reason.startswith(SHIPPED)


def pass_pointwise(call: Call) -> Decision | None:
    """A rule: leaves calls alone that sum no products."""
    equation = call.kwargs.get("equation")
    if isinstance(equation, str) and not sums_products(equation, call.shapes):
        return Decision(CastPolicy.PASS, reason="an einsum that sums no products")
    return None


def sums_products(equation: str, shapes: Sequence[Sequence[int]]) -> bool:
    """Whether an index is summed that is longer than 1 in several operands."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    counts: collections.Counter[str | int] = collections.Counter(inputs)
    longer: collections.Counter[str | int] = collections.Counter()
    for term, shape in zip(terms, shapes, strict=False):
        before, dots, after = term.partition("...")
        sizes: list[tuple[str | int, int]] = [*zip(before, shape, strict=False)]
        sizes += zip(reversed(after), reversed(shape), strict=False)
        if dots:  # its dimensions are right-aligned
            sizes += enumerate(reversed(shape[len(before) : len(shape) - len(after)]))
        longer.update({index for index, size in sizes if size != 1})
    if arrow:
        summed = [n for n in longer if (n if isinstance(n, str) else "...") not in output]
    else:
        summed = [n for n in longer if counts[n] > 1]
    return any(longer[index] > 1 for index in summed)
