"""Rules: what they are asked and when, whose word counts, and that no verdict is ever stale."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hmpx
from hmpx import (
    ALLOW,
    DENY,
    FOLLOW,
    Call,
    CastPolicy,
    Decision,
    OptionError,
    Policy,
    RuleError,
    casting,
    ops,
    register_rule,
    unregister_rule,
)
from tests.values import uniform

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NOTHING = {"lists": "none"}


@pytest.fixture(autouse=True)
def rules_are_taken_back() -> Iterator[None]:
    """Takes back what a test has registered; there must be nothing before it."""
    assert casting.all_rules() == ()
    yield
    for name in {rule.op for rule in casting.all_rules()}:
        unregister_rule(name)


def none() -> hmpx.Session:
    return hmpx.convert(policy=NOTHING, legalize="never")


# --- registering --------------------------------------------------------------------------------


def test_as_a_decorator_and_as_a_call() -> None:
    """Both give the function back, as it is."""

    @register_rule("linear", level=3)
    def rule(call: Call) -> CastPolicy:
        return ALLOW

    assert rule.__name__ == "rule"
    assert register_rule("mm", rule) is rule
    assert [(r.op, r.function, r.level) for r in casting.all_rules()] == [
        ("linear", rule, 3),
        ("mm", rule, 10),
    ]
    with none():
        assert (
            F.linear(uniform(4, 4), uniform(4, 4)).dtype
            is torch.mm(uniform(4, 4), uniform(4, 4)).dtype
            is BF16
        )
    assert F.linear(uniform(4, 4), uniform(4, 4)).dtype is FP32


def test_for_several_ops_in_any_spelling() -> None:
    """One function, a rule for each."""
    register_rule(["torch.nn.functional.conv2d", "divide", "mm"], lambda call: DENY)
    assert [rule.op for rule in casting.all_rules()] == ["conv2d", "div", "mm"]
    unregister_rule(["conv2d", "true_divide"])
    assert [rule.op for rule in casting.all_rules()] == ["mm"]


def test_holds_for_conversions_in_force_and_to_come() -> None:
    """From the next call on, until it is taken back."""
    with none():
        assert torch.relu(uniform(4, 4)).dtype is FP32
        register_rule("relu", lambda call: ALLOW)
        assert torch.relu(uniform(4, 4)).dtype is BF16
        with hmpx.convert(policy=Policy.from_ops(fp32=["exp"])):
            assert torch.relu(uniform(4, 4)).dtype is BF16
        assert torch.relu(uniform(4, 4)).dtype is BF16
        unregister_rule("relu")
        assert torch.relu(uniform(4, 4)).dtype is FP32
    register_rule("relu", lambda call: ALLOW)
    with none():
        assert torch.relu(uniform(4, 4)).dtype is BF16
    assert torch.relu(uniform(4, 4)).dtype is FP32


def definition(answer: str, module: str = "__main__") -> Callable[..., Any]:
    """Returns what a notebook's cell defines, run anew at each call."""
    namespace: dict[str, Any] = {"hmpx": hmpx, "__name__": module}
    exec(f"def rule(call):\n    return hmpx.{answer}", namespace)
    return namespace["rule"]


