"""`hmpx.integrations`: three lines in a script convert it, and training is that of a plain loop."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hmpx

from .test_training_frameworks import (
    BF16,
    FP16,
    FP32,
    STEPS,
    Accelerate,
    HuggingFace,
    Lightning,
    Network,
    Products,
    assert_same,
    converted,
    data,
    plain_fit,
    sgd,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


class Plugged:
    """A framework with hmpx plugged in; each calls what the plain one does, with one more object."""

    plain: Any

    def __init__(self) -> None:
        """Skips where the framework isn't installed."""

    def plugin(self, **options: Any) -> Any:
        raise NotImplementedError

    def fit(self, plugin: Any, directory: Path, network: nn.Module, steps: int = STEPS) -> Any:
        raise NotImplementedError

    def resume(self, plugin: Any, directory: Path, network: nn.Module) -> Any:
        raise NotImplementedError


class PluggedHuggingFace(Plugged):
    def __init__(self) -> None:
        self.plain = HuggingFace()

    def plugin(self, **options: Any) -> Any:
        from hmpx.integrations.transformers import HmpxCallback

        return HmpxCallback(**options)

    def trainer(
        self, plugin: Any, directory: Path, network: nn.Module, steps: int, **options: Any
    ) -> Any:
        trainer = self.plain.trainer(
            directory, network, sgd(network), data(), max_steps=steps, **options
        )
        trainer.add_callback(plugin)
        return trainer

    def fit(self, plugin: Any, directory: Path, network: nn.Module, steps: int = STEPS) -> Any:
        self.trainer(plugin, directory, network, steps).train()

    def resume(self, plugin: Any, directory: Path, network: nn.Module) -> Any:
        self.trainer(plugin, directory, network, STEPS + 2).train(resume_from_checkpoint=True)


class PluggedAccelerate(Plugged):
    def __init__(self) -> None:
        self.plain = Accelerate()

    def plugin(self, **options: Any) -> Any:
        """Returns what makes the run, since it wants the accelerator."""
        from hmpx.integrations.accelerate import convert

        return _Later(lambda accelerator: convert(accelerator, **options))

    def fit(self, plugin: Any, directory: Path, network: nn.Module, steps: int = STEPS) -> Any:
        accelerator = self.plain.accelerator()
        with plugin.make(accelerator):
            prepared = accelerator.prepare(network, sgd(network), data())
            self.plain.loop(accelerator, prepared, steps)
            accelerator.save_state(str(directory))

    def resume(self, plugin: Any, directory: Path, network: nn.Module) -> Any:
        accelerator = self.plain.accelerator()
        with plugin.make(accelerator):
            prepared = accelerator.prepare(network, sgd(network), data())
            accelerator.load_state(str(directory))
            self.plain.loop(accelerator, prepared, 2)


class _Later:
    def __init__(self, make: Any) -> None:
        self._make = make
        self.run: Any = None

    def make(self, accelerator: Any) -> Any:
        self.run = self._make(accelerator)
        return self.run


class PluggedLightning(Plugged):
    def __init__(self) -> None:
        self.plain = Lightning()

    def plugin(self, **options: Any) -> Any:
        from hmpx.integrations.lightning import HmpxPrecision

        return HmpxPrecision(**options)

    def fit(self, plugin: Any, directory: Path, network: nn.Module, steps: int = STEPS) -> Any:
        trainer = self.plain.trainer(directory, max_steps=steps, plugins=[plugin])
        trainer.fit(self.plain.module(network, sgd(network)), data())

    def resume(self, plugin: Any, directory: Path, network: nn.Module) -> Any:
        trainer = self.plain.trainer(directory, max_steps=STEPS + 2, plugins=[plugin])
        module = self.plain.module(network, sgd(network))
        trainer.fit(module, data(), ckpt_path=directory / "last.ckpt")


@pytest.fixture(
    scope="module",
    params=[PluggedHuggingFace, PluggedAccelerate, PluggedLightning],
    ids=["hugging face", "accelerate", "lightning"],
)
def framework(request: pytest.FixtureRequest) -> Plugged:
    return request.param()


@pytest.fixture(scope="module")
def hugging_face() -> PluggedHuggingFace:
    return PluggedHuggingFace()


@pytest.fixture(scope="module")
def lightning() -> PluggedLightning:
    return PluggedLightning()


