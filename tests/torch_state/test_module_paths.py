"""Where in a model an op is called: as rules, sections and the log see it, however it gets called."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import hmpx

FP32, BF16 = torch.float32, torch.bfloat16
MODULE_CALL = nn.Module.__call__

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    # torch.compile asks tensors that are no leaves for it, by itself.
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)


class Block(nn.Module):
    """Linear and product: the spellings of functions, methods and operators."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, value: Tensor) -> Tensor:
        hidden = self.last(F.relu(self.first(value)))
        return hidden + (value @ value.mT).softmax(-1)


class Net(nn.Module):
    """Blocks in a list, one linear layer under two names, a Sequential in a dict.

    Args:
        use_reentrant: As in `checkpoint`, for the blocks; None for no checkpoint.
    """

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.heads = nn.ModuleDict({"a": nn.Sequential(nn.Linear(4, 4), nn.Tanh())})
        self.shared = self.layers[0].first
        self.use_reentrant = use_reentrant

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            if self.use_reentrant is None:
                value = layer(value)
            else:
                value = checkpoint(layer, value, use_reentrant=self.use_reentrant)
        hidden: Tensor = self.heads["a"](self.shared(value))
        return hidden


LINEARS = [
    "layers.0.first", "layers.0.last", "layers.1.first", "layers.1.last",
    "layers.2.first", "layers.2.last", "layers.0.first", "heads.a.0",
]  # fmt: skip


def x(*shape: int) -> Tensor:
    torch.manual_seed(1)
    return torch.rand(shape or (4, 4))


class Places:
    """Lists where the calls of linear are, in their order."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    def __call__(self, call: hmpx.OpCall) -> None:
        if call.op == "linear":
            self.paths.append(call.module)

    def of(self, function: Callable[..., Any], *args: Any) -> list[str]:
        """Returns the paths of the calls that ``function`` makes."""
        self.paths.clear()
        function(*args)
        return list(self.paths)


def as_rules_see(function: Callable[..., Any], *args: Any) -> list[tuple[Any, ...]]:
    """Returns path, classes and mode of the calls of linear that ``function`` makes, one for each path."""
    found: list[tuple[Any, ...]] = []

    def note(call: hmpx.Call) -> None:
        found.append((call.module, call.module_classes, call.training))

    hmpx.register_rule("linear", note)
    try:
        function(*args)
    finally:
        hmpx.unregister_rule("linear", note)
    return found


#: Depends on modules, and meets nothing.
PLACED = {"sections": [{"module_class": "Nothing", "low": ["linear"]}]}


@pytest.fixture
def linears() -> Iterator[Places]:
    """Lists where linear is called, under a policy that makes module tracking start at once."""
    found = Places()
    with hmpx.convert(policy=PLACED), hmpx.attach(found):
        yield found


@pytest.fixture
def unregistered() -> Iterator[None]:
    """Takes back the rules of a test."""
    yield
    for rule in hmpx.casting.all_rules():
        hmpx.unregister_rule(rule.op, rule.function)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """After each test nothing notes modules, and none runs."""
    yield
    hmpx.revert()
    assert nn.Module.__call__ is MODULE_CALL
    assert torch.fx._symbolic_trace._orig_module_call is MODULE_CALL
    assert "hmpx" not in nn.modules.module._global_module_registration_hooks


# --- names -------------------------------------------------------------------------------------


def test_the_names_are_those_of_named_modules(linears: Places) -> None:
    """Nested, in a list, in a dict; the first name where a module has two."""
    net = Net()
    assert linears.of(net, x()) == LINEARS
    net.layers[1].eval()
    seen = {path: rest for path, *rest in as_rules_see(net, x())}
    assert seen["layers.0.last"] == [("Net", "Block", "Linear"), True]
    assert seen["layers.1.last"] == [("Net", "Block", "Linear"), False]


def test_the_outermost_module_and_no_module_have_no_name(linears: Places) -> None:
    """A model that is one layer; a call outside of any."""
    assert linears.of(nn.Linear(4, 4), x()) == [""]
    assert as_rules_see(nn.Linear(4, 4), x()) == [("", ("Linear",), True)]
    assert linears.of(F.linear, x(), x()) == [""]
    assert as_rules_see(F.linear, x(), x()) == [("", (), None)]


class Unregistered(nn.Module):
    """Holds a block where no module looks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [Block()]

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.hidden[0](value)
        return F.linear(result, result)


