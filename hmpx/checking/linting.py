"""`lint`: a block whose calls are checked by the rules."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .. import arguments
from ..comparing import Origins, contents, is_readable, may_read
from ..errors import OptionError, to_the_end
from ..observers import Attached, OpCall, Values
from ..patches import SCALERS
from ..reports import ReportTable, Written
from ..session import about_run, observable, restoring
from ..tensors import LOW_DTYPES, node_of, short_name
from ..torch_internals import uncompiled, unseen
from ..torch_state import named_tensors, spot, without_casts
from .findings import RULES, Finding, findings_page, is_ignored
from .lint_kernels import LintedKernels
from .lint_rules import findings_of
from .lint_trace import LintedCall, Trace

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Lint(Written):
    """A context manager returned by `lint`; iterates over its findings.

    Attributes:
        about: See [results](#results).

    Example:
        >>> with hmpx.lint() as findings:
        ...     t = torch.arange(1000).to(torch.bfloat16)
        >>> [each.code for each in findings]
        ['HP102']
    """

    def __init__(self, every: int, select: frozenset[str]) -> None:
        """Is called by `lint` only."""
        self.about: Mapping[str, str] = {}
        self._every, self._select = every, select
        self._found: dict[tuple[str, ...], Finding] = {}
        self._origins, self._trace = Origins(), Trace()
        self._models: dict[int, nn.Module] = {}
        self._step = 0
        self._fp16: OpCall | None = None
        self._had_backward = False  # through the result of that call
        self._before: list[tuple[str, Tensor, Tensor]] = []
        self._attached: Attached | None = None
        self._kernels = LintedKernels(self._add, lambda: self._trace)
        self._block: contextlib.ExitStack | None = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings so far, by code, the largest effect first; without those ignored in the program."""
        found = [each for each in self._found.values() if not is_ignored(each)]
        return tuple(sorted(found, key=lambda each: (each.code, -each.effect)))

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def _data(self) -> Mapping[str, Any]:
        return {
            "hmpx_lint": 1,
            "about": self.about,
            "findings": [asdict(each) for each in self.findings],
        }

    def _table(self) -> ReportTable:
        return ReportTable.of_fields([each.name for each in fields(Finding)], self.findings)

    def _page(self) -> str:
        return findings_page(self.findings, self.about)

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings)) or "no findings"

    def __repr__(self) -> str:
        return f"<hmpx.Lint: {len(self)} findings in {self._step + 1} steps>"

    # --- the block -------------------------------------------------------------------------------

    @restoring
    def __enter__(self) -> Lint:
        if self._block is not None:
            raise OptionError("this lint was entered before; make a new one with hmpx.lint()")
        self.about = about_run()
        self._attached = Attached(self._check_call, every_op=True, values=True, kernels=True)
        SCALERS.clear()
        with contextlib.ExitStack() as block:
            block.enter_context(observable())
            block.enter_context(self._attached)
            block.enter_context(register_module_forward_pre_hook(self._note_model))
            block.enter_context(register_optimizer_step_pre_hook(self._before_step))
            block.enter_context(register_optimizer_step_post_hook(self._after_step))
            block.enter_context(uncompiled())
            self._kernels.__enter__()
            self._block = block.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if (block := self._block) is not None:

            def leave() -> None:
                self._kernels.pause()
                block.close()

            to_the_end(leave)
        self._check_scaling()
        for model in self._models.values():
            self._check_made(model)
        self._trace, self._origins, self._before = Trace(), Origins(), []

    def _add(self, findings: Iterable[Finding]) -> None:
        for each in findings:
            if each.code not in self._select:
                continue
            key = each.code, each.op, each.location  # once for all layers of a kind
            known = self._found.get(key)
            worst = each if known is None or each.effect > known.effect else known
            self._found[key] = replace(worst, calls=known.calls + 1 if known else 1)

    # --- calls -----------------------------------------------------------------------------------

    def _check_call(self, call: OpCall, /, *values: Unpack[Values]) -> None:
        inputs, _, _, result = values
        seen = LintedCall(call, *values, self._kernels.take_written())
        if not may_read() or not all(map(is_readable, [*inputs, *seen.outputs])):
            return
        if call.phase == "forward" and self._fp16 is None:
            self._note_fp16(call, seen.outputs)
        with without_casts():
            self._origins.note(call, inputs, result)
            self._add(findings_of(seen, self._trace, self._origins))
        self._trace.add(seen)

    def _note_fp16(self, call: OpCall, outputs: list[Tensor]) -> None:
        for each in outputs:
            if each.dtype is torch.float16 and (node := node_of(each)) is not None:
                self._fp16, self._had_backward = call, False
                node.register_prehook(self._note_backward)
                return

    def _note_backward(self, gradients: object) -> None:
        self._had_backward = True

    # --- models and steps --------------------------------------------------------------------------

    def _note_model(self, module: nn.Module, args: Any) -> None:
        if module is spot()[0]:
            self._models[id(module)] = module

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._check_scaling()
        self._kernels.is_in_step, self._kernels.has_drawn = True, False
        if self._step % self._every:
            return
        self._note_parameters(optimizer)

    @unseen
    def _note_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        names = {
            id(each): name for model in self._models.values() for name, each in named_tensors(model)
        }
        with without_casts(), torch.no_grad():
            self._before = [
                (names.get(id(each), "a parameter"), each, each.detach().clone())
                for group in optimizer.param_groups
                if group.get("lr") != 0  # a warm-up begins with 0
                for each in group["params"]
                if each.dtype in LOW_DTYPES and each.grad is not None
            ]

    @unseen
    def _check_parameters(self) -> None:
        """HP107: low-precision parameters that a step can't move."""
        with without_casts(), torch.no_grad():
            for name, tensor, before in self._before:
                moves = tensor.grad != 0 if tensor.grad is not None else torch.tensor(False)
                count = moves.sum().item()
                share = ((tensor == before) & moves).sum().item() / count if count else 0.0
                if share > 0.5:
                    evidence = f"{share:.0%} of the {short_name(tensor.dtype)} values did not move"
                    remedy = "keep float32 parameters and convert instead, or round stochastically"
                    self._add([Finding("HP107", name, "", "", evidence, share, None, remedy)])
        self._before = []

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._check_parameters()
        self._kernels.is_in_step = False
        self._step += 1
        for each in (self._attached, self._kernels):
            if each is not None:
                each.pause() if self._step % self._every else each.resume()
        self._trace, self._origins = Trace(), Origins()  # which keep tensors alive

    @unseen
    def _check_scaling(self) -> None:
        """HP110: a backward through float16 without a loss scaler."""
        call, self._fp16 = self._fp16, None
        if call is None or any(each.is_enabled() for each in list(SCALERS)):
            return
        gradients = [
            each.grad
            for model in self._models.values()
            for each in model.parameters()
            if each.grad is not None and is_readable(each.grad)
        ]
        with without_casts(), torch.no_grad():
            nonzero = sum((each != 0).sum().item() for each in gradients)
            share = sum(map(_subnormal_in_fp16, gradients)) / max(1, nonzero)
        kind = "subnormal"
        if self._had_backward and gradients and not nonzero:
            share, kind = 1.0, "zero"
        if share > 0.01:
            evidence = f"{share:.0%} of the gradients are {kind} in fp16, without a loss scaler"
            remedy = "scale the loss with torch.amp.GradScaler, or use bfloat16"
            place = call.op, call.module, call.location
            self._add([Finding("HP110", *place, evidence, share, None, remedy)])

    def _check_made(self, model: nn.Module) -> None:
        """HP111: fp32 parameters and buffers whose contents are low."""
        for name, tensor in named_tensors(model):
            if (
                is_readable(tensor)
                and tensor.dtype is torch.float32
                and (found := contents(tensor)) in LOW_DTYPES
            ):
                evidence = f"{short_name(found)} values in float32"
                remedy = "make it in float32, or load it from a float32 checkpoint"
                self._add([Finding("HP111", name, "", "", evidence, 1.0, None, remedy)])


