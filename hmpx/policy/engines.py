"""`Policy.export`: a policy as the switches of other engines, and the parts that these can't say."""

from __future__ import annotations

import collections
import fnmatch
import functools
import json
import textwrap
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch

from .. import arguments, ops
from ..errors import brief
from ..number_formats import is_format
from ..tensors import long_name
from .decisions import CastPolicy, Decision
from .lists import read_set
from .op_lists import OpList
from .policy import Policy, section_heading
from .sections import Section

#: Reason -> ops and sections.
_Unsaid: TypeAlias = "collections.defaultdict[str, list[str]]"

_WIDEST: Final = "WIDEST: types by inputs"

#: The start of sections' headings.
_WHERE: Final = "where "

_MOST_NAMES: Final = 12

#: Ops that torch and Gaudi's bridge promote unless a list names them.
_PROMOTED: Final = frozenset({"addcdiv", "div", "mul"})

#: Class of torch.nn -> the ops that take its weights.
_LAYERS: Final[Mapping[str, tuple[str, ...]]] = {
    **{f"Conv{n}d": (f"conv{n}d",) for n in (1, 2, 3)},
    **{f"ConvTranspose{n}d": (f"conv_transpose{n}d",) for n in (1, 2, 3)},
    **{f"BatchNorm{n}d": ("batch_norm",) for n in (1, 2, 3)},
    **{f"InstanceNorm{n}d": ("instance_norm",) for n in (1, 2, 3)},
    **{f"{each}Norm": (f"{each.lower()}_norm",) for each in ("Group", "Layer", "RMS")},
    **{f"{each}Cell": (f"{each.lower()}_cell",) for each in ("GRU", "LSTM")},
    **{each: (each.lower(),) for each in ("Bilinear", "Embedding", "GRU", "LSTM", "Linear")},
    "EmbeddingBag": ("embedding_bag",),
    "PReLU": ("prelu",),
    "SyncBatchNorm": ("batch_norm",),
    "RNN": ("rnn_tanh", "rnn_relu"),
    "RNNCell": ("rnn_tanh_cell", "rnn_relu_cell"),
}


@dataclass(frozen=True)
class EngineSettings:
    """A policy for another engine: a file's content.

    Attributes:
        engine: ``"fsdp2"``.
        text: The content, with the unsaid parts as comments.
        unsaid: Reason -> the ops and sections that the engine can't be told.

    Example:
        >>> settings = hmpx.Policy.from_ops(low=["linear"], widest=["mul", "lerp"]).export("gaudi")
        >>> dict(settings.unsaid)
        {'WIDEST: types by inputs': ('lerp',)}
    """

    engine: str
    text: str
    unsaid: Mapping[str, tuple[str, ...]]

    __repr__ = brief

    def __str__(self) -> str:
        return self.text


def exported(policy: Policy, engine: str) -> EngineSettings:
    """Returns ``policy`` for ``engine``."""
    write = _WRITERS[arguments.choice("engine", engine, tuple(_WRITERS))]
    unsaid: _Unsaid = collections.defaultdict(list)
    text, mark = write(policy, unsaid)
    said = {reason: tuple(sorted({*each})) for reason, each in sorted(unsaid.items()) if each}
    lines = [f"hmpx: {policy!r}"[:96], *(["Not said here:"] if said else [])]
    for reason, each in said.items():
        names = ", ".join(name for name in each if not name.startswith(_WHERE))
        entries = [f"{reason}: {names}".rstrip(), *(e for e in each if e.startswith(_WHERE))]
        for entry in entries:
            lines += textwrap.wrap(entry, 96, subsequent_indent="  ")
    comments = "".join(f"{mark} {line}\n" for line in lines)
    return EngineSettings(engine, comments + text, types.MappingProxyType(said))


# --- decisions ---------------------------------------------------------------------------------


@functools.cache
def _aten_names(op: str) -> tuple[str, ...]:
    """Returns the names of ATen's functions that compute an op."""
    found = [name for name, each in ops.names().items() if each == op and name[-1:] != "_"]
    return tuple(sorted(name for name in found if hasattr(torch.ops.aten, name)))


def _types(
    decisions: Mapping[str, Decision],
    dtypes: set[torch.dtype],
    unsaid: _Unsaid,
    where: str = "",
) -> dict[str, list[str]]:
    """Returns type -> ATen's functions that run in it; collects everything else, by section."""
    found: dict[str, list[str]] = {}
    rest: _Unsaid = collections.defaultdict(list)
    for op, decision in sorted(decisions.items()):
        covering, dtype = ops.covering(op), decision.dtype
        if covering is not None and decisions.get(covering) == decision:
            continue
        reason = ""
        names = _aten_names(op)
        if decision.cast_policy not in {CastPolicy.LOW, CastPolicy.FP32}:
            reason = f"{decision.cast_policy.name}: types by inputs"
        elif not names:
            reason = "no function of ATen"
        elif is_format(dtype):
            reason = "number formats"
        elif dtype not in dtypes:
            reason = f"another type than {' and '.join(sorted(map(long_name, dtypes)))}"
        else:
            found.setdefault(long_name(dtype), []).extend(names)
            if options := [word for word, _ in decision.options()]:
                reason = ", ".join(options)
        if reason:
            rest[reason].append(op)
    for reason, names_of in rest.items():
        unsaid[reason] += [f"{where}{_listed(names_of)}"] if where else names_of
    return found