def test_a_module_that_is_not_registered_goes_by_its_class(linears: Places) -> None:
    """Until it is."""
    net = Unregistered()
    for _ in range(2):
        assert linears.of(net, x()) == ["Linear", "Linear", ""]
    net.block = net.hidden[0]
    assert linears.of(net, x()) == ["block.first", "block.last", ""]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda layers: layers.append(Block()), [0, 1, 2, 3]),
        (lambda layers: layers.insert(1, Block()), [0, 1, 2, 3]),
        (lambda layers: layers.insert(1, layers.pop(2)), [0, 1, 2]),
        (lambda layers: layers.pop(0), [0, 1]),
        (lambda layers: layers.__delitem__(slice(0, 2)), [0]),
        (lambda layers: layers.__setitem__(1, Block()), [0, 1, 2]),
        (lambda layers: layers._modules.update({"1": Block()}), [0, 1, 2]),
        (lambda layers: layers._modules.update({"0": layers[2], "2": layers[0]}), [0, 1, 2]),
    ],
)
def test_modules_added_moved_and_replaced_between_forwards(
    linears: Places, change: Callable[[nn.ModuleList], object], expected: list[int]
) -> None:
    """Also past what torch tells of: a ModuleList renumbers its items in silence."""
    net = Net()
    net.shared = nn.Linear(4, 4)
    linears.of(net, x())
    change(net.layers)
    names = [f"layers.{i}.{name}" for i in expected for name in ("first", "last")]
    assert linears.of(net, x()) == [*names, "shared", "heads.a.0"]


def test_a_replacement_is_never_taken_for_what_it_replaces(linears: Places) -> None:
    """A new module may get the id of one that is gone."""
    net = Net()
    for _ in range(50):
        net.layers[1] = nn.Identity()
        linears.of(net, x())
        net.layers[1] = Block()
        assert linears.of(net, x()) == LINEARS
        del net.layers[1].last  # its id is free again
        net.layers[1].first, net.layers[1].last = nn.Linear(4, 4), nn.Linear(4, 4)
        assert linears.of(net, x()) == LINEARS


class Recursive(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value: Tensor, times: int = 2) -> Tensor:
        value = F.linear(self.linear(value), value)
        result: Tensor = self(value, times - 1) if times else value
        return F.linear(result, value)


def test_a_module_that_calls_itself(linears: Places) -> None:
    """It is the outermost one, at any depth."""
    paths = linears.of(Recursive(), x())
    assert paths == ["linear", "", "linear", "", "linear", "", "", "", ""]


class Failing(nn.Module):
    """Calls a module that raises, in a second one, and goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3))
        self.linear = nn.Linear(4, 4)

    def forward(self, value: Tensor, catches: bool = True) -> Tensor:
        try:
            self.inner(value)
        except RuntimeError:
            if not catches:
                raise
        return F.linear(self.linear(value), value)


def test_an_exception_leaves_no_module_running(linears: Places) -> None:
    """Caught inside of the model, and outside of it."""
    net = Failing()
    assert linears.of(net, x()) == ["linear", ""]
    with pytest.raises(RuntimeError, match="shapes"):
        net(x(), catches=False)
    assert linears.of(net, x()) == ["linear", ""]


def test_two_models_in_turn_and_one_within_the_other(linears: Places) -> None:
    """Each has its own names; inside of another it has that one's."""
    teacher, student = Net(), nn.Sequential(Block())
    student_linears = ["0.first", "0.last"]
    for _ in range(2):
        assert linears.of(teacher, x()) == LINEARS
        assert linears.of(student, x()) == student_linears
    both = nn.Sequential(teacher, student)
    assert linears.of(both, x()) == [
        *[f"0.{name}" for name in LINEARS],
        *[f"1.{name}" for name in student_linears],
    ]
    assert linears.of(student, x()) == student_linears


