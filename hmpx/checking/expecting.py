"""`expect`: a block whose calls and tensors must have the precision that a contract says."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook

from .. import arguments, session
from ..comparing import Origins, is_readable, may_read
from ..compute import nodes_made, tensors_saved_by
from ..errors import ContractError, OptionError, shown, to_the_end
from ..inputs import Steps
from ..observers import LEFT_OUT, Attached, OpCall, Values, spared, user_location
from ..ops import facts
from ..places import located
from ..policy import Call
from ..renames import renamed_fields
from ..tensors import LOW_DTYPES, floating_in, long_name, node_of, tensors_in
from ..torch_internals import next_number, uncompiled, unseen
from ..torch_state import named_tensors, place, spot, unchanged
from .contract_lines import KEYS, ContractLine, read, real, written
from .contract_writing import as_yaml, contract_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

Mode = Literal["raise", "collect"]

_CONVERTING: Final = facts("converting").keys()


@renamed_fields(subject="op")
@dataclass(frozen=True)
class Breach:
    """A place where a program does not keep a contract.

    Attributes:
        line: Where the contract says it: ``"contract.yaml:3"``.
        key: ``"compute"``, ``"output"``, ``"contents"``, ``"saved"`` or ``"gradient"``; ``""`` for a line that
            no call or tensor met.
        op: The op; for whole modules and tensors, their name.
        module: Qualified name of the module; ``""`` outside of modules.
        location: ``"train.py:40"``; ``""`` for tensors by name.
        expected: ``"float32"``.
        found: ``"bfloat16"``.
        lost: Where contents first lost precision: ``"in linear of up (train.py:31)"``.

    Example:
        >>> contract = {"expect": [{"op": "softmax", "output": "float32"}]}
        >>> with hmpx.expect(contract, mode="collect") as seen:
        ...     y = torch.ones(2, 2, dtype=torch.bfloat16).softmax(-1)
        >>> seen.breaches[0].key, seen.breaches[0].found
        ('output', 'bfloat16')
    """

    line: str
    key: str
    op: str
    module: str = ""
    location: str = ""
    expected: str = ""
    found: str = ""
    lost: str = ""

    def __str__(self) -> str:
        if not self.key:
            return f"{self.line}: {self.op}"
        place = f" in {self.module}" if self.module else ""
        at = f" ({located(self.location)})" if self.location else ""
        lost = f"; precision was lost {self.lost}" if self.lost else ""
        return (
            f"{self.line}: {self.op}{place}{at} {KEYS[self.key]} {self.found}, expected "
            f"{self.expected}{lost}"
        )


class _Subject(NamedTuple):
    """What a breach is about, and where."""

    op: str
    module: str = ""
    location: str = ""

    @classmethod
    def of(cls, call: OpCall) -> _Subject:
        return cls(call.op, call.module, call.location)


class expect:  # noqa: N801  # a context manager, like torch.no_grad
    """Checks each call and tensor of the block against a contract.

    Works with and without a conversion, also over torch.autocast, FSDP2 and ``model.bfloat16()``;
    changes no result. It holds for all threads, ``saved`` only for the one that entered the block.
    Compiled functions run uncompiled.

    Args:
        contract: A file, the text of one, such as `expect.of` returns, or a mapping with its keys.
        mode: ``"raise"`` raises at the first breach, ``"collect"`` only appends to ``breaches``.

    Attributes:
        breaches: The breaches so far; one for each line, op, module and location.

    Raises:
        PolicyFileError: The contract can't be read.
        ContractError: The program breaks a line, or none of its calls and tensors meets one.

    Example:
        >>> contract = {"expect": [{"op": "softmax", "compute": "float32"}]}
        >>> with hmpx.expect(contract, mode="collect") as seen:
        ...     y = torch.ones(2, 2, dtype=torch.bfloat16).softmax(-1)
        >>> [(breach.op, breach.found) for breach in seen.breaches]
        [('softmax', 'bfloat16')]
    """

    def __init__(
        self, contract: str | os.PathLike[str] | Mapping[str, Any], *, mode: Mode = "raise"
    ) -> None:
        """Reads the contract."""
        if not isinstance(contract, (str, os.PathLike, Mapping)):
            raise OptionError(f"a contract is a path or a mapping, not {shown(contract)}")
        self.breaches: list[Breach] = []
        self._lines = read(contract)
        self._mode = arguments.choice("mode", mode, ("raise", "collect"))
        self._origins = Origins()
        self._met: set[ContractLine] = set()
        self._known: set[tuple[str, ...]] = set()
        self._names: dict[int, str] = {}  # id of a parameter -> its name
        self._models: dict[int, nn.Module] = {}
        self._block: contextlib.ExitStack | None = None
        self._left_out = LEFT_OUT.copy()
        self._reads_saved, self._first_node, self._thread = False, 0, 0

    # --- the block -------------------------------------------------------------------------------

    @session.restoring
    def __enter__(self) -> expect:
        if self._block is not None:
            raise OptionError("this contract was entered before; make a new one with hmpx.expect()")
        wanted = {key for line in self._lines if line.is_about_calls for key in line.expected}
        with contextlib.ExitStack() as block:
            block.enter_context(session.observable())
            block.enter_context(
                Attached(self._check_call, every_op=True, values=True, kernels="compute" in wanted)
            )
            block.enter_context(register_module_forward_pre_hook(self._note_model))
            block.enter_context(register_module_forward_hook(self._check_module))
            block.enter_context(register_optimizer_step_post_hook(self._check_optimizer))
            self._reads_saved = "saved" in wanted
            self._first_node, self._thread = next_number() or 0, get_ident()
            block.enter_context(uncompiled())
            self._block = block.pop_all()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._block is not None:
            to_the_end(self._block.close)
        if error is None:
            for model in self._models.values():
                self._check_tensors(model)
            for fault in LEFT_OUT - self._left_out:
                self._report(Breach("a call was not checked", "", fault))
            for line in self._lines:
                if line not in self._met:
                    about = "call" if line.is_about_calls else "tensor"
                    self._report(Breach(line.where, "", f"no {about} met this line"))

    def __repr__(self) -> str:
        return f"<hmpx.expect: {len(self._lines)} lines, {len(self.breaches)} breaches>"

    @staticmethod
    @session.restoring
    def of(model: Callable[..., object], inputs: Any) -> str:
        """Returns the contract that a call of ``model`` keeps today: the text of a file, to be kept in CI.

        Args:
            model: A module or any function. Contents are those of a module's parameters and buffers.
            inputs: Its arguments ([inputs](#inputs)). Gradients are not recorded. The model is then restored.

        Example:
            >>> print(hmpx.expect.of(torch.nn.Linear(2, 2), torch.ones(1, 2)).splitlines()[1])
            - op: linear
        """
        steps = Steps("expect.of", model)
        module = model if isinstance(model, nn.Module) else None
        with unchanged(model, inputs), torch.no_grad():
            return as_yaml(contract_of(lambda: steps.forward(inputs), module))

    # --- calls -----------------------------------------------------------------------------------

    @spared
    def _check_call(self, call: OpCall, /, *values: Unpack[Values]) -> None:
        if not may_read():
            return
        inputs, _, _, result = values
        self._check_saved(result)
        seen = _call(call.op, inputs)
        if any("contents" in line.expected for line in self._lines):
            self._origins.note(call, inputs, result)
        for line in self._lines:
            if not (line.is_about_calls and line.is_about_call(seen)):
                continue
            is_other = line.phase and (line.phase == "backward") != (call.phase == "backward")
            for key in () if is_other else line.expected:
                self._check_key(line, key, call, inputs, result)
            if "gradient" in line.expected and not line.is_about_modules:
                self._check_gradients(line, _Subject.of(call), result)

    def _check_key(
        self, line: ContractLine, key: str, call: OpCall, inputs: list[Tensor], result: Any
    ) -> None:
        dtypes: Iterable[Any] = ()
        if key == "contents" and call.op not in _CONVERTING:
            for each in inputs:
                self._check_contents(line, _Subject.of(call), each)
        elif key == "compute" and call.op not in _CONVERTING:
            dtypes = call.computed
        elif key == "output" and not line.is_about_modules:
            dtypes = [each.dtype for each in floating_in([result])]
        for dtype in dtypes:
            self._compare(line, key, _Subject.of(call), dtype)

    def _check_contents(self, line: ContractLine, place: _Subject, tensor: Tensor) -> None:
        self._met.add(line)
        found = self._origins.contents(tensor)
        if found is not None:
            lost = self._origins.origin(tensor) if found in LOW_DTYPES else ""
            self._compare(line, "contents", place, found, lost)

    def _check_gradients(self, line: ContractLine, place: _Subject, result: Any) -> None:
        check = functools.partial(self._check_arrived, line, place)
        for node in {node_of(each) for each in tensors_in([result])} - {None}:
            node.register_prehook(check)

    @spared
    @unseen
    def _check_arrived(
        self, line: ContractLine, place: _Subject, gradients: tuple[Tensor | None, ...]
    ) -> None:
        for each in gradients:
            if each is not None and each.is_floating_point():
                self._compare(line, "gradient", place, each.dtype)

    def _check_saved(self, results: Any) -> None:
        """Checks what the nodes behind results save; not by torch's hooks, which change the program."""
        if not (self._reads_saved and get_ident() == self._thread and may_read()):
            return
        for node in nodes_made(tensors_in([results]), self._first_node, self):
            node.metadata[self] = None
            for tensor in floating_in(tensors_saved_by(node) or []):
                call = _call("", [tensor])
                place = _Subject("a call", call.module, user_location())
                for line in self._lines:
                    if "saved" in line.expected and not line.ops and line.section.holds_for(call):
                        self._compare(line, "saved", place, tensor.dtype)

    # --- modules and their tensors -----------------------------------------------------------------

    @spared
    @unseen
    def _note_model(self, module: nn.Module, args: Any) -> None:
        if module is spot()[0] and id(module) not in self._models and may_read():
            self._models[id(module)] = module
            self._check_tensors(module)

    @spared
    @unseen
    def _check_module(self, module: nn.Module, args: Any, result: Any) -> None:
        self._check_saved(result)
        call, name = _call("", floating_in([args])), type(module).__name__
        for line in self._lines:
            if not (line.is_about_modules and line.is_module(call)):
                continue
            place = _Subject(name, call.module, user_location())
            if "gradient" in line.expected:
                self._check_gradients(line, place, result)
            if "output" in line.expected:
                for each in floating_in([result]):
                    self._compare(line, "output", place, each.dtype)

    def _check_tensors(self, model: nn.Module) -> None:
        named = dict(named_tensors(model))
        self._names.update({id(each): name for name, each in named.items()})
        for name, tensor in named.items():
            for line in self._lines:
                if line.is_about(name) and not line.optimizer and is_readable(tensor):
                    self._check_tensor(line, name, tensor)

    @spared
    @unseen
    def _check_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for parameter, state in optimizer.state.items():
            name = self._names.get(id(parameter), "")
            for line in self._lines:
                if not line.optimizer or (line.tensors and not line.is_about(name)):
                    continue
                for key, value in state.items():
                    is_tensor = isinstance(value, Tensor) and value.is_floating_point()
                    if is_tensor and line.is_about(key, of_optimizer=True):
                        self._check_tensor(line, f"{key} of {name or 'a parameter'}", value)

    def _check_tensor(self, line: ContractLine, name: str, tensor: Tensor) -> None:
        self._met.add(line)
        if "contents" in line.expected:
            self._check_contents(line, _Subject(name), tensor)
        if "gradient" in line.expected and tensor.grad is not None:
            self._compare(line, "gradient", _Subject(name), tensor.grad.dtype)

    # --- breaches ----------------------------------------------------------------------------------

    def _compare(
        self, line: ContractLine, key: str, place: _Subject, found: Any, lost: str = ""
    ) -> None:
        self._met.add(line)
        expected, found = line.expected[key], real(found)
        if found not in expected:
            texts = written(expected), long_name(found), lost
            self._report(Breach(line.where, key, *place, *texts))

    def _report(self, breach: Breach) -> None:
        key = breach.line, breach.key, breach.op, breach.module, breach.location, breach.found
        if key in self._known:
            return
        self._known.add(key)
        self.breaches.append(breach)
        if self._mode == "raise":
            raise ContractError(breach)


def _call(op: str, inputs: list[Tensor]) -> Call:
    """Returns a call in the running module, as conditions see it."""
    here = place()
    inputs = [each for each in inputs if not each.is_nested]  # these may have no shape
    values = {
        "shapes": tuple([each.shape for each in inputs]),
        "dtypes": tuple([each.dtype for each in inputs]),
        "devices": tuple([each.device for each in inputs]),
        "place": lambda: here,
    }
    return Call(op, values, set())
