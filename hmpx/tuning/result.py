"""The result of a search: the set, the policy, and the evidence."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import OptionError, brief, said_by
from ..policy import Policy
from ..reports import written
from . import text
from .assignment import FP32, assigned, policy_of
from .candidates import Candidate, Evaluation, Kept, Seen, bare, is_following, parted, shares


@dataclass(frozen=True)
class Tuned:
    """The smallest set of ops to keep in fp32 that a search has found, and why.

    Printing it shows the verdict, the kept ops with reasons, and the path of the search.

    Attributes:
        kept: Ops that are not in ``low_precision_type``: by name, or ``"module:op"``. ``"linear=bfloat16"``
            is in another type than fp32; ``"add=follows"`` is in low precision only if all its inputs are.
            Among modules, an op's name alone stands for the modules that are not candidates themselves;
            ``candidates`` lists what each name stands for.
        error: The error with these in fp32. With several batches, the limit for 95 % of further ones.
        all_low_error: The error with nothing in fp32.
        fresh_error: The largest error on batches that the search has not seen; None without such batches.
        tolerance: The largest error allowed.
        noise: The error of fp32 against itself.
        metric: Name of the metric.
        low_precision_type: Name of the type of all other ops.
        evaluations: Number of sets evaluated.
        is_complete: Whether the search finished: no op can be removed from the set. If not, the set is
            the best so far.
        stopped_by: Why it ended early: ``"budget"``, ``"interrupt"``, ``"fresh inputs"`` (each smaller set
            failed on them), or ``""``.
        seen: Low-precision shares of the candidates that may follow their inputs, with the set.
        limit: The limit on the choice of types, as text; ``""`` if a tolerance was the limit.
        searched: The smaller tolerance of the last search, after a set failed on fresh inputs; else None.
        path: The evaluations, in order.
        candidates: All ops that could be kept.
        conversion: Arguments of `hmpx.convert` with which the errors were measured, besides the policy: the
            device types, and options such as ``legalize``. Empty for a command, which decides itself.

    Example:
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()), torch.ones(2, 8)
        >>> best = hmpx.tune(model, x, tolerance=0.1, device_types={"cpu"}, progress=False)
        >>> best.keep_fp32, best.is_complete, best.low_precision_flops_share
        (frozenset(), True, 1.0)
        >>> with hmpx.convert(**best.lists):
        ...     model(x).dtype
        torch.bfloat16
    """

    kept: Kept
    error: float
    all_low_error: float
    fresh_error: float | None
    tolerance: float
    noise: float
    metric: str
    low_precision_type: str
    evaluations: int
    is_complete: bool
    stopped_by: str
    path: tuple[Evaluation, ...] = field(repr=False)
    candidates: tuple[Candidate, ...] = field(repr=False)
    limit: str = ""
    searched: float | None = None
    seen: Mapping[str, Seen] = field(default_factory=dict, repr=False)
    conversion: Mapping[str, Any] = field(default_factory=dict)

    @property
    def keep_fp32(self) -> Kept:
        """Ops kept in fp32 throughout, by name, or ``"module:op"``."""
        return frozenset(name for name in self.kept if bare(name) == name)

    @property
    def follows(self) -> Kept:
        """Ops that are in low precision only if all their inputs are, and else in fp32."""
        return frozenset(bare(name) for name in self.kept if is_following(name))

    @property
    def types(self) -> Mapping[str, str]:
        """The type of each candidate, by name; ``"follows"`` for one that follows its inputs."""
        low = dict.fromkeys((each.name for each in self.candidates), self.low_precision_type)
        return low | {name: other or FP32 for name, other in map(parted, self.kept)}

    @functools.cached_property
    def policy(self) -> Policy:
        """The policy that keeps these in fp32; ops that the model does not call keep their default."""
        types = assigned(self.candidates, self.kept, self.low_precision_type)
        return policy_of(types, self.low_precision_type)

    @property
    def lists(self) -> Mapping[str, Any]:
        """All arguments of the measured conversion: ``hmpx.convert(**best.lists)``."""
        return {"policy": self.policy, **self.conversion}

    @property
    def low_precision_flops_share(self) -> float:
        """The share of the model's floating-point operations in low precision, from 0 to 1."""
        return shares(self.candidates, self.kept, self.seen)[0]

    @property
    def low_precision_bytes_share(self) -> float:
        """The share of the bytes that ops read and write, as counted in fp32, in low precision."""
        return shares(self.candidates, self.kept, self.seen)[1]

    @property
    def time_share(self) -> float | None:
        """The measured time of all ops, as a share of their time in fp32.

        None without ``objective="time"``.
        """
        known = [each for each in self.candidates if each.saved is not None]
        low = [each.saved or 0.0 for each in known if each.name not in self.keep_fp32]
        return 1 - sum(low) if known else None

    def error_without(self, name: str) -> float | None:
        """Returns the error with the set but without ``name``; None if that was not evaluated."""
        without = self.kept - {name}
        found = [e.error for e in self.path if e.kept == without and e.phase != "fresh inputs"]
        return found[-1] if found else None

    def write(self, directory: str | os.PathLike[str]) -> list[Path]:
        """Writes lists (or a policy file where modules differ) with reasons in comments, and reports.

        Args:
            directory: The directory, created if missing.

        Returns:
            The paths: ``bf16.txt``, ``fp32.txt`` and ``widest.txt`` for ``convert(lists=directory)``, or
            ``policy.yaml`` for ``convert(policy=...)``; ``report.txt`` and ``report.html``. The first line
            of each list holds the whole call, with `conversion`.

        Raises:
            OptionError: They can't be written.
        """
        folder = Path(directory)
        files = {
            **text.files(self),
            "report.txt": f"{self}\n",
            "report.html": self.to_html(),
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            raise OptionError(f"can't write {folder}: {said_by(error)}") from error
        for name, content in files.items():
            written(content, folder / name)
        return [folder / name for name in files]

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns a page that needs no network, and writes it to ``path`` if given.

        Raises:
            OptionError: It can't be written.
        """
        return written(text.html_page(self), path)

    __repr__ = brief

    def __str__(self) -> str:
        return text.text(self)

    def _repr_html_(self) -> str:
        return text.notebook_part(self)