def _listed(names: Collection[str]) -> str:
    """Returns names, or their number if there are many, as in sections of excluded modules."""
    return ", ".join(sorted(names)) if len(names) <= _MOST_NAMES else f"{len(names)} ops"


def _leave(section: Section, unsaid: _Unsaid) -> None:
    said = f"{section_heading(section)}: {_listed(section.decisions)}"
    unsaid["sections with these conditions"].append(said)


# --- engines -----------------------------------------------------------------------------------

_RULES: Final = '''
import itertools
import re

RULES = [{rules}
]


def decided(module, op):
    """Returns the type of an ATen function in a module, by their names; None if the policy has none."""
    around = ["", *itertools.accumulate(module.split("."), "{{}}.{{}}".format)]
    for patterns, types in RULES:
        if patterns is None or any(re.fullmatch(p, name) for p in patterns for name in around):
            found = [dtype for dtype, names in types.items() if op in names.split()]
            if found:
                return found[0]
    return None
'''

_FSDP2: Final = '''
import collections

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

LAYERS = {layers}


def shard(model, **options):
    """Shards the layers with a decided type, each with it, and the rest of the model without casts.

    Layers that share parameters stay in float32.
    """
    named = dict(model.named_modules())
    owners = collections.Counter(
        id(each) for module in named.values() for each in module.parameters(recurse=False)
    )
    fused = [name for name, each in named.items() if isinstance(each, nn.MultiheadAttention)]
    for name, module in reversed(named.items()):
        ops = [op for each in type(module).__mro__ for op in LAYERS.get(each.__name__, ())]
        found = next(filter(None, (decided(name, op) for op in ops)), None)
        is_fused = any(name.startswith(f"{{each}}.") for each in fused)
        own = [owners[id(each)] for each in module.parameters(recurse=False)]
        if max(own, default=1) > 1:
            module.register_forward_pre_hook(
                lambda _, args: tuple(
                    each.float() if torch.is_floating_point(each) else each for each in args
                )
            )
        elif found and not is_fused and own:
            dtype = getattr(torch, found)
            policy = MixedPrecisionPolicy(
                param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=True
            )
            fully_shard(module, mp_policy=policy, **options)
            if module is model:
                return model
    return fully_shard(model, mp_policy=MixedPrecisionPolicy(), **options)
'''

_OPENVINO: Final = '''
import openvino


def keep_fp32(model):
    """Marks the nodes of a model that stay in float32, and returns their names.

    For models converted from torch's modules or traces; those of torch.export don't name modules.
    """
    marked = []
    for node in model.get_ops():
        name = node.get_friendly_name()
        found = re.fullmatch(r"(?:__module\\.([^/]*)/)?(?:[^/]*/)?aten(?:::|\\.)(\\w+).*", name)
        if found and decided(found[1] or "", found[2].rstrip("_")) == "float32":
            mark = getattr(openvino.experimental, "disable_fp16_compression", None)
            mark(node) if mark else node.get_rt_info().__setitem__("precise_0", "")
            marked.append(name)
    return marked
'''

_COREML: Final = '''
from coremltools.converters.mil.mil.scope import ScopeSource


def op_selector(model):
    """Returns the op_selector of ct.transform.FP16ComputePrecision for a model: True for float16.

    For traces; models of torch.export don't name modules. Scopes lack modules that are not called,
    such as lists: of several modules that fit, one in float32 decides.
    """
    paths = [name.split(".") for name, _ in model.named_modules()]

    def select(op):
        ops = op.scopes.get(ScopeSource.TORCHSCRIPT_MODULE_TYPE, [re.sub(r"_\\d+$", "", op.name)])
        scope = op.scopes.get(ScopeSource.TORCHSCRIPT_MODULE_NAME, [])[:-1]
        fitting = [scope]
        for path in paths if scope else ():
            rest = iter(path)
            if path[-1] == scope[-1] and all(part in rest for part in scope):
                fitting.append(path)
        names = [*map(".".join, fitting)]
        return all(decided(name, ops[-1].rstrip("_")) != "float32" for name in names)

    return select
'''