def functional_call(net: nn.Module, value: Tensor) -> object:
    return torch.func.functional_call(net, dict(net.named_parameters()), (value,))


def gradient(net: nn.Module, value: Tensor) -> object:
    def loss(parameters: dict[str, Tensor]) -> Tensor:
        result: Tensor = torch.func.functional_call(net, parameters, (value,))
        return result.sum()

    return torch.func.grad(loss)(dict(net.named_parameters()))


def vmapped(net: nn.Module, value: Tensor) -> object:
    return torch.func.vmap(net)(value[None])


def copied(net: nn.Module, value: Tensor) -> object:
    return copy.deepcopy(net)(value)


def replicated(net: nn.Module, value: Tensor) -> object:
    replica = net._replicate_for_data_parallel()
    for name, child in net.named_children():
        replica._modules[name] = child
    return replica(value)


def wrapped_for_data_parallel(net: nn.Module, value: Tensor) -> object:
    return nn.DataParallel(net)(value)


def checkpoint_wrapped(net: Any, value: Tensor) -> object:
    net.layers[1] = checkpoint_wrapper(net.layers[1])
    net.heads["a"][0] = checkpoint_wrapper(net.heads["a"][0])
    return checkpoint_wrapper(net)(value)


def held_by_an_inner_wrapper(net: Any, value: Tensor) -> object:
    net.layers[1] = nn.DataParallel(net.layers[1])
    return net(value)


def compiled_but_off(net: Any, value: Tensor) -> object:
    net.layers[1] = torch.compile(net.layers[1], disable=True)
    return torch.compile(net, disable=True)(value)


def globally_hooked(net: nn.Module, value: Tensor) -> object:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        return net(value)
    finally:
        handle.remove()


@pytest.mark.parametrize(
    "call",
    [
        functional_call, gradient, vmapped, copied, replicated, wrapped_for_data_parallel,
        checkpoint_wrapped, held_by_an_inner_wrapper, compiled_but_off, globally_hooked,
    ],
)  # fmt: skip
def test_the_names_are_the_same_however_the_model_is_called(
    linears: Places, call: Callable[[nn.Module, Tensor], object]
) -> None:
    """Under transforms, in copies, and in wrappers whose names nobody wrote."""
    assert linears.of(call, Net(), x()) == LINEARS


def test_classes_are_those_that_the_user_wrote(linears: Places) -> None:
    """A parametrized layer has a class that torch has made; a compiled one is in a wrapper."""
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), Block())
    assert type(net[0]).__name__ == "ParametrizedLinear"
    net[1] = torch.compile(net[1], disable=True)
    classes = [classes for _, classes, _ in as_rules_see(net, x())]
    assert classes == [("Sequential", "Linear"), *[("Sequential", "Block", "Linear")] * 2]


def test_hooks_run_in_the_module_that_they_are_on(linears: Places) -> None:
    """Before and after it; also where they call other modules."""
    net, probe = Net(), nn.Linear(4, 4)
    net.heads["a"].register_forward_pre_hook(lambda *_: _ignore(F.linear(x(), x())))
    net.heads["a"].register_forward_hook(lambda module, *_: _ignore(module[0](x())))
    net.register_forward_hook(lambda *_: _ignore(probe(x())))
    assert linears.of(net, x()) == [*LINEARS[:-1], "heads.a", "heads.a.0", "heads.a.0", "Linear"]


def _ignore(_: object) -> None:
    pass


def test_lazy_modules_and_scripted_ones(linears: Places) -> None:
    """A lazy layer has its own class before the first op; a scripted module runs its own code."""
    with pytest.warns(hmpx.HmpxWarning, match="script"):
        scripted = torch.jit.script(nn.Tanh())
    net = nn.Sequential(nn.LazyLinear(4), scripted, nn.Linear(4, 4))
    assert linears.of(net, x()) == ["0", "2"]
    assert linears.of(net, x()) == ["0", "2"]
    assert [classes[-1] for _, classes, _ in as_rules_see(net, x())] == ["Linear", "Linear"]


