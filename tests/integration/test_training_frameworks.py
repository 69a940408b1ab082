"""hmpx inside the training loops of others: HF Trainer, Accelerate, Lightning.

Each trains as a plain PyTorch loop under hmpx does, bit for bit, without a plugin.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import runpy
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import hmpx

EXAMPLES = Path(__file__).parents[2] / "examples"
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
STEPS = 4

Batches = DataLoader[dict[str, Tensor]]

pytestmark = [
    # Of Lightning: it uses torch's pytree the old way; and three hints.
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


# --- a network, and a plain loop to compare with --------------------------------------------------


class Network(nn.Module):
    """Two linear layers, the first one checkpointed if asked for; counts its calls."""

    def __init__(self, seed: int = 0, is_checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.is_checkpointed = is_checkpointed
        self.calls: Counter[str] = Counter()

    def hidden(self, x: Tensor) -> Tensor:
        self.calls["hidden"] += 1
        return F.gelu(self.first(x))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.calls["forward"] += 1
        assert not torch.is_autocast_enabled("cpu")
        if self.is_checkpointed and self.training:
            hidden = checkpoint(self.hidden, x, use_reentrant=False)
        else:
            hidden = self.hidden(x)
        logits = self.second(hidden)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def data(samples: int = 4 * STEPS) -> Batches:
    """Returns batches of four, in the same order each time; x: [4, 8], labels: [4]."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 8, generator=generator)
    labels = torch.randint(4, (samples,), generator=generator)
    return DataLoader([{"x": a, "labels": b} for a, b in zip(x, labels, strict=True)], batch_size=4)


def sgd(network: nn.Module) -> torch.optim.Optimizer:
    """Returns an optimizer that, unlike Adam, depends on the scale of the gradients."""
    return torch.optim.SGD(network.parameters(), lr=0.5, momentum=0.9)


def kept(network: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns the parameters and the optimizer's state."""
    state = [optimizer.state[p]["momentum_buffer"] for p in network.parameters()]
    return [*(p.detach() for p in network.parameters()), *state]


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    """Equal bit for bit, and in fp32."""
    assert {tensor.dtype for tensor in actual} == {FP32}
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


#: Under `torch.inference_mode` linear is one op.
PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.linear.default,
}


class Products(TorchDispatchMode):
    """Counts matrix products by the dtype that their kernels compute in."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in PRODUCTS:
            self.dtypes[args[1].dtype] += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def converted(dtype: torch.dtype = BF16) -> Iterator[None]:
    """Converts with casts to ``dtype``; every matrix product in the block must run in it."""
    with hmpx.convert(low_precision_type=dtype, device_types={"cpu"}), Products() as products:
        yield
    assert set(products.dtypes) == {dtype}


def plain_fit(
    network: Network,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    steps: int,
    accumulate: int = 1,
) -> None:
    """Trains in a loop of PyTorch's own."""
    endless = itertools.chain.from_iterable(itertools.repeat(batches))
    for _ in range(steps):
        for batch in itertools.islice(endless, accumulate):
            (network(**batch)["loss"] / accumulate).backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


# --- the loops of others --------------------------------------------------------------------------


class HuggingFace:
    """The Trainer of transformers, which needs accelerate."""

    def __init__(self) -> None:
        pytest.importorskip("accelerate")
        self.transformers = pytest.importorskip("transformers")

    def trainer(
        self,
        directory: Path,
        network: nn.Module,
        optimizer: Any = None,
        batches: Any = None,
        **options: Any,
    ) -> Any:
        """Returns a Trainer that gets ``batches`` in their order, and saves after `STEPS`."""

        class InOrder(self.transformers.Trainer):
            def get_train_dataloader(self) -> Any:
                return self.accelerator.prepare(batches)

        arguments = self.transformers.TrainingArguments(
            output_dir=str(directory),
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            save_steps=STEPS,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
            **options,
        )
        samples = batches and batches.dataset
        return InOrder(network, arguments, train_dataset=samples, optimizers=(optimizer, None))

    def fit(
        self, directory: Path, network: nn.Module, optimizer: Any, batches: Any, accumulate: int = 1
    ) -> None:
        options = {"max_steps": STEPS, "gradient_accumulation_steps": accumulate}
        self.trainer(directory, network, optimizer, batches, **options).train()

    def resume(self, directory: Path, network: nn.Module, optimizer: Any, batches: Any) -> None:
        trainer = self.trainer(directory, network, optimizer, batches, max_steps=STEPS + 2)
        trainer.train(resume_from_checkpoint=True)

    def evaluate(self, directory: Path, network: nn.Module) -> float:
        samples = data(samples=4).dataset
        return self.trainer(directory, network).evaluate(samples)["eval_loss"]