def test_a_definition_that_is_run_again_replaces_itself() -> None:
    """As a notebook's cell does; functions of other modules, and lambdas, stand beside it."""
    for answer in ("ALLOW", "DENY", "ALLOW"):
        register_rule("relu", definition(answer))
    assert len(casting.all_rules()) == 1
    register_rule("relu", definition("DENY", module="other"), level=1)
    register_rule("relu", lambda call: None)
    register_rule("relu", lambda call: None)
    assert len(casting.all_rules()) == 4
    with none():
        assert torch.relu(uniform(4, 4)).dtype is BF16


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("sofmax",), {}, "unknown op 'sofmax'; did you mean 'softmax'?"),
        ((["mm", "sofmax"],), {}, "unknown op 'sofmax'; did you mean 'softmax'?"),
        (("mm", 3), {}, "a rule must be a function of a call, not 3"),
        (("mm", "max"), {}, "a rule must be a function of a call, not 'max'"),
        (("mm",), {"level": 1.5}, "level must be an integer, not 1.5"),
        (("mm",), {"level": True}, "level must be an integer, not True"),
        ((None,), {}, "op must be an op name, or several, not None"),
        (([],), {}, "op must be an op name, or several, not []"),
        (([1],), {}, "op must be an op name, or several, not [1]"),
    ],
)
def test_what_is_no_rule_is_an_error(
    arguments: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    """And nothing is registered."""
    with pytest.raises(OptionError) as error:
        register_rule(*arguments, **options)
    assert str(error.value) == message
    assert casting.all_rules() == ()


def test_taking_back_what_is_not_there_is_an_error() -> None:
    """Of several ops none is taken back then, neither here nor in the conversion in force."""

    def rule(call: Call) -> CastPolicy:
        return ALLOW

    register_rule("relu", rule)
    with none():
        with pytest.raises(OptionError) as error:
            unregister_rule(["relu", "tanh"])
        assert str(error.value) == "'tanh' has no rule; register_rule adds one"
        with pytest.raises(OptionError) as error:
            unregister_rule("relu", uniform)
        assert str(error.value) == f"'relu' has no such rule: {uniform!r}; register_rule adds one"
        assert [r.function for r in casting.all_rules()] == [rule]
        assert torch.relu(uniform(4, 4)).dtype is BF16
        unregister_rule("relu", rule)
        assert torch.relu(uniform(4, 4)).dtype is FP32


# --- what a rule sees ---------------------------------------------------------------------------


def seen(op: str, run: Callable[[], object]) -> dict[str, Any]:
    """Returns all that a rule of ``op`` is told while ``run`` runs."""
    found: dict[str, Any] = {}

    def look(call: Call) -> None:
        names = ("op", "shapes", "dtypes", "devices", "device", "kwargs", "module",
                 "module_class", "module_classes", "training")  # fmt: skip
        found.update({name: getattr(call, name) for name in names})

    register_rule(op, look)
    with none():
        run()
    unregister_rule(op, look)
    return found


def test_a_rule_sees_tensors_in_the_parameters_order() -> None:
    """Whatever way they are given, also those in lists; before any cast."""
    cpu = torch.device("cpu")
    expected = {
        "op": "linear",
        "shapes": (torch.Size([2, 3]), torch.Size([4, 3]), torch.Size([4])),
        "dtypes": (BF16, FP32, FP16),
        "devices": (cpu, cpu, cpu),
        "device": "cpu",
        "kwargs": {},
        "module": "",
        "module_class": "",
        "module_classes": (),
        "training": None,
    }
    a, w, b = uniform(2, 3, dtype=BF16), uniform(4, 3), uniform(4, dtype=FP16)

    def tried(run: Callable[[], object]) -> None:
        with pytest.raises(RuntimeError):  # the dtypes differ
            run()

    for run in (
        lambda: F.linear(a, w, b),
        lambda: F.linear(bias=b, weight=w, input=a),
        lambda: F.linear(a, bias=b, weight=w),
    ):
        assert seen("linear", lambda: tried(run)) == expected  # noqa: B023
    listed = seen("cat", lambda: torch.cat([uniform(2), uniform(3, dtype=BF16)], dim=0))
    assert listed["shapes"] == (torch.Size([2]), torch.Size([3]))
    assert listed["dtypes"] == (FP32, BF16)
    assert seen("where", lambda: torch.where(uniform(4, 4) > 0, uniform(4, 4), 0))["dtypes"] == (
        torch.bool,
        FP32,
    )


@pytest.mark.parametrize(
    ("op", "run", "kwargs"),
    [
        ("softmax", lambda: torch.softmax(uniform(4, 4), 1), {"dim": 1}),
        ("softmax", lambda: uniform(4, 4).softmax(dim=-1, dtype=FP64), {"dim": -1, "dtype": FP64}),
        ("conv2d", lambda: F.conv2d(uniform(1, 1, 4, 4), uniform(1, 1, 2, 2), None, 2, padding=[1, 0]),
         {"bias": None, "stride": 2, "padding": (1, 0)}),
        ("conv2d", lambda: F.conv2d(uniform(1, 1, 4, 4), uniform(1, 1, 3, 3), padding="same", groups=1),
         {"padding": "same", "groups": 1}),
        ("sum", lambda: uniform(4, 4).sum((0, 1), keepdim=True), {"dim": (0, 1), "keepdim": True}),
        ("mul", lambda: uniform(4, 4) * 2.5, {"other": 2.5}),
        ("mul", lambda: uniform(4, 4) * uniform(4, 4), {}),
        ("dropout", lambda: F.dropout(uniform(4, 4), 0.1, training=False), {"p": 0.1, "train": False}),
        ("div", lambda: torch.div(uniform(4, 4), 2, rounding_mode="floor"),
         {"other": 2, "rounding_mode": "floor"}),
        ("sum", lambda: torch.sum(input=uniform(4, 4), axis=1, keepdims=True), {"dim": 1, "keepdim": True}),
    ],
)  # fmt: skip
def test_a_rule_sees_the_other_arguments_by_name(
    op: str, run: Callable[[], object], kwargs: dict[str, Any]
) -> None:
    """By position or not; lists are tuples; tensors are not among them."""
    found = seen(op, run)["kwargs"]
    assert isinstance(found, types.MappingProxyType)
    assert {name: found[name] for name in kwargs} == kwargs
    assert not any(isinstance(value, Tensor) for value in found.values())


def test_a_rule_that_leaves_a_call_alone_leaves_its_dtype_alone() -> None:
    """Under the fp32 list a low ``dtype=`` is what the result is rounded to; without it, torch's."""
    x = torch.full((1000,), 1.0038)  # 1 in bfloat16
    expected = torch.sum(x, dtype=BF16)
    for policy in (hmpx.CastPolicy.PASS, hmpx.CastPolicy.WIDEST):
        register_rule("sum", lambda call, policy=policy: policy)
        with hmpx.convert(policy=Policy.from_ops(fp32=["sum"])):
            actual = torch.sum(x, dtype=BF16)
        unregister_rule("sum")
        assert actual.item() == expected.item() == 1000


def test_a_rule_sees_the_module_that_runs() -> None:
    """Its name, class and mode, and the classes around it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    model[1].eval()
    found = seen("relu", lambda: model(uniform(4, 4)))
    names = ("module", "module_class", "module_classes", "training")
    assert {name: found[name] for name in names} == {
        "module": "1.1",
        "module_class": "ReLU",
        "module_classes": ("Sequential", "Sequential", "ReLU"),
        "training": False,
    }


def test_a_rule_is_asked_with_casts_off_and_may_use_torch() -> None:
    """What it computes with torch is not cast, nor asked about."""
    asked = []

    @register_rule("relu")
    def rule(call: Call) -> CastPolicy:
        asked.append(torch.relu(torch.ones(2)).dtype)
        return ALLOW if torch.tensor(call.shapes[0]).prod() > 3 else DENY

    with none():
        assert torch.relu(uniform(4, 4)).dtype is BF16
        assert hmpx.casts_enabled()
    assert asked == [FP32]


# --- verdicts are kept --------------------------------------------------------------------------


def test_a_verdict_is_kept_for_calls_that_are_alike_in_what_was_looked_at() -> None:
    """Only then: the rule is not asked again."""
    asked = 0

    @register_rule("relu")
    def rule(call: Call) -> CastPolicy:
        nonlocal asked
        asked += 1
        return ALLOW if len(call.shapes[0]) > 1 else DENY

    with none():
        for _ in range(3):
            assert torch.relu(uniform(2, 3)).dtype is BF16
            assert torch.relu(uniform(2, 3, dtype=FP16)).dtype is BF16  # dtypes were not looked at
        assert asked == 1
        assert torch.relu(uniform(2)).dtype is FP32
        assert uniform(2).relu().dtype is FP32  # another call site keeps its own
        assert asked == 3


FIELDS: dict[str, Callable[[Call], Any]] = {
    "shapes": lambda call: call.shapes,
    "dtypes": lambda call: call.dtypes,
    "device": lambda call: call.device,
    "devices": lambda call: call.devices,
    "kwargs": lambda call: tuple((n, type(v), str(v)) for n, v in call.kwargs.items()),
    "module": lambda call: call.module,
    "module_class": lambda call: call.module_class,
    "module_classes": lambda call: call.module_classes,
    "training": lambda call: call.training,
}


class Runs(nn.Module):
    """Makes a call by the name of one of its modules, inside of that."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, name: str, run: Callable[[], Any]) -> Any:
        first, _, rest = name.partition(".")
        return getattr(self, first)(rest, run) if first else run()


@st.composite
def trees(draw: st.DrawFn, depth: int = 3) -> Any:
    """Draws a decision tree: (field, branch by the hash of its value) down to an answer."""
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        return draw(st.sampled_from([ALLOW, DENY, None, Decision(ALLOW, FP16)]))
    field = draw(st.sampled_from(sorted(FIELDS)))
    return field, draw(trees(depth - 1)), draw(trees(depth - 1))


CALLS = st.tuples(
    st.sampled_from([(2,), (3,), (2, 2)]),
    st.sampled_from([FP32, BF16, FP16]),
    st.sampled_from([None, 1, 1.0, 2, 0.0, -0.0]),
    st.sampled_from(["", "a", "b.c"]),
    st.booleans(),
)


@pytest.mark.usefixtures("no_search_for_early_names")
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(tree=trees(), calls=st.lists(CALLS, min_size=2, max_size=12))
def test_no_verdict_is_ever_stale(tree: Any, calls: list[Any]) -> None:
    """A rule that looks at this or that, by what it has seen, is as if asked each time."""

    def answer(call: Call) -> Any:
        node = tree
        while isinstance(node, tuple):
            field, *branches = node
            node = branches[sum(map(ord, repr(FIELDS[field](call)))) % 2]
        return node

    parameters = ops.parameters(ops.table()["add"].sites[0])
    model = Runs(a=Runs(), b=Runs(c=Runs()))
    register_rule("add", answer)
    try:
        with none():
            for shape, dtype, alpha, name, training in calls:
                value = uniform(*shape, dtype=dtype)
                options = {} if alpha is None else {"alpha": alpha}

                def run(value: Tensor = value, options: Any = options) -> Any:
                    fresh = casting.CachedRules(
                        "add", parameters, (answer,), BF16, lambda said: said
                    )
                    said = fresh.judge((value, value), options)
                    return torch.add(value, value, **options), said

                actual, said = model.train(training)(name, run)
                assert actual.dtype is (dtype if said is None else said.dtype)
    finally:
        unregister_rule("add")


@pytest.mark.parametrize(
    ("op", "run", "values"),
    [
        ("add", lambda value: torch.add(uniform(4, 4), uniform(4, 4), alpha=value), [1, 1.0]),
        ("mul", lambda value: uniform(4, 4) * value, [1, 1.0, True]),
        ("mul", lambda value: uniform(4, 4) * value, [0.0, -0.0]),
        ("sum", lambda value: torch.sum(uniform(4, 4), (0, value)), [1, True]),
    ],
)
def test_equal_arguments_of_other_types_are_told_apart(
    op: str, run: Callable[[Any], Tensor], values: list[Any]
) -> None:
    """1, 1.0 and True; 0.0 and -0.0: for Python they are equal, for a rule they need not be."""
    answers = [ALLOW, DENY, Decision(ALLOW, FP16)]

    def named(call: Call) -> str:
        return str([*call.kwargs.values()][-1])

    told = {str((0, v) if op == "sum" else v): a for v, a in zip(values, answers, strict=False)}
    register_rule(op, lambda call: told[named(call)])
    with none():
        for _ in range(2):
            assert [run(value).dtype for value in values] == [BF16, FP32, FP16][: len(values)]


# --- whose word counts --------------------------------------------------------------------------


def test_the_higher_level_is_asked_first_and_none_passes_on() -> None:
    """Of equal levels the later one; nobody is asked after an answer."""
    asked: list[str] = []

    def rule(name: str, answer: CastPolicy | None) -> Callable[[Call], CastPolicy | None]:
        def ask(call: Call) -> CastPolicy | None:
            asked.append(name)
            return answer

        return ask

    register_rule("relu", rule("ten", DENY))
    register_rule("relu", rule("five", ALLOW), level=5)
    register_rule("relu", rule("twenty", None), level=20)
    register_rule("relu", rule("ten, later", None))
    register_rule("*", rule("all, fifteen", None), level=15)
    register_rule("relu", rule("minus", ALLOW), level=-1)
    with hmpx.convert(policy=Policy.from_ops(low=["relu"])):
        assert torch.relu(uniform(4, 4, dtype=FP16)).dtype is FP32
    assert asked == ["twenty", "all, fifteen", "ten, later", "ten"]


def test_rules_come_before_sections_and_sections_before_lists() -> None:
    """What one passes on is the next one's."""
    policy = {"lists": "none", "low": ["relu"], "sections": [{"ndim": 2, "fp32": ["relu"]}]}
    with hmpx.convert(policy=policy, legalize="never"):
        low = uniform(3, 3, dtype=BF16)
        assert torch.relu(uniform(3)).dtype is BF16
        assert torch.relu(low).dtype is FP32
        register_rule("relu", lambda call: ALLOW if call.shapes[0][0] == 3 else None)
        assert torch.relu(low).dtype is BF16
        assert torch.relu(uniform(4, 4, dtype=BF16)).dtype is FP32
        unregister_rule("relu")
        assert torch.relu(low).dtype is FP32


@pytest.mark.parametrize("answer", [ALLOW, DENY, FOLLOW, Decision(ALLOW, output_dtype=FP16)])
def test_what_is_written_to_keeps_its_dtype(answer: Any) -> None:
    """In-place calls and ``out=`` are as without the rule, whatever it says."""
    register_rule(["add", "lerp", "relu"], lambda call: answer)
    for dtype in (FP32, BF16):
        for low in (True, False):
            with hmpx.convert(policy=Policy.from_ops(low=["add", "lerp"] if low else [])):
                a, b = uniform(4, 4, dtype=dtype), uniform(4, 4)
                a += b
                a.add_(b)
                torch.add(b, b, out=a)
                F.relu(a, inplace=True)
                assert a.dtype is dtype
                if low:
                    assert a.lerp_(b, 0.5).dtype is dtype


def test_disable_casts_wins() -> None:
    """The rule is not even asked; so it is in an optimizer's step."""
    asked = []
    register_rule(["relu", "mul", "addcdiv"], lambda call: asked.append(call.op) or ALLOW)
    with none():
        with hmpx.disable_casts():
            assert torch.relu(uniform(4, 4)).dtype is FP32
        weight = nn.Parameter(uniform(4, 4))
        weight.grad = uniform(4, 4)
        torch.optim.Adam([weight]).step()
        assert asked == []
        assert torch.relu(uniform(4, 4)).dtype is BF16
        with hmpx.disable_casts():
            assert torch.relu(uniform(4, 4)).dtype is FP32


def test_the_lists_win_over_autocast_and_so_do_rules() -> None:
    """What a rule passes on, of an op in no list, is autocast's."""
    register_rule("mm", lambda call: {2: DENY, 3: ALLOW}.get(len(call.shapes[0]) + (
        call.shapes[0][0] - 4)))  # fmt: skip
    with none(), torch.autocast("cpu", FP16):
        assert torch.mm(uniform(4, 4), uniform(4, 4)).dtype is FP32
        assert torch.mm(uniform(5, 4), uniform(4, 4)).dtype is BF16
        assert torch.mm(uniform(6, 4), uniform(4, 4)).dtype is FP16


def test_an_op_in_no_list_can_have_a_rule() -> None:
    """Also one that torch promotes itself, where nothing was wrapped before."""
    ops_ = {
        "tan": lambda: torch.tan(uniform(4, 4)),
        "add": lambda: uniform(4, 4) + uniform(4, 4),
        "cat": lambda: torch.cat([uniform(4, 4), uniform(4, 4)]),
        "where": lambda: torch.where(uniform(4, 4) > 0.5, uniform(4, 4), uniform(4, 4)),
        "view": lambda: uniform(4, 4).view(16),
        "T": lambda: uniform(4, 4).T,
    }
    for policy in (NOTHING, {"lists": "none", "widest": ["add", "cat", "where"]}, None):
        for op, call in ops_.items():
            register_rule(op, lambda call: ALLOW)
            with hmpx.convert(policy=policy, legalize="never"):
                assert call().dtype is BF16, op
            unregister_rule(op)


def test_star_is_every_op_that_computes() -> None:
    """Views and queries are none."""
    register_rule("*", lambda call: ALLOW, level=1)
    register_rule("exp", lambda call: DENY)
    with none():
        for result in (
            uniform(4, 4) @ uniform(4, 4),
            uniform(4, 4) + uniform(4, 4),
            torch.tan(uniform(4, 4)),
            uniform(4, 4).sum(),
            F.softmax(uniform(4, 4), 1),
        ):
            assert result.dtype is BF16
        assert torch.exp(uniform(4, 4, dtype=BF16)).dtype is FP32
        assert (
            uniform(4, 4).t().dtype
            is uniform(4, 4).view(16).dtype
            is uniform(4, 4).detach().dtype
            is FP32
        )
        assert (torch.arange(3) + 1).dtype is torch.int64


def test_operators_follow_unless_they_have_rules_of_their_own() -> None:
    """``div`` covers ``/`` and its reflection."""
    register_rule("div", lambda call: ALLOW)
    with none():
        assert (
            (uniform(4, 4) / 2).dtype
            is (2 / uniform(4, 4)).dtype
            is torch.div(uniform(4, 4), 2).dtype
            is BF16
        )
        register_rule("truediv", lambda call: Decision(ALLOW, FP16))
        assert torch.div(uniform(4, 4), 2).dtype is uniform(4, 4).divide(2).dtype is BF16
        assert (uniform(4, 4) / 2).dtype is (2 / uniform(4, 4)).dtype is FP16
        unregister_rule("truediv")
        assert (uniform(4, 4) / 2).dtype is BF16


@pytest.mark.parametrize("name", ["add", "cat"])
def test_rules_of_ops_that_torch_promotes(name: str) -> None:
    """Each policy gives what casts by hand do; None leaves it to torch."""
    call: Callable[[Tensor, Tensor], Tensor] = (
        (lambda a, b: a + b) if name == "add" else (lambda a, b: torch.cat([a, b]))
    )
    a, b = uniform(4, 4, dtype=BF16), uniform(4, 4)
    answers: dict[Any, torch.dtype] = {
        ALLOW: BF16, DENY: FP32, FOLLOW: FP32, CastPolicy.WIDEST: FP32, CastPolicy.FIRST: BF16,
        CastPolicy.PASS: FP32, None: FP32, Decision(CastPolicy.WIDEST, output_dtype=FP16): FP16,
    }  # fmt: skip
    for answer, dtype in answers.items():
        inside = BF16 if dtype is BF16 else FP32
        expected = call(a.to(inside), b.to(inside)).to(dtype)
        register_rule(name, lambda call, said=answer: said)  # type: ignore[misc]
        with hmpx.convert(policy={"lists": "none", "widest": [name]}, legalize="never"):
            torch.testing.assert_close(call(a, b), expected, rtol=0, atol=0)
        unregister_rule(name)


# --- what goes wrong ----------------------------------------------------------------------------


def raises(call: Call) -> CastPolicy:
    return ALLOW if call.shapes[7] else DENY


def nonsense(call: Call) -> Any:
    return torch.float16


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (raises, "rule raises ({file}:{line}) for relu raised IndexError: tuple index out of range"),
        (nonsense, "rule nonsense ({file}:{line}) for relu returned torch.float16; return "
                   "hmpx.ALLOW, hmpx.FOLLOW, hmpx.DENY, an hmpx.Decision, or None"),
    ],
)  # fmt: skip
def test_a_rule_that_fails_is_an_error_that_names_it(
    rule: Callable[[Call], Any], message: str
) -> None:
    """At each call of the op, and at no other; the cause is kept."""
    register_rule("relu", rule)
    code = rule.__code__
    with none():
        for _ in range(2):
            with pytest.raises(RuleError) as error:
                torch.relu(uniform(4, 4))
            assert str(error.value) == message.format(
                file=code.co_filename, line=code.co_firstlineno
            )
            assert (error.value.__cause__ is None) == (rule is nonsense)
            assert hmpx.casts_enabled()
        assert torch.exp(uniform(4, 4)).dtype is FP32
        unregister_rule("relu")
        assert torch.relu(uniform(4, 4)).dtype is FP32