def test_a_section_keeps_one_layer_of_a_model_in_fp32() -> None:
    """All linear layers of that one, and no other."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    dtypes: dict[str, torch.dtype] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(
                lambda _, __, output, name=name: dtypes.update({name: output.dtype})
            )
    with hmpx.convert(policy={"sections": [{"module": "layers.1", "fp32": ["linear"]}]}):
        model(torch.ones(2, 3, 8))
    assert dtypes == {n: FP32 if n.startswith("layers.1.") else BF16 for n in dtypes}
    assert len(dtypes) == 6


# --- when it is put in place -------------------------------------------------------------------


def test_nothing_is_noted_while_nobody_asks(unregistered: None) -> None:
    """Module.__call__ is torch's own; also under a rule that does not speak of modules."""
    with hmpx.convert():
        hmpx.register_rule("linear", lambda call: _ignore(call.shapes))
        Net()(x())
        assert nn.Module.__call__ is MODULE_CALL
        assert "hmpx" not in nn.modules.module._global_module_registration_hooks


def by_path(call: hmpx.Call) -> hmpx.CastPolicy | None:
    return hmpx.DENY if call.module == "layers.1.last" else None


@pytest.mark.parametrize(
    ("rule", "policy", "verbose"),
    [
        (by_path, None, False),
        (None, {"sections": [{"module": "*", "low": ["mm"]}]}, False),
        (None, {"sections": [{"mode": "eval", "low": ["mm"]}]}, False),
        (None, None, "once"),
    ],
)
def test_noting_starts_with_what_asks_and_ends_with_revert(
    unregistered: None, rule: Any, policy: Any, verbose: Any
) -> None:
    """And takes nothing with it: `nothing_is_left` looks."""
    if rule is not None:
        hmpx.register_rule("linear", rule)
    with hmpx.convert(policy=policy, isVerbose=verbose):
        assert nn.Module.__call__ is not MODULE_CALL
        assert torch.fx._symbolic_trace._orig_module_call is not MODULE_CALL
        Net()(x())


# --- patterns that match nothing ----------------------------------------------------------------


def test_patterns_that_match_nothing_are_told_of_once() -> None:
    """With their place in the file, at the first model's call; not at one without parameters."""
    policy = {
        "sections": [
            {"module": ["layers.1", "encoder.*"], "fp32": ["linear"]},
            {"module_regex": r"layer\.\d", "fp32": ["linear"]},
        ]
    }
    with hmpx.convert(policy=policy):
        nn.Sequential(nn.ReLU())(x())
        with pytest.warns(
            hmpx.HmpxWarning, match="these patterns match no module of Net"
        ) as caught:
            Net()(x())
        message = str(caught[0].message)
        assert "'encoder.*'" in message
        assert "layer" in message
        assert "layers.1" not in message
        assert caught[0].filename == __file__
        Net()(x())


# --- checkpoints --------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_recomputes_where_it_computed(unregistered: None, use_reentrant: bool) -> None:
    """The same names, and so the same decisions."""
    found = Places()
    hmpx.register_rule(
        "linear",
        lambda call: hmpx.DENY if call.module.startswith("0.layers.1") else hmpx.ALLOW,
    )
    net = nn.Sequential(Net(use_reentrant))
    again = [f"0.layers.{i}.{name}" for i in (2, 1, 0) for name in ("first", "last")]
    with hmpx.convert(), hmpx.attach(found):
        for _ in range(2):
            found.paths.clear()
            net(x().requires_grad_()).sum().backward()
            assert found.paths == [*[f"0.{name}" for name in LINEARS], *again]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


# --- torch.compile ------------------------------------------------------------------------------