def forget_accelerators() -> None:
    """An Accelerator's mixed precision is the process's, the Trainer's too, until it is reset."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(autouse=True)
def no_accelerator_is_left() -> Iterator[None]:
    forget_accelerators()  # another file's
    yield
    forget_accelerators()


@contextlib.contextmanager
def only_inside() -> Iterator[Products]:
    """Products in the block; torch must be as it was after it."""
    linear = torch._C._nn.linear
    with Products() as products:
        yield products
    assert not hmpx.is_converted()
    assert torch._C._nn.linear is linear


# --- training -------------------------------------------------------------------------------------


def test_training_is_that_of_a_plain_loop(framework: Plugged, tmp_path: Path) -> None:
    expected, actual = Network(), Network()
    optimizer = sgd(expected)
    with converted():
        plain_fit(expected, optimizer, data(), STEPS)
    with only_inside() as products:
        framework.fit(framework.plugin(), tmp_path, actual)
    assert set(products.dtypes) == {BF16}
    assert_same([*actual.parameters()], [*expected.parameters()])


def test_options_are_those_of_convert(framework: Plugged, tmp_path: Path) -> None:
    plugin = framework.plugin(policy={"lists": "hmpx", "fp32": ["linear"]})
    with only_inside() as products:
        framework.fit(plugin, tmp_path, Network())
    assert set(products.dtypes) == {FP32}


def test_without_options_the_conversion_in_force_is_kept(
    framework: Plugged, tmp_path: Path
) -> None:
    policy = {"lists": "hmpx", "fp32": ["linear"]}
    with hmpx.convert(policy=policy, device_types={"cpu"}) as session, Products() as products:
        framework.fit(framework.plugin(record=tmp_path / "r.json"), tmp_path, Network())
        assert hmpx.is_converted()
        assert session.policy["linear"].cast_policy is hmpx.DENY
    assert set(products.dtypes) == {FP32}
    assert "linear" in (tmp_path / "r.json").read_text()


def test_a_report_is_written_at_the_end(framework: Plugged, tmp_path: Path) -> None:
    framework.fit(framework.plugin(record=tmp_path / "report.json"), tmp_path / "run", Network())
    report = json.loads((tmp_path / "report.json").read_text())
    linear = [row for row in report["rows"] if row["op"] == "linear" and row["phase"] == "forward"]
    assert sum(row["calls"] for row in linear) == 2 * STEPS
    assert {row["dtype"] for row in linear} == {"bfloat16"}


class Overflowing(Network):
    """Its second layer's input is beyond all finite numbers from the second step on."""

    def hidden(self, x: Tensor) -> Tensor:
        found = super().hidden(x)
        return torch.exp(found * 1e4 + 200) if self.calls["hidden"] > 1 else found


def test_a_watch_names_the_op(framework: Plugged, tmp_path: Path) -> None:
    with only_inside(), pytest.raises(hmpx.NonFiniteError, match="exp"):
        plugin = framework.plugin(watch="raise")
        try:
            framework.fit(plugin, tmp_path, Overflowing())
        finally:
            plugin.run.end()  # the Trainer of Hugging Face tells nobody of an error


# --- checkpoints ----------------------------------------------------------------------------------


def test_resuming_under_the_same_policy_says_nothing(framework: Plugged, tmp_path: Path) -> None:
    framework.fit(framework.plugin(), tmp_path, Network())
    plugin = framework.plugin()
    framework.resume(plugin, tmp_path, Network(seed=1))
    assert plugin.run.carried == hmpx.load_policy()


def test_resuming_under_another_policy_warns(framework: Plugged, tmp_path: Path) -> None:
    policy = {"lists": "hmpx", "fp32": ["linear"]}
    framework.fit(framework.plugin(policy=policy), tmp_path, Network())
    plugin = framework.plugin(lists="hmpx")
    with pytest.warns(hmpx.HmpxWarning, match="decides otherwise for linear; to go on"):
        framework.resume(plugin, tmp_path, Network(seed=1))
    assert plugin.run.carried == hmpx.load_policy(policy=policy)