# --- reasons ------------------------------------------------------------------------------------


def test_the_log_names_what_has_decided(caplog: pytest.LogCaptureFixture) -> None:
    """The rule, the section's line, the list's line: also where they say the same."""

    @register_rule("relu")
    def small(call: Call) -> CastPolicy | None:
        return ALLOW if call.shapes[0].numel() == 1 else None

    policy = {
        "lists": "none",
        "low": ["relu"],
        "sections": [{"ndim": 2, "low": ["relu"]}, {"ndim": 3, "low": ["relu"]}],
    }
    with hmpx.convert(policy=policy, isVerbose="once"), caplog.at_level(logging.INFO, "hmpx"):
        caplog.clear()
        torch.relu(uniform(2))
        torch.relu(uniform(2, 2))
        torch.relu(uniform(2, 2, 2))
        torch.relu(uniform(1))
    reasons = [message.partition(" by ")[2].partition("  at ")[0] for message in caplog.messages]
    where = f"{small.__code__.co_filename}:{small.__code__.co_firstlineno}"
    assert reasons[:3] == [
        "<policy>['low'][0]",
        "<policy>['sections'][0]['low'][0]",
        "<policy>['sections'][1]['low'][0]",
    ]
    assert reasons[3] == f"rule {small.__qualname__} ({where})"
    assert all("  to_bf16  LOW by " in message for message in caplog.messages)


