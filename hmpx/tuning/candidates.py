"""Candidates: ops that a search may keep in fp32; sets of them, with their results and their policies."""

from __future__ import annotations

import functools
import glob
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from .. import ops
from ..errors import PolicyFileError
from ..policy import DENY, CastPolicy, Decision, Policy, load_policy
from ..renames import renamed_fields
from ..reports import Row

#: A call site of an op: its name, and the module's qualified name; ``""`` outside any module.
Spot = tuple[str, str]

#: The type of ops that are kept in fp32.
FP32: Final = "float32"

#: The type of ops that are in low precision only if all their inputs are, and else in fp32.
FOLLOWS: Final = "follows"


def observing_policy() -> Policy:
    """Returns a policy that shows each op of an fp32 program and changes nothing.

    Python functions are seen by the ops that they call. Those that call something that can't be patched, as
    ``Tensor.__rsub__`` does, are listed themselves.
    """
    is_listed = ops.facts("python_level")
    listed = [
        name
        for name in ops.computing()
        if any(
            site.is_python
            and (
                site.attribute.startswith("__") or f"{site.namespace}.{site.attribute}" in is_listed
            )
            for site in ops.table()[name].sites
        )
    ]
    return Policy({name: Decision(DENY) for name in sorted(listed)})


def policy_of(types: Mapping[Spot, str], low_type: str) -> Policy:
    """Returns the policy by which each spot computes in its type; the default lists decide other ops."""
    return load_policy(policy=policy_source(types, low_type))


def policy_source(types: Mapping[Spot, str], low_type: str) -> dict[str, Any]:
    """Returns that policy in the form of a policy file."""
    base = {}
    for op in sorted({op for op, _ in types}):  # its type in modules that no section names
        found = {each for (name, _), each in types.items() if name == op}
        base[op] = found.pop() if len(found) == 1 else types.get((op, ""), low_type)
    lists: dict[str, Any] = dict(_lists({op: each for op, each in base.items() if each != FOLLOWS}))
    for op in [op for op, each in base.items() if each == FOLLOWS]:
        _make_follow(op, lists)
    source = {"low_precision_type": low_type, "lists": "hmpx", **lists}
    placed = _placed(types, base)
    alike: dict[tuple[int, tuple[tuple[str, str], ...]], list[str]] = {}
    for module in sorted(placed, key=lambda each: (-each.count("."), each)):
        own = tuple(sorted(placed[module].items()))
        alike.setdefault((module.count("."), own), []).append(module)
    if alike:
        source["sections"] = [
            {"module": [*map(glob.escape, modules)], **_lists(dict(own))}
            for (_, own), modules in alike.items()
        ]
    return source


@functools.cache
def may_follow(op: str) -> bool:
    """Whether a policy can make an op follow its inputs: not if other ops' lines alone decide it."""
    if ops.is_foreign(op):
        return False
    try:
        decided = policy_of({(op, ""): FOLLOWS}, "bfloat16")[op].cast_policy
    except PolicyFileError:
        return False
    return decided is relative(op)


@functools.cache
def relative(op: str) -> CastPolicy:
    """Returns the decision for an op that is in no low-precision or fp32 list."""
    nothing = {"remove": ["*"]}
    return load_policy(policy={"lists": "hmpx", "low": nothing, "fp32": nothing})[op].cast_policy


def _make_follow(op: str, lists: dict[str, Any]) -> None:
    """Removes an op from the shipped lists that decide otherwise."""
    shipped, own = load_policy()[op].cast_policy, relative(op)
    if shipped is own:
        return
    is_promoted = own is CastPolicy.WIDEST and ops.covering(op) is not None
    if own is CastPolicy.PASS or is_promoted:
        lists.setdefault("pass", []).append(op)  # torch promotes it
        return
    found = lists.get(shipped.value, [])
    if isinstance(found, list):
        found = lists[shipped.value] = {"add": found, "remove": []}
    found["remove"].append(op)