class Accelerate:
    """A loop of accelerate's."""

    def __init__(self) -> None:
        self.accelerate = pytest.importorskip("accelerate")

    def accelerator(self, accumulate: int = 1) -> Any:
        return self.accelerate.Accelerator(
            mixed_precision="no", cpu=True, gradient_accumulation_steps=accumulate
        )

    def loop(self, accelerator: Any, prepared: tuple[Any, Any, Any], steps: int) -> None:
        model, optimizer, batches = prepared
        while steps:
            for batch in batches:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch)["loss"])
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                        steps -= 1
                    optimizer.step()
                    optimizer.zero_grad()
                if not steps:
                    break

    def fit(
        self, directory: Path, network: nn.Module, optimizer: Any, batches: Any, accumulate: int = 1
    ) -> None:
        accelerator = self.accelerator(accumulate)
        self.loop(accelerator, accelerator.prepare(network, optimizer, batches), STEPS)
        accelerator.save_state(str(directory))

    def resume(self, directory: Path, network: nn.Module, optimizer: Any, batches: Any) -> None:
        accelerator = self.accelerator()
        prepared = accelerator.prepare(network, optimizer, batches)
        accelerator.load_state(str(directory))
        self.loop(accelerator, prepared, 2)

    def evaluate(self, directory: Path, network: nn.Module) -> float:
        accelerator = self.accelerator()
        model, batches = accelerator.prepare(network, data(samples=4))
        with torch.no_grad():
            losses = [accelerator.gather(model(**batch)["loss"]).item() for batch in batches]
        (loss,) = losses
        return loss


class Lightning:
    """The Trainer of Lightning."""

    def __init__(self) -> None:
        self.lightning = pytest.importorskip("lightning.pytorch")

    def module(self, network: nn.Module, optimizer: Any = None) -> Any:
        """Returns ``network`` as Lightning wants it."""

        class Module(self.lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.network = network

            def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
                return self.network(**batch)["loss"]

            def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
                loss = self.network(**batch)["loss"]
                self.log("loss", loss)

            def configure_optimizers(self) -> Any:
                return optimizer

        return Module()

    def trainer(self, directory: Path, **options: Any) -> Any:
        """Returns a Trainer that saves each epoch."""
        save = self.lightning.callbacks.ModelCheckpoint(directory, filename="last")
        return self.lightning.Trainer(
            accelerator="cpu",
            devices=1,
            gradient_clip_val=1.0,
            callbacks=[save],
            logger=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            **options,
        )

    def fit(
        self, directory: Path, network: nn.Module, optimizer: Any, batches: Any, accumulate: int = 1
    ) -> None:
        trainer = self.trainer(directory, max_steps=STEPS, accumulate_grad_batches=accumulate)
        trainer.fit(self.module(network, optimizer), batches)

    def resume(self, directory: Path, network: nn.Module, optimizer: Any, batches: Any) -> None:
        trainer = self.trainer(directory, max_steps=STEPS + 2)
        trainer.fit(self.module(network, optimizer), batches, ckpt_path=directory / "last.ckpt")

    def evaluate(self, directory: Path, network: nn.Module) -> float:
        module = self.module(network)
        (metrics,) = self.trainer(directory).validate(module, data(samples=4), verbose=False)
        return metrics["loss"]


Framework = HuggingFace | Accelerate | Lightning


# Frameworks patch torch when they are imported: that must precede what conftest compares.
@pytest.fixture(scope="module", params=[HuggingFace, Accelerate, Lightning])
def framework(request: pytest.FixtureRequest) -> Framework:
    """Skips where it isn't installed."""
    return request.param()


@pytest.fixture(scope="module")
def hugging_face() -> HuggingFace:
    return HuggingFace()


@pytest.fixture(scope="module")
def lightning() -> Lightning:
    return Lightning()


# --- in bfloat16, without a plugin ----------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_is_that_of_a_plain_loop(
    framework: Framework, accumulate: int, tmp_path: Path
) -> None:
    """Forward and backward in bf16; parameters and optimizer state in fp32, the same bit for bit."""
    expected, actual = Network(), Network()
    optimizers = sgd(expected), sgd(actual)
    with converted():
        plain_fit(expected, optimizers[0], data(), STEPS, accumulate)
    with converted():
        framework.fit(tmp_path, actual, optimizers[1], data(), accumulate)
    assert actual.calls == expected.calls
    assert_same(kept(actual, optimizers[1]), kept(expected, optimizers[0]))