def test_a_decision_may_bring_its_own_reason(caplog: pytest.LogCaptureFixture) -> None:
    """That is what the log shows."""
    register_rule("relu", lambda call: Decision(DENY, reason="my paper, table 3"))
    with hmpx.convert(policy=NOTHING, isVerbose="once"), caplog.at_level(logging.INFO, "hmpx"):
        caplog.clear()
        torch.relu(uniform(4, 4))
    assert "  to_fp32  FP32 by my paper, table 3  at " in caplog.messages[0]


# --- what composes ------------------------------------------------------------------------------


def test_functions_kept_over_a_change_follow_what_is_in_force() -> None:
    """With rules, without, with others, and reverted."""
    register_rule("relu", lambda call: ALLOW)
    with none():
        kept = torch.relu
        assert kept(uniform(4, 4)).dtype is BF16
        register_rule("relu", lambda call: Decision(ALLOW, FP16))
        also_kept = torch.relu
        assert kept(uniform(4, 4)).dtype is also_kept(uniform(4, 4)).dtype is FP16
        unregister_rule("relu")
        assert kept(uniform(4, 4)).dtype is also_kept(uniform(4, 4)).dtype is FP32
    assert kept(uniform(4, 4)).dtype is also_kept(uniform(4, 4)).dtype is FP32
    with hmpx.convert(policy=Policy.from_ops(low=["relu"])):
        assert kept(uniform(4, 4)).dtype is also_kept(uniform(4, 4)).dtype is BF16
    assert kept(uniform(4, 4)).dtype is FP32