def _placed(types: Mapping[Spot, str], base: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Returns module -> op -> type, where it differs from the enclosing modules."""
    placed: dict[str, dict[str, str]] = {}

    def inherited(op: str, module: str) -> str:
        """Returns an op's type by the sections of a module and of the enclosing ones."""
        while module:
            if op in placed.get(module, {}):
                return placed[module][op]
            module = module.rpartition(".")[0]
        return base[op]

    for (op, module), wanted in sorted(types.items(), key=lambda each: each[0][1].count(".")):
        if module and inherited(op, module) != wanted:
            placed.setdefault(module, {})[op] = wanted
            for other in sorted((ops.covered(op) - {op}) & base.keys()):  # a line covers these, too
                found = types.get((other, module)) or inherited(other, module)
                placed[module].setdefault(other, found)
    return placed


def _lists(types: Mapping[str, str]) -> dict[str, list[str]]:
    """Returns kind of list -> ops, in the order of policy files."""
    found: dict[str, list[str]] = {"low": [], "fp32": [], "widest": [], "first": [], "pass": []}
    for op, each in types.items():
        kind = relative(op).value if each == FOLLOWS else "fp32" if each == FP32 else "low"
        found[kind].append(op)
    return {kind: names for kind, names in found.items() if names}


# --- candidates ----------------------------------------------------------------------------------

#: Spot -> FLOPs and bytes of its calls.
Costs = Mapping[Spot, tuple[int, int]]

#: Candidates kept out of low precision: ``"add"`` in fp32, ``"add=follows"``.
Kept = frozenset[str]

#: Most spots that are candidates themselves when candidates are modules; the rest is grouped by op.
MOST_SPOTS: Final = 24

#: The cost of a line in a list, as a share of the model's work, however little work its op does.
COST_OF_A_LINE: Final = 0.01


class Score(NamedTuple):
    """The effect of rounding an op in a module."""

    effect: float = 0.0  # the first-order effect on the result
    is_hard: bool = False  # some of its values leave the low type's range
    is_unseen: bool = False  # some calls are rounded but get no gradient: their effect is unknown


Scores = Mapping[Spot, Score]


@dataclass(frozen=True)
class Candidate:
    """Something that is in fp32 or in low precision as a whole."""

    name: str  # "softmax", or "encoder.0.attn:softmax"
    spots: frozenset[Spot] = field(default=frozenset(), repr=False)  # the op and modules
    score: float | None = None  # its first-order effect on the result in low precision, if known
    flops: int = 0  # of its calls in one forward
    bytes: int = 0  # that these calls read and write in fp32
    benefit: float = 0.0  # their share of the model's work: of FLOPs and of bytes, half each
    is_hard: bool = False  # some of its values leave the low type's range
    is_unseen: bool = False  # the score excludes some of its calls, which get no gradient
    prior: float = 0.0  # order if scores are unknown: the smallest is kept first
    may_follow: bool = False  # it may also follow its inputs, call by call

    @property
    def cost(self) -> float:
        """The cost of keeping it: a share of the model's work, and a line in a list."""
        return self.benefit + COST_OF_A_LINE

    @property
    def op(self) -> str:
        """The op, in one or more modules."""
        return min(self.spots)[0]


def called_spots(rows: Iterable[Row]) -> Costs:
    """Maps each spot whose op may run in low precision to FLOPs and bytes of its calls.

    The rows come from an fp32 forward, converted by a policy without decisions. Excludes ops that write to
    their first argument, whose dtype decides; ops that only move, convert or make tensors; and those without a
    floating-point result, such as comparisons.
    """
    may_run_low = ops.computing()
    found: dict[Spot, tuple[int, int]] = {}
    for row in rows:
        if (
            row.phase == "backward"
            or row.cast_policy == "TARGET"
            or not (row.op in may_run_low or ops.is_foreign(row.op))
            or "float32" not in row.input_dtypes
            or "float32" not in row.output_dtypes
        ):
            continue
        spot = (row.op, row.module)
        flops, count = found.get(spot, (0, 0))
        found[spot] = flops + row.flops, count + row.bytes
    return found


def candidates_of(
    spots: Costs, scores: Scores | None = None, by: str = "op", *, follow: bool = False
) -> tuple[Candidate, ...]:
    """Returns a candidate for each op; by module one for each spot that matters, and one for the rest of each op.

    Each kept candidate costs the search an evaluation, so there are at most 32, unless there are more ops: spots of
    little effect are grouped by op. ``follow``
    is whether ops may follow their inputs at all.
    """
    alone = set(spots) if by == "module" else set()
    if scores is not None and len(alone) > MOST_SPOTS:
        most = max(0, min(MOST_SPOTS, 32 - len({op for op, _ in spots})))

        def importance(spot: Spot) -> tuple[bool, bool, float, Spot]:
            score = scores.get(spot, Score())
            return not score.is_hard, not score.is_unseen, -score.effect, spot

        alone = set(sorted(spots, key=importance)[:most])
    groups: dict[str, list[Spot]] = {}
    for spot in spots:
        name = f"{spot[1]}:{spot[0]}" if spot in alone else spot[0]
        groups.setdefault(name, []).append(spot)
    priors = {CastPolicy.FP32: 0.0, CastPolicy.LOW: 2.0}  # by what the default lists decide
    all_flops = max(1, sum(flops for flops, _ in spots.values()))
    all_bytes = max(1, sum(count for _, count in spots.values()))
    found = []
    for name, members in sorted(groups.items()):
        op = members[0][0]
        flops = sum(spots[spot][0] for spot in members)
        count = sum(spots[spot][1] for spot in members)
        known = [] if scores is None else [scores.get(spot, Score()) for spot in members]
        found.append(
            Candidate(
                name,
                frozenset(members),
                score=None if scores is None else math.hypot(*[each.effect for each in known]),
                flops=flops,
                bytes=count,
                benefit=(flops / all_flops + count / all_bytes) / 2,
                is_hard=any(each.is_hard for each in known),
                is_unseen=any(each.is_unseen for each in known),
                prior=priors.get(load_policy()[op].cast_policy, 1.0),
                may_follow=follow and may_follow(op),
            )
        )
    return tuple(found)


# --- members of sets ---------------------------------------------------------------------------------


def bare(member: str) -> str:
    """Returns the name of a member's candidate."""
    return member.removesuffix(f"={FOLLOWS}")


def following(name: str) -> str:
    """Returns the member for a candidate that follows its inputs."""
    return f"{name}={FOLLOWS}"


def is_following(member: str) -> bool:
    """Whether a member of a set follows its inputs."""
    return bare(member) != member


# --- results of a set --------------------------------------------------------------------------------


class LowShares(NamedTuple):
    """Shares of a candidate's work, while a set was evaluated."""

    flops: float  # in low precision
    bytes: float  # in low precision
    given: float  # bytes of calls whose inputs were all low: those that are low if it follows its inputs


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a set: its error, and the shares of candidates that may follow their inputs."""

    error: float  # infinite where outputs are not finite
    seen: Mapping[str, LowShares] = field(default_factory=dict)


@renamed_fields(phase="stage")
@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation of a search: whether a set passed, within the tolerance at that time, and why it ran."""

    kept: Kept
    stage: str  # "all fp32", "all low", "range", "prefix", "shipped", "follow", "prune", ...
    error: float
    passed: bool


def low_parts(
    candidate: Candidate, kept: Kept, seen: Mapping[str, LowShares]
) -> tuple[float, float]:
    """Returns the shares of a candidate's FLOPs and bytes in low precision with a set."""
    if candidate.name in kept:
        return 0.0, 0.0
    if following(candidate.name) in kept and candidate.name in seen:
        return seen[candidate.name].flops, seen[candidate.name].bytes
    return 1.0, 1.0


def shares(
    candidates: Sequence[Candidate], kept: Kept, seen: Mapping[str, LowShares] | None = None
) -> tuple[float, float]:
    """Returns the shares of FLOPs and of bytes in low precision; ``seen`` is from an evaluation of the set."""
    flops = count = 0
    low_flops = low_bytes = 0.0
    for each in candidates:
        flops_part, bytes_part = low_parts(each, kept, seen or {})
        flops, low_flops = flops + each.flops, low_flops + each.flops * flops_part
        count, low_bytes = count + each.bytes, low_bytes + each.bytes * bytes_part
    return low_flops / flops if flops else 1.0, low_bytes / count if count else 1.0


def types_of(candidates: Iterable[Candidate], kept: Kept, low_type: str) -> dict[str, str]:
    """Maps the name of each candidate to its type: ``low_type`` unless it is a member of ``kept``."""
    types = {each.name: low_type for each in candidates}
    return types | {bare(each): FOLLOWS if is_following(each) else FP32 for each in kept}


def assigned(candidates: Sequence[Candidate], kept: Kept, low_type: str) -> dict[Spot, str]:
    """Maps each spot to the type of its candidate."""
    types = types_of(candidates, kept, low_type)
    return {spot: types[each.name] for each in candidates for spot in each.spots}