def test_activation_checkpointing(framework: Framework, tmp_path: Path) -> None:
    """The recomputed forward casts as the first one did: the same as without a checkpoint."""
    expected, actual = Network(), Network(is_checkpointed=True)
    optimizers = sgd(expected), sgd(actual)
    with converted():
        plain_fit(expected, optimizers[0], data(), STEPS)
    with converted():
        framework.fit(tmp_path, actual, optimizers[1], data())
    assert actual.calls == {"forward": STEPS, "hidden": 2 * STEPS}
    assert_same(kept(actual, optimizers[1]), kept(expected, optimizers[0]))


def test_resuming(framework: Framework, tmp_path: Path) -> None:
    """Saved and resumed in a new network, training goes on as if it had not stopped."""
    expected, first, second = Network(), Network(), Network(seed=1)
    optimizers = sgd(expected), sgd(second)
    batches = data(samples=4)  # one batch an epoch: frameworks resume at the start of one
    with converted():
        plain_fit(expected, optimizers[0], batches, STEPS + 2)
    with converted():
        framework.fit(tmp_path, first, sgd(first), batches)
    with converted():
        framework.resume(tmp_path, second, optimizers[1], batches)
    assert second.calls["forward"] == 2
    assert_same(kept(second, optimizers[1]), kept(expected, optimizers[0]))


@pytest.mark.native
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning")
def test_gradient_checkpointing_of_the_trainer(hugging_face: HuggingFace, tmp_path: Path) -> None:
    """A Llama learns with ``gradient_checkpointing=True`` what it learns without."""
    example = runpy.run_path(str(EXAMPLES / "hf_trainer.py"))
    learned, calls = [], []
    for is_checkpointed in (False, True):
        model, seen = example["build"](), Counter[torch.dtype]()
        projection = model.model.layers[0].self_attn.q_proj
        projection.register_forward_hook(lambda *call, seen=seen: seen.update([call[2].dtype]))
        optimizer = sgd(model)
        batches = DataLoader(example["Sequences"](), batch_size=4)
        options = {"max_steps": 2, "gradient_checkpointing": is_checkpointed or None}
        with converted():
            hugging_face.trainer(tmp_path, model, optimizer, batches, **options).train()
        learned.append(kept(model, optimizer))
        calls.append(seen)
    assert calls == [{BF16: 2}, {BF16: 4}]
    assert_same(*learned)


# --- the examples ---------------------------------------------------------------------------------


def run_here(name: str, monkeypatch: Any, capsys: Any, *arguments: str) -> str:
    """Returns what the example prints, run in this process, where its imports are done already."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def assert_losses_agree(output: str, rtol: float = 0.02) -> None:
    """The losses of both runs fall, and are close but not all the same."""
    rows = re.findall(r"^ +\d+ +(\d+\.\d+) +(\d+\.\d+)$", output, re.M)
    fp32, mixed = ([float(row[i]) for row in rows] for i in (0, 1))
    assert len(rows) >= 3
    assert fp32 != mixed
    assert mixed[-1] < 0.8 * mixed[0]
    for a, b in zip(mixed, fp32, strict=True):
        assert a == pytest.approx(b, rel=rtol, abs=2**-8)  # bf16 has 8 bits, 2**-8 a rounding


def assert_ran(output: str, layers: str, calls: int, dtype: torch.dtype = BF16) -> None:
    """The layers ran in fp32 and then in ``dtype``; nothing that is kept is in ``dtype``."""
    assert f"{layers}, fp32: {calls} in {FP32}\n" in output
    assert f"{layers}, hmpx: {calls} in {dtype}\n" in output
    assert f"parameters and optimizer state: {FP32}\n" in output


def test_hf_trainer(hugging_face: HuggingFace, monkeypatch: Any, capsys: Any) -> None:
    """Twenty steps of two layers with seven linear layers each, and the head."""
    output = run_here("hf_trainer.py", monkeypatch, capsys)
    assert_losses_agree(output)
    assert_ran(output, "linear layers", 20 * (2 * 7 + 1))


def test_accelerate_loop(monkeypatch: Any, capsys: Any) -> None:
    """Five epochs of eight batches."""
    pytest.importorskip("accelerate")
    output = run_here("accelerate_loop.py", monkeypatch, capsys)
    assert_losses_agree(output)
    assert_ran(output, "convolution and linear layer", 5 * 8 * 2)


def test_lightning_module(lightning: Lightning, monkeypatch: Any, capsys: Any) -> None:
    """Forty steps of two linear layers."""
    output = run_here("lightning_module.py", monkeypatch, capsys)
    assert_losses_agree(output)
    assert_ran(output, "linear layers", 40 * 2)
    assert "loss scale" not in output
