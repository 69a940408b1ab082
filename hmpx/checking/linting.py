"""`lint`: a block whose calls are checked by the rules."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakTensorKeyDictionary

from .. import arguments
from ..comparing import Origins, contents, is_readable, may_read
from ..errors import OptionError, to_the_end
from ..observers import Attached, OpCall, Values, spared, user_location
from ..ops import kind
from ..patches import SCALERS
from ..places import located, own_line
from ..reports import ReportTable, Written
from ..session import about_run, observable, restoring
from ..tensors import LOW_DTYPES, node_of, short_name, tensors_in
from ..torch_internals import is_any_autocast_enabled, uncompiled, unseen
from ..torch_state import casts_any, named_tensors, spot, without_casts
from .findings import RULES, Finding, findings_page, is_ignored
from .lint_kernels import LintedKernels
from .lint_rules import findings_of, mixed_modules, wide_product
from .lint_trace import PRODUCTS, LintedCall, Trace, memory

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: Steps that are checked anyway: in the first one states are zero, and copies of a model equal to it.
_FIRST_STEPS: Final = 2

#: Products in fp32 that take less of the FLOPs of all products cost little; a line that takes less is not named.
_LARGE: Final = 0.5
_LEAST_NAMED: Final = 0.1


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

    _attached: Attached  # in the block

    def __init__(self, every: int, select: frozenset[str]) -> None:
        """Is called by `lint` only."""
        self.about: Mapping[str, str] = {}
        self._every, self._select = every, select
        self._found: dict[tuple[str, ...], Finding] = {}
        self._intended = set[tuple[str, str]]()
        self._origins, self._trace = Origins(), Trace(self._intended)
        self._models: dict[int, nn.Module] = {}
        self._owned = set[int]()  # ids of the models' tensors
        self._lines: dict[int, str] = {}  # that called modules
        #: Model -> paths of modules -> dtypes in which they computed products.
        self._products: dict[int, dict[str, set[torch.dtype]]] = {}
        #: Op, line and whether they were low -> FLOPs of products, and what is found of those in fp32.
        self._flops: Counter[tuple[str, str, bool]] = Counter()
        self._wide: dict[tuple[str, str, bool], Finding | None] = {}
        self._product_dtype: torch.dtype | None = None  # low, of fp32 inputs
        #: Other leaves. torch swaps no tensor with a weak reference, so there are few of these.
        self._leaves: MutableMapping[Tensor, None] = WeakTensorKeyDictionary()
        self._step = 0
        self._fp16: OpCall | None = None
        self._backward = ""  # the line of a backward through the result of that call
        self._before: list[tuple[str, Tensor]] = []
        self._kernels = LintedKernels(self._add, lambda: self._trace, self._parameters)
        self._block: contextlib.ExitStack | None = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings so far, by code, the largest effect first; without those ignored in the program."""
        found = [
            each
            for each in self._found.values()
            if not (is_ignored(each) or self._is_intended(each))
        ]
        return tuple(sorted(found, key=lambda each: (each.code, -each.effect)))

    def _is_intended(self, found: Finding) -> bool:
        keys = {(found.code, found.location), (found.code, f"{found.op} {found.location}")}
        return (
            bool(keys & self._intended)
            and (f"not {found.code}", found.location) not in self._intended
        )

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def _data(self) -> Mapping[str, Any]:
        findings = [asdict(each) for each in self.findings]
        return {"hmpx_lint": 1, "about": self.about, "findings": findings}

    def _table(self) -> ReportTable:
        return ReportTable.of_fields([each.name for each in fields(Finding)], self.findings)

    def _page(self) -> str:
        return findings_page(self.findings, self.about)

    def __str__(self) -> str:
        faults = self.about.get("not looked at")
        left_out = [f"not looked at: {faults}"] if faults else []
        return "\n".join([*(list(map(str, self.findings)) or ["no findings"]), *left_out])

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
            block.callback(self._kernels.pause, at_end=True)
            self._block = block.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._block is not None:
            to_the_end(self._block.close)
        self._check_scaling()
        self._kernels.report_overwritten()
        self._check_models()
        self.about = about_run()
        self._trace, self._origins, self._before = Trace(self._intended), Origins(), []
        self._leaves.clear()
        self._kernels.forget()

    def _add(self, findings: Iterable[Finding]) -> None:
        for each in findings:
            found = _at_users_line(each)
            if found is None or each.code not in self._select:
                continue
            key = found.code, found.op, found.location  # once for all layers of a kind
            known = self._found.get(key)
            worst = found if known is None or found.effect > known.effect else known
            self._found[key] = replace(worst, calls=known.calls + 1 if known else 1)

    @property
    def _is_checked(self) -> bool:
        return self._step < _FIRST_STEPS or self._step % self._every == 0

    # --- calls -----------------------------------------------------------------------------------

    @spared
    def _check_call(self, call: OpCall, /, *values: Unpack[Values]) -> None:
        if not self._is_checked and torch.is_grad_enabled():  # the next step
            self._attached.pause()
            return
        inputs, _, _, result = values
        seen = LintedCall(call, *values, self._kernels.take_written())
        if not may_read() or not all(map(is_readable, [*inputs, *seen.outputs])):
            return
        is_product = kind(call.op)[0] in PRODUCTS and bool(seen.outputs)
        if call.phase == "forward":
            if is_product:
                paths, path = self._products.setdefault(id(spot()[0]), {}), call.module
                while path:
                    paths.setdefault(path, set()).add(seen.low or seen.outputs[0].dtype)
                    path = path.rpartition(".")[0]
            if self._backward:
                self._check_scaling()  # before the gradients are gone
            if self._fp16 is None:
                self._note_fp16(call, seen.outputs)
            for each in inputs:
                is_leaf = each.requires_grad and each._base is None and each.is_leaf
                if is_leaf and id(each) not in self._owned:
                    self._leaves[each] = None
        with without_casts():
            if is_product:
                self._note_product(seen)
            self._origins.note(call, inputs, result)
            self._add(findings_of(seen, self._trace, self._origins))
        self._trace.add(seen)
        self._kernels.flops = 0

    def _note_product(self, seen: LintedCall) -> None:
        place = seen.call.op, seen.call.location, seen.low is not None
        self._flops[place] += self._kernels.flops
        if seen.low is not None and any(each.dtype is torch.float32 for each in seen.inputs):
            self._product_dtype = seen.low
        upcast = [self._trace.upcast_from(each, is_kept=True) for each in seen.inputs]
        others = [each for each, low in zip(seen.inputs, upcast, strict=True) if low is None]
        if any(upcast) and any(self._origins.contents(each) is torch.float32 for each in others):
            self._product_dtype = self._product_dtype or next(filter(None, upcast))
        if seen.low is None and place not in self._wide:
            self._wide[place] = wide_product(seen, self._product_dtype or torch.bfloat16)

    def _note_fp16(self, call: OpCall, outputs: list[Tensor]) -> None:
        for each in outputs:
            if each.dtype is torch.float16 and (node := node_of(each)) is not None:
                self._fp16, self._backward = call, ""
                node.register_prehook(self._note_backward)
                return

    @spared
    def _note_backward(self, gradients: object) -> None:
        self._backward = user_location()

    # --- models and steps --------------------------------------------------------------------------

    @spared
    def _note_model(self, module: nn.Module, args: Any) -> None:
        if not self._is_checked:
            self._attached.pause()
            self._kernels.pause()
            return
        self._kernels.resume()
        if id(module) not in self._lines:
            self._lines[id(module)] = own_line(user_location())
        if module is spot()[0] and id(module) not in self._models and may_read():
            self._models[id(module)] = module
            self._check_model(module)

    @unseen
    def _check_model(self, model: nn.Module) -> None:
        self._owned |= {id(each) for _, each in named_tensors(model)}
        self._check_made(named_tensors(model))

    @spared
    def _check_models(self) -> None:
        for key, model in self._models.items():
            self._check_made(named_tensors(model))
            self._add(mixed_modules(model, self._products.get(key, {}), self._lines))
        known = {place: each for place, each in self._wide.items() if each is not None}
        parts = {place: self._flops[place] / max(1, self._flops.total()) for place in known}
        if self._product_dtype is not None and sum(parts.values()) > _LARGE:
            for place, each in known.items():
                if parts[place] > _LEAST_NAMED:
                    evidence = f"{parts[place]:.0%} of the FLOPs of all products are of this float32 one{each.evidence}"
                    self._add([replace(each, evidence=evidence, effect=parts[place])])

    def _parameters(self) -> list[Tensor]:
        """Returns the models' parameters and the other leaves."""
        known = [each for model in self._models.values() for each in model.parameters()]
        return [*{id(each): each for each in [*known, *self._leaves]}.values()]

    @spared
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._check_scaling()
        if not self._is_checked:
            self._attached.pause()
            self._kernels.pause()
        else:
            self._note_parameters(optimizer)

    @unseen
    def _note_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        named = [each for model in self._models.values() for each in named_tensors(model)]
        names = {id(each): name for name, each in named}
        low = {each.shape for each in self._parameters() if each.dtype in LOW_DTYPES}  # of masters
        groups = [
            (each.get("lr") != 0, of) for each in optimizer.param_groups for of in each["params"]
        ]
        stepped = [
            (names.get(id(each), f"parameter {count}"), each, moves)
            for count, (moves, each) in enumerate(groups)
        ]
        others = [each for each in stepped if id(each[1]) not in names and each[1].shape not in low]
        self._check_made([each[:2] for each in others])
        self._kernels.report_overwritten()
        self._kernels.end_step()  # of a step that has failed
        self._kernels.stepped = frozenset(
            memory(each) for _, each, _ in stepped if is_readable(each)
        )
        self._kernels.trained |= self._kernels.stepped
        with without_casts(), torch.no_grad():
            self._before = [
                (name, each)
                for name, each, moves in stepped  # a warm-up begins with a learning rate of 0
                if moves and each.dtype in LOW_DTYPES
            ]
            self._kernels.low = {memory(of): of for _, of in self._before}
            self._kernels.before = {memory(of): of.detach().clone() for _, of in self._before}

    @spared
    @unseen
    def _check_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """HP107: low-precision parameters that a step can't move."""
        known, self._before = self._before, []
        with without_casts(), torch.no_grad():
            for name, tensor in () if self._kernels.has_drawn else known:  # to round
                if tensor.grad is None and memory(tensor) not in self._kernels.stepped_on:
                    continue
                if (undone := self._kernels.undone(tensor)) is not None:  # a compensated sum
                    self._intended |= {("HP107", undone)} if undone else set()
                    continue
                before = self._kernels.before.get(memory(tensor))
                if (
                    before is None
                ):  # it has other memory now, or another thread's step ran meanwhile
                    continue
                moves = (before if tensor.grad is None else tensor.grad) != 0
                count = moves.sum().item()
                share = ((tensor == before) & moves).sum().item() / count if count else 0.0
                if share > 0.5 and not _has_copy(tensor, optimizer.state.get(tensor, {})):
                    evidence = f"{share:.0%} of the {short_name(tensor.dtype)} values did not move"
                    remedy = "keep float32 parameters and convert instead, or round stochastically"
                    place = name, "", user_location()
                    self._add([Finding("HP107", *place, evidence, share, None, remedy)])

    @spared
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._check_parameters(optimizer)
        self._kernels.end_step()
        self._step += 1
        if self._is_checked:
            self._attached.resume()
            self._kernels.resume()
        self._trace, self._origins = Trace(self._intended), Origins()  # which keep tensors alive

    @spared
    @unseen
    def _check_scaling(self) -> None:
        """HP110: a backward through float16 without a loss scaler."""
        call, line = self._fp16, self._backward
        self._fp16, self._backward = None, ""
        if call is None or any(each.is_enabled() for each in list(SCALERS)):
            return
        known = [each.grad for each in self._parameters() if each.grad is not None]
        gradients = [*filter(is_readable, known)]
        with without_casts(), torch.no_grad():
            nonzero = sum((each != 0).sum().item() for each in gradients)
            share = sum(map(_subnormal_in_fp16, gradients)) / max(1, nonzero)
        are_lost = bool(line and gradients and not nonzero and self._kernels.has_underflown)
        self._kernels.has_underflown = False
        if share > 0.01 or are_lost:
            evidence = f"{max(share, are_lost):.0%} of the gradients are {'zero' if are_lost else 'subnormal'} in fp16, without a loss scaler"
            remedy = "scale the loss with torch.amp.GradScaler, or use bfloat16"
            place = call.op, call.module, line or call.location
            self._add([Finding("HP110", *place, evidence, share or 1.0, None, remedy)])

    @spared
    @unseen
    def _check_made(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """HP111: fp32 parameters and buffers whose contents are low."""
        for name, tensor in tensors:
            is_wide = is_readable(tensor) and tensor.dtype is torch.float32
            if is_wide and (found := contents(tensor)) in LOW_DTYPES:
                evidence = f"{short_name(found)} values in float32"
                remedy = "make it in float32, or load it from a float32 checkpoint"
                self._add([Finding("HP111", name, "", "", evidence, 1.0, None, remedy)])


def _has_copy(parameter: Tensor, state: Mapping[str, Any]) -> bool:
    """Whether an optimizer's state has the values of ``parameter`` in a wider type."""
    known = [each for each in tensors_in(state.values()) if each.itemsize > parameter.itemsize]
    return any(torch.equal(each.to(parameter.dtype), parameter) for each in known)


def _at_users_line(finding: Finding) -> Finding | None:
    """Returns a finding inside an installed package at the line of the program that calls it; None for useless ones.

    Dtypes that the package, and torch.autocast, choose are not the program's, unless hmpx's lists decide.
    """
    if (line := own_line(finding.location)) == finding.location:
        return finding
    is_theirs = finding.code == "HP106" or (
        finding.code in {"HP105", "HP108"} and is_any_autocast_enabled()
    )
    if is_theirs and not casts_any():
        return None
    evidence = f"{finding.evidence}; at {located(finding.location)}"
    return replace(finding, location=line, evidence=evidence)


def _subnormal_in_fp16(gradient: Tensor) -> float:
    """Returns the number of values that float16 holds as subnormal ones."""
    is_held = gradient.half().to(gradient.dtype) == gradient
    is_small = (gradient != 0) & (gradient.abs() < torch.finfo(torch.float16).tiny)
    return (is_held & is_small).sum().item()


def lint(*, every: int = 50, select: Iterable[str] = (), ignore: Iterable[str] = ()) -> Lint:
    """Finds calls of the block that lose precision or time, without changing a result.

    Works with and without a conversion, also over torch.autocast. Effects are measured in float64;
    a finding about values is reported only if its effect is over 1%, and over four times that of
    the remedy. ``# hmpx: ignore[HP103]`` on a line of the program
    leaves it out. Keeps the arguments of the last 64 calls alive.

    Args:
        every: Checks the first two optimizer steps, then one in ``every``. A checked step is much
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