def _subnormal_in_fp16(gradient: Tensor) -> float:
    """Returns the number of values that float16 holds as subnormal ones."""
    is_held = gradient.half().to(gradient.dtype) == gradient
    is_small = (gradient != 0) & (gradient.abs() < torch.finfo(torch.float16).tiny)
    return (is_held & is_small).sum().item()


def lint(*, every: int = 50, select: Iterable[str] = (), ignore: Iterable[str] = ()) -> Lint:
    """Finds calls of the block that lose precision or time, without changing a result.

    Works with and without a conversion, also over torch.autocast. Effects are measured in float64;
    a finding about values is reported only if its effect is over five times that of one rounding,
    and over four times that of the remedy. ``# hmpx: ignore[HP103]`` on a line of the program
    leaves it out. Keeps the arguments of the last 64 calls alive.

    Args:
        every: Checks one optimizer step in ``every``, from the first on. A checked step is much
            slower.
        select: Codes to check; default: all.
        ignore: Codes to leave out.

    Raises:
        OptionError: An unknown code, or ``every`` is not a positive whole number.

    Example:
        >>> with hmpx.lint() as findings:
        ...     x = torch.linspace(0, 9, 64).bfloat16()
        ...     y = (x * x).float().softmax(0)
        >>> print(findings.findings[0].code, findings.findings[0].op)
        HP101 softmax
    """
    chosen = arguments.texts("select", select) or [*RULES]
    left_out = arguments.texts("ignore", ignore)
    for each in (*chosen, *left_out):
        arguments.choice("a code", each, RULES)
    return Lint(arguments.whole("every", every, 1), frozenset(chosen) - frozenset(left_out))