def _python(policy: Policy, unsaid: _Unsaid, template: str) -> str:
    """Returns Python with the sections by modules, and the default decisions, as rules."""
    dtypes = {torch.float32, torch.bfloat16, torch.float16}
    parts: list[tuple[tuple[str, ...] | None, dict[str, list[str]]]] = []
    for section in policy.sections:
        given = dict(section.conditions)
        if given.keys() - {"module", "module_regex"}:
            _leave(section, unsaid)
            continue
        patterns = map(fnmatch.translate, given.get("module", ()))
        where = f"{section_heading(section)}: "
        named = _types(section.decisions, dtypes, unsaid, where)
        parts.append(((*patterns, *given.get("module_regex", ())), named))
    rules = ""
    for each, named in [*parts, (None, _types(policy.decisions, dtypes, unsaid))]:
        kinds = "".join(
            f'\n        "{dtype}": """\n{textwrap.fill(" ".join(names), 96)}\n        """,'
            for dtype, names in named.items()
        )
        rules += f"\n    ({each!r}, {{{kinds}\n    }}),"
    return _RULES.format(rules=rules) + template


def _fsdp2(policy: Policy, unsaid: _Unsaid) -> tuple[str, str]:
    lines = "".join(f"\n    {layer!r}: {called!r}," for layer, called in _LAYERS.items())
    text = _python(policy, unsaid, _FSDP2.format(layers=f"{{{lines}\n}}"))
    of_layers = {op for called in _LAYERS.values() for op in called}
    every = [policy.decisions, *(section.decisions for section in policy.sections)]
    typed = {op for decisions in every for op in _typed(decisions)}
    unsaid["ops outside of torch.nn's layers"] = [*typed - of_layers]
    unsaid[
        "calls without a layer of their own: of parameters, tied weights, nn.MultiheadAttention"
    ] = [*typed & of_layers]
    return text, "#"


def _typed(decisions: Mapping[str, Decision]) -> set[str]:
    """Returns the ops of ATen that run in LOW or FP32."""
    typed = {CastPolicy.LOW, CastPolicy.FP32}
    return {op for op, each in decisions.items() if each.cast_policy in typed and _aten_names(op)}


def _of_float16(template: str, policy: Policy, unsaid: _Unsaid) -> tuple[str, str]:
    low = policy.low_precision_type
    if low is not torch.float16:
        unsaid["the low type: the switch is about float16"] = [long_name(low)]
    return _python(policy, unsaid, template), "#"


def _of_autocast(
    policy: Policy, lists: str, unsaid: _Unsaid
) -> tuple[dict[str, list[str]], Mapping[str, OpList]]:
    """Returns type -> ATen's functions, and torch.autocast's lists, whose promotions are fixed."""
    for section in policy.sections:
        _leave(section, unsaid)
    low = policy.low_precision_type
    dtypes = {torch.float32, *([low] if isinstance(low, torch.dtype) else [])}
    named = _types(policy.decisions, dtypes, unsaid)
    autocast = read_set(lists, None if is_format(low) else low)
    promoted, widest = {*autocast["widest"].ops, *_PROMOTED}, unsaid.pop(_WIDEST, [])
    if rest := [op for op in widest if op not in promoted]:
        unsaid[_WIDEST] = rest
    return named, autocast


def _gaudi(policy: Policy, unsaid: _Unsaid) -> tuple[str, str]:
    named, _ = _of_autocast(policy, "autocast-hpu", unsaid)
    parts = []
    kinds = ("LOWER_PRECISION", policy.low_precision_type), ("FP32", torch.float32)
    for variable, dtype in kinds:
        names = "".join(f"{name}\n" for name in sorted(named.get(long_name(dtype), [])))
        file = f"{variable.lower()}_ops.txt"
        parts.append(f"cat > {file} <<'END'\n{names}END\n")
        parts.append(f'export PT_HPU_AUTOCAST_{variable}_OPS_LIST="$PWD/{file}"\n')
    return "".join(parts), "#"


def _deepspeed(policy: Policy, unsaid: _Unsaid) -> tuple[str, str]:
    named, autocast = _of_autocast(policy, "autocast-cuda", unsaid)
    low = long_name(policy.low_precision_type)
    unsaid["torch.autocast on CUDA decides otherwise"] = [
        op
        for op in {*_typed(policy.decisions), *autocast["low"].ops, *autocast["fp32"].ops}
        if any(
            (ops.covering_among(op, autocast[kind].ops) is None) is (policy[op].cast_policy is each)
            for kind, each in (("low", CastPolicy.LOW), ("fp32", CastPolicy.FP32))
        )
    ]
    block = {
        "enabled": bool(named.get(low)),
        "dtype": low,
        "lower_precision_safe_modules": [
            f"torch.nn.{layer}"
            for layer, called in _LAYERS.items()
            if {*called} & {*named.get(low, ())}
        ],
    }
    return json.dumps({"torch_autocast": block}, indent=2) + "\n", "//"


_WRITERS: Final[Mapping[str, Callable[[Policy, _Unsaid], tuple[str, str]]]] = {
    "openvino": functools.partial(_of_float16, _OPENVINO),
    "coreml": functools.partial(_of_float16, _COREML),
    "fsdp2": _fsdp2,
    "deepspeed": _deepspeed,
    "gaudi": _gaudi,
}