def as_a_whole(net: Any, options: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    return torch.compile(net, **options)


def in_place(net: Any, options: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    net.compile(**options)
    return net  # type: ignore[no-any-return]


def by_blocks(net: Any, options: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    for position, layer in enumerate(net.layers):
        net.layers[position] = torch.compile(layer, **options)
    return net  # type: ignore[no-any-return]


def by_blocks_in_place(net: Any, options: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    for layer in net.layers:
        layer.compile(**options)
    return net  # type: ignore[no-any-return]


def in_a_function(net: Any, options: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    return torch.compile(lambda value: net(value), **options)


COMPILED = [as_a_whole, in_place, by_blocks, by_blocks_in_place, in_a_function]


class Telling(Net):
    """Returns what each part of it returns."""

    def forward(self, value: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        found = []
        for layer in self.layers:
            value = layer(value)
            found.append(value)
        found += [self.shared(value), self.heads["a"][0](value), value.softmax(-1), value @ value]
        return tuple(found)


POLICY = {
    "sections": [
        {"module": ["layers.0.first", "layers.2"], "fp32": ["linear", "matmul"]},
        {"module_class": "Sequential", "fp32": ["linear"]},
        {"mode": "eval", "low": ["softmax"], "fp32": ["matmul"]},
    ]
}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("rules_ask", [False, True])
def test_compiled_models_do_what_eager_ones_do(
    unregistered: None,
    compiled: Callable[[Any, dict[str, Any]], Callable[[Tensor], Any]],
    rules_ask: bool,
) -> None:
    """One graph for blocks of one class, in models that are alike but for the mode: each as in eager."""
    policy: Any = POLICY
    if rules_ask:
        policy = None

        @hmpx.register_rule(["linear", "matmul", "softmax"])
        def rule(call: hmpx.Call) -> hmpx.CastPolicy:
            path, classes, training = call.module, call.module_classes, call.training
            is_low = path.startswith(("layers.0.first", "layers.2")) or "Sequential" in classes
            return hmpx.ALLOW if is_low is training else hmpx.DENY

    net = Telling()
    expected_of, actual_of = copy.deepcopy(net), compiled(net, OPTIONS)
    with hmpx.convert(policy=policy):
        for mode in (True, False, True):
            net.train(mode)
            expected_of.train(mode)
            expected, actual = expected_of(x()), actual_of(x())
            assert [a.dtype for a in actual] == [e.dtype for e in expected]
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)


OPTIONS: dict[str, Any] = {"backend": "aot_eager", "fullgraph": True}


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_function_follows_the_module_that_calls_it() -> None:
    """No module's call is in its graph; it is compiled for each of the places."""
    compiled = torch.compile(lambda a: (F.linear(a, a), a @ a), **OPTIONS)

    class Calling(nn.Module):
        def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
            result: tuple[Tensor, Tensor] = compiled(value)
            return result

    net = nn.Sequential(Calling(), nn.Identity())
    other = nn.Sequential(nn.Identity(), Calling())
    with hmpx.convert(policy={"sections": [{"module": "1", "fp32": ["linear", "matmul"]}]}):
        for _ in range(2):
            assert [t.dtype for t in net(x())] == [BF16, BF16]
            assert [t.dtype for t in other(x())] == [FP32, FP32]
            assert [t.dtype for t in compiled(x())] == [BF16, BF16]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("fullgraph", [True, False])
def test_models_of_torchs_own_classes_compile(fullgraph: bool) -> None:
    """In a function of torch.compile's that has a tuple for its first argument."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    compiled = torch.compile(net, backend="aot_eager", fullgraph=fullgraph)
    single = torch.compile(nn.Linear(4, 4), backend="aot_eager", fullgraph=fullgraph)
    with hmpx.convert(policy={"sections": [{"module": "1", "fp32": ["linear"]}]}):
        assert (compiled(x()).dtype, single(x()).dtype) == (FP32, BF16)


@pytest.mark.usefixtures("fresh_dynamo")
def test_many_models_compile() -> None:
    """The code that notes modules is no graph's beginning: torch compiles one code a few times only."""
    limit = torch._dynamo.config.patch(recompile_limit=2)
    with limit, hmpx.convert(policy={"sections": [{"mode": "eval", "low": ["mm"]}]}):
        for position in range(4):
            net = type(f"Net{position}", (nn.Sequential,), {"forward": _forward(position)})
            torch.compile(net(nn.Linear(4, 4)), **OPTIONS)(x())


class Products(nn.Module):
    """Two blocks that make one and the same graph, each compiled for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.compile(Product()), torch.compile(Product())

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(value), self.b(value)


class Product(nn.Module):
    """Holds nothing."""

    def forward(self, value: Tensor) -> Tensor:
        return value @ value


@pytest.mark.usefixtures("fresh_dynamo")
def test_caches_keep_places_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An artefact is served for a graph of the same ops in the same places only."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    policy = {
        "sections": [
            {"module": "b", "mode": "train", "fp32": ["matmul"]},
        ]
    }
    net = Products()
    hits = torch._dynamo.utils.counters["aot_autograd"]
    for served in (0, 4):
        before = hits["autograd_cache_hit"]
        with hmpx.convert(policy=policy):
            assert [t.dtype for t in net.train()(x())] == [BF16, FP32]
            assert [t.dtype for t in net.eval()(x())] == [BF16, BF16]
            assert hits["autograd_cache_hit"] == before + served
        hmpx.revert()  # otherwise an equal block keeps its graphs


def _forward(position: int) -> Callable[[nn.Sequential, Tensor], Tensor]:
    names: dict[str, Any] = {}
    exec(f"def forward(self, value):\n    return self[0](value) + {position}", names)
    return names["forward"]  # type: ignore[no-any-return]


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_graph_is_compiled_once_where_it_is_called_from_one_place() -> None:
    """Guards on the place do not compile again what is called again."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    net = Net()
    compiled = by_blocks(net, {"backend": backend, "fullgraph": True})
    with hmpx.convert(policy=PLACED):
        for _ in range(4):
            compiled(x())
        assert len(graphs) == 3


# --- graphs without Dynamo, export --------------------------------------------------------------


def exported(net: nn.Module, *, strict: bool) -> Callable[[Tensor], Any]:
    return torch.export.export(net, (x(),), strict=strict).module()


GRAPHS: dict[str, Callable[[nn.Module], Callable[[Tensor], Any]]] = {
    "export, strict": lambda net: exported(net, strict=True),
    "export": lambda net: exported(net, strict=False),
    "jit.trace": lambda net: torch.jit.trace(net, x()),
    "make_fx": lambda net: make_fx(net)(x()),
    "make_fx, pre-dispatch": lambda net: make_fx(net, pre_dispatch=True)(x()),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("graph", GRAPHS)
def test_graphs_have_the_casts_of_eager(graph: str, training: bool) -> None:
    """By module, class and phase; they hold once torch is reverted."""
    net = Telling().train(training)
    with torch.no_grad():
        with hmpx.convert(policy=POLICY):
            expected = net(x())
            traced = GRAPHS[graph](net)
        actual = traced(x())
    assert [a.dtype for a in actual] == [e.dtype for e in expected]
    torch.testing.assert_close(tuple(actual), expected, rtol=0, atol=0)


# --- process groups -----------------------------------------------------------------------------


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone, which meets itself in a file."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def in_ddp(net: Net) -> nn.Module:
    return nn.parallel.DistributedDataParallel(net)


def in_fsdp(net: Net) -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("use_reentrant", [None, False, True])
@pytest.mark.parametrize("wrapped", [in_ddp, in_fsdp])
def test_wrappers_of_distributed_training_change_no_name(
    linears: Places, wrapped: Callable[[Net], nn.Module], use_reentrant: bool | None
) -> None:
    """Nor any class of the model's; forward, and recomputed in backward."""
    net = Net(use_reentrant)
    net.shared = nn.Linear(4, 4)  # a checkpointed module's second use is more than DDP can follow
    expected = [*LINEARS[:6], "shared", "heads.a.0"]
    model = wrapped(net)
    again = [f"layers.{i}.{name}" for i in (2, 1, 0) for name in ("first", "last")]
    for _ in range(2):
        linears.paths.clear()
        model(x().requires_grad_()).sum().backward()
        assert linears.paths == [*expected, *([] if use_reentrant is None else again)]