def test_under_torch_compile() -> None:
    """Each shape is decided on its own, and a new rule is noticed; without a graph break."""
    torch._dynamo.reset()
    register_rule("mul", lambda call: ALLOW if call.shapes[0].numel() > 9 else None)

    def run(a: Tensor, b: Tensor) -> Tensor:
        return a * b

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    with none():
        for size in (2, 4, 3, 5, 2):
            value = uniform(size, size).mul(8).round()  # products are exact in bfloat16
            actual, expected = compiled(value, value), run(value, value)
            assert actual.dtype is (BF16 if size > 3 else FP32)
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        register_rule("mul", lambda call: Decision(ALLOW, FP16))
        assert compiled(uniform(2, 2), uniform(2, 2)).dtype is FP16
        unregister_rule("mul")
        assert compiled(uniform(5, 5), uniform(5, 5)).dtype is FP32
    assert compiled(uniform(5, 5), uniform(5, 5)).dtype is FP32


def test_under_vmap_grad_and_checkpoint() -> None:
    """A rule sees the shapes that the function sees; recomputation is decided alike."""
    shapes = []
    register_rule("mm", lambda call: shapes.append(tuple(call.shapes[0])) or ALLOW)
    a = uniform(3, 4, 4)
    expected = (a[0].bfloat16() @ a[0].bfloat16()).float()
    with none():
        mapped = torch.func.vmap(lambda t: torch.mm(t, t).float())(a)
        gradient = torch.func.grad(lambda t: torch.mm(t, t).float().sum())(a[0])
        again = a[0].clone().requires_grad_()
        checkpoint(lambda t: torch.mm(t, t).float().sum(), again, use_reentrant=False).backward()
    assert set(shapes) == {(4, 4)}
    torch.testing.assert_close(mapped[0], expected, rtol=0, atol=0)
    torch.testing.assert_close(again.grad, gradient, rtol=0, atol=0)
    low = a[0].bfloat16().requires_grad_()
    torch.mm(low, low).float().sum().backward()
    by_hand = a[0].clone().requires_grad_()
    torch.mm(by_hand.bfloat16(), by_hand.bfloat16()).float().sum().backward()
    torch.testing.assert_close(gradient, by_hand.grad, rtol=0, atol=0)


def test_accumulate_and_output_dtypes_from_a_rule() -> None:
    """As in the rule of the documentation: only what is large runs in low precision."""

    @register_rule("conv2d", level=10)
    def large_convolutions_only(call: Call) -> Decision | CastPolicy:
        if call.shapes[0].numel() > 100:
            return Decision(ALLOW, accumulate_dtype=FP32, output_dtype=BF16)
        return FOLLOW

    large, small, weight = uniform(1, 3, 8, 8), uniform(1, 3, 4, 4), uniform(2, 3, 3, 3)
    expected = F.conv2d(large.bfloat16().float(), weight.bfloat16().float()).bfloat16()
    with hmpx.convert():
        actual = F.conv2d(large, weight)
        assert F.conv2d(small, weight).dtype is FP32
        assert F.conv2d(small.bfloat16(), weight.bfloat16()).dtype is BF16
        assert F.conv2d(small.bfloat16(), weight).dtype is FP32
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
