"""Names in torch's modules of torch.compile that hmpx relies on, as data.

These modules take seconds to import: ``compiler`` looks the names up where they are first needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

TRACER: Final = "torch.fx.experimental.proxy_tensor"
SELECT_ALGORITHM: Final = "torch._inductor.select_algorithm"
CODE_CACHE: Final = "torch._inductor.codecache"
INDUCTOR_CONFIG: Final = "torch._inductor.config"
AOT_GRAPHS: Final = "torch._functorch._aot_autograd.graph_compile"
INDUCTOR_CPP: Final = "torch._inductor.codegen.cpp"
INDUCTOR_LOWERINGS: Final = "torch._inductor.lowering"
INDUCTOR_GRAPHS: Final = "torch._inductor.graph"
INDUCTOR_SUBGRAPHS: Final = "torch._inductor.subgraph_lowering"
DYNAMO_FUNCTIONS: Final = "torch._dynamo.variables.torch"
DYNAMO_RULES: Final = "torch._dynamo.trace_rules"
DYNAMO_TRANSLATION: Final = "torch._dynamo.symbolic_convert"
DYNAMO_GRAPHS: Final = "torch._dynamo.output_graph"
DYNAMO_GUARDS: Final = "torch._dynamo.guards"
DYNAMO_SOURCES: Final = "torch._dynamo.source"
DYNAMO_VARIABLES: Final = "torch._dynamo.variables"
#: Modules that store ``Module.__call__`` on import, as `unpatched_nn_module_call`.
DYNAMO_MODULE_CALLS: Final = ("torch._dynamo.utils", "torch._dynamo.variables.nn_module")


@dataclass(frozen=True, slots=True)
class Later:
    """Names in a module that is imported later; see `Part`."""

    feature: str
    names: tuple[str, ...]
    without: str


LATER: Final[dict[str, Later]] = {
    TRACER: Later(
        "regions of torch.autocast in exported graphs",
        ("PreDispatchTorchFunctionMode.__torch_function__",),
        "exported graphs cast inside of regions that are off",
    ),
    SELECT_ALGORITHM: Later(
        "kernels in compiled graphs",
        ("ExternKernelChoice.__init__", "extern_kernels"),
        "compiled code takes longer, and may cast where casts were off",
    ),
    CODE_CACHE: Later(
        "caches of compiled graphs on the disk",
        ("FxGraphHashDetails.__init__",),
        "they are not used",
    ),
    INDUCTOR_CONFIG: Later(
        "casts in compiled graphs",
        ("_config.emulate_precision_casts", "force_disable_caches"),
        "rounding takes longer there",
    ),
    INDUCTOR_LOWERINGS: Later(
        "torch's functions in compiled graphs",
        ("lowerings",),
        "flex_attention may not compile once a conversion during which inductor was imported is reverted",
    ),
    INDUCTOR_GRAPHS: Later(
        "torch's functions that inductor puts into graphs",
        ("GraphLowering.call_function",),
        "inductor may not find how to compute them",
    ),
    INDUCTOR_SUBGRAPHS: Later(
        "torch's functions that inductor puts into attention",
        ("PointwiseSubgraphLowering.call_function",),
        "flex_attention may not compile on a CPU",
    ),
    AOT_GRAPHS: Later(
        "memory of compiled graphs",
        ("_partition_joint_graph_into_fw_bw",),
        "they keep casts of weights for their backward",
    ),
    DYNAMO_FUNCTIONS: Later(
        "questions about torch.autocast while tracing",
        ("constant_fold_functions.update",),
        "graphs break where a model asks whether torch.autocast is on",
    ),
    DYNAMO_RULES: Later(
        "methods of tensors while tracing",
        ("get_tensor_method.__wrapped__",),
        "graphs break where hmpx casts for functions of other libraries",
    ),
    DYNAMO_TRANSLATION: Later(
        "sections by module in compiled graphs",
        ("InstructionTranslatorBase.step",),
        "torch.compile is refused with them",
    ),
    DYNAMO_GRAPHS: Later(
        "graphs that stay over conversions",
        ("OutputGraph.init_ambient_guards",),
        "each conversion compiles again",
    ),
    DYNAMO_GUARDS: Later(
        "guards of compiled graphs",
        ("install_guard", "GuardBuilder.EQUALS_MATCH"),
        "torch.compile is refused with sections by module",
    ),
    DYNAMO_SOURCES: Later(
        "sources of guards",
        ("AttrSource", "GlobalSource", "GlobalStateSource"),
        "torch.compile is refused with sections by module",
    ),
    DYNAMO_VARIABLES: Later(
        "modules in compiled graphs",
        ("LazyVariableTracker.realize", "UnspecializedNNModuleVariable"),
        "torch.compile is refused with sections by module",
    ),
}