def test_the_trainer_restores_the_callback_from_its_checkpoint(
    hugging_face: PluggedHuggingFace, tmp_path: Path
) -> None:
    """With ``restore_callback_states_from_checkpoint`` the policy is the checkpoint's."""
    policy = {"lists": "hmpx", "fp32": ["linear"]}
    hugging_face.fit(hugging_face.plugin(policy=policy), tmp_path, Network())
    network = Network(seed=1)
    trainer = hugging_face.trainer(
        hugging_face.plugin(),
        tmp_path,
        network,
        STEPS + 2,
        restore_callback_states_from_checkpoint=True,
    )
    with Products() as products:
        trainer.train(resume_from_checkpoint=True)
    assert set(products.dtypes) == {FP32}


# --- float16, and frameworks' own mixed precision --------------------------------------------------


def test_lightning_scales_losses_in_float16(lightning: PluggedLightning, tmp_path: Path) -> None:
    expected, actual = Network(), Network()
    optimizer = sgd(expected)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**18) for _ in range(2)]
    with converted(FP16):
        for batch in data():
            scalers[0].scale(expected(**batch)["loss"]).backward()
            scalers[0].unscale_(optimizer)
            nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
            scalers[0].step(optimizer)
            scalers[0].update()
            optimizer.zero_grad()
    plugin = lightning.plugin(low_precision_type="float16", scaler=scalers[1])
    with only_inside() as products:
        lightning.fit(plugin, tmp_path, actual)
    assert set(products.dtypes) == {FP16}
    assert 1 < scalers[1].get_scale() == scalers[0].get_scale() < 2.0**18
    assert_same([*actual.parameters()], [*expected.parameters()])
    resumed = lightning.plugin(low_precision_type="float16")
    lightning.resume(resumed, tmp_path, Network())
    assert resumed.scaler.get_scale() == scalers[1].get_scale()


@pytest.mark.parametrize(
    ("options", "own", "said"),
    [
        ({}, {"bf16": True}, "bf16=True.* has torch.autocast cast as well; leave it out"),
        ({}, {"fp16": True}, "fp16=True.* to float16, which is not the policy's type"),
        ({"low_precision_type": "float16"}, {}, "float16 needs loss scaling"),
        ({"low_precision_type": "float16"}, {"fp16": True}, "not on CPUs; bfloat16 needs none"),
    ],
)
def test_the_trainers_own_mixed_precision_is_refused(
    hugging_face: PluggedHuggingFace,
    tmp_path: Path,
    options: dict[str, Any],
    own: dict[str, Any],
    said: str,
) -> None:
    trainer = hugging_face.trainer(
        hugging_face.plugin(**options), tmp_path, Network(), STEPS, **own
    )
    with only_inside(), pytest.raises(hmpx.HmpxError, match=said):
        trainer.train()


@pytest.mark.parametrize(
    ("options", "own", "said"),
    [
        ({}, "bf16", "mixed_precision='bf16'.* has torch.autocast cast as well; make it"),
        ({"low_precision_type": "float16"}, "no", "float16 needs loss scaling"),
    ],
)
def test_accelerates_own_mixed_precision_is_refused(
    options: dict[str, Any], own: str, said: str
) -> None:
    accelerate = pytest.importorskip("accelerate")
    from hmpx.integrations.accelerate import convert

    accelerator = accelerate.Accelerator(mixed_precision=own, cpu=True)
    with only_inside(), pytest.raises(hmpx.HmpxError, match=said):
        convert(accelerator, **options)


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        (
            {"list": "hmpx"},
            hmpx.OptionError,
            "convert has no argument 'list'; did you mean 'lists'",
        ),
        ({"lists": "hmpxx"}, hmpx.HmpxError, "hmpxx"),
        (
            {"record": "report.txt"},
            hmpx.OptionError,
            "ends in .html, .json, .csv, not 'report.txt'",
        ),
        ({"record": 5}, hmpx.OptionError, "record must be a string or a path, not 5"),
        ({"watch": "loud"}, hmpx.OptionError, 'mode must be "raise"'),
        ({"policy": "missing.yaml"}, hmpx.HmpxError, "missing.yaml"),
        ({"legalize": "sometimes"}, hmpx.OptionError, "legalize"),
    ],
)
def test_bad_arguments_are_refused_where_the_plugin_is_made(
    lightning: PluggedLightning, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with only_inside(), pytest.raises(error, match=said):
        lightning.plugin(**options)
