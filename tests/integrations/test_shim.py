"""The stand-in for habana_frameworks: its modules, where "hpu" lands, and that it leaves no trace."""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch.utils._device import DeviceContext

import hmpx
from hmpx import HmpxError, integrations
from hmpx.integrations import devices
from hmpx.integrations import shim as habana_shim
from hmpx.session import session
from tests import forks

HPU = torch.device("hpu")
DEVICE = devices.device_type()

# The first pickle of a tensor leaves its slot names in the class, where Python looks them up again.
torch.save(torch.ones(1), io.BytesIO())


@pytest.fixture
def shim() -> Iterator[None]:
    """Installs the shim for the test."""
    assert habana_shim.install()
    yield
    habana_shim.uninstall()


def state() -> dict[str, dict[str, Any]]:
    """Returns all that the shim may change, by key and identity."""
    owners = [torch, torch.serialization, torch.distributed]
    classes = [torch.Tensor, torch.nn.Module, torch.autocast, DeviceContext, threading.Thread]
    classes.append(torch.utils.data.DataLoader)
    names = [n for n in sys.modules if n.split(".")[0] in ("hmp", "habana_frameworks")]
    return {
        **{str(owner): dict(vars(owner)) for owner in (*owners, *classes)},
        "modules": {
            name: sys.modules[name]
            for name in [*names, *(n for n in sys.modules if n.startswith("torch.hpu"))]
        },
    }


# --- devices -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, device="hpu"),
        lambda: torch.zeros(2, device="hpu:0"),
        lambda: torch.zeros(2, device=HPU),
        lambda: torch.tensor([1.0], device="hpu"),
        lambda: torch.randint(3, (2,), device="hpu"),
        lambda: torch.empty_like(torch.ones(2), device="hpu"),
        lambda: torch.ones(2).new_zeros(2, device="hpu"),
        lambda: torch.ones(2).to("hpu"),
        lambda: torch.ones(2).to(HPU, non_blocking=True),
        lambda: torch.ones(2).to(device="hpu", dtype=torch.bfloat16),
        lambda: torch.ones(2).hpu(),
        lambda: torch.ones(2).hpu(0, non_blocking=True),
        lambda: torch.nn.Linear(2, 2, device="hpu").weight,
        lambda: torch.nn.Linear(2, 2).to("hpu").weight,
        lambda: torch.nn.Linear(2, 2).to(HPU, torch.bfloat16).weight,
        lambda: torch.nn.Linear(2, 2).hpu().weight,
        lambda: torch.nn.Linear(2, 2, device="meta").to_empty(device="hpu").weight,
    ],
)
@pytest.mark.usefixtures("shim")
def test_hpu_lands_on_the_device_that_is_there(make: Callable[[], torch.Tensor]) -> None:
    """Factories, moves and modules accept hpu in each of its spellings."""
    assert make().device.type == DEVICE


@pytest.mark.usefixtures("shim")
def test_hpu_as_context_and_default_device() -> None:
    """torch.device as a context, and the default device, may be hpu."""
    with HPU:
        assert torch.zeros(2).device.type == DEVICE
    torch.set_default_device("hpu")
    try:
        assert torch.zeros(2).device.type == DEVICE
    finally:
        torch.set_default_device(None)


@pytest.mark.usefixtures("shim")
def test_autocast_takes_hpu() -> None:
    """An autocast region for hpu is one for the device really used."""
    with torch.autocast("hpu", dtype=torch.bfloat16):
        assert torch.is_autocast_enabled(DEVICE)
    assert torch.autocast(device_type="hpu", enabled=False).device == DEVICE


@pytest.mark.parametrize("written_on", ["cpu", "hpu:0"])
@pytest.mark.parametrize(
    "map_location",
    ["hpu", HPU, None, {"cpu": "hpu"}, {"hpu:0": "cpu"}, lambda storage, location: None],
)
@pytest.mark.usefixtures("shim")
def test_load_from_and_to_hpu(
    written_on: str, map_location: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints load whether they were written on an hpu or are to go to one."""
    file = io.BytesIO()
    with monkeypatch.context() as patched:
        patched.setattr(torch.serialization, "location_tag", lambda storage: written_on)
        torch.save({"weight": torch.arange(3.0)}, file)
    file.seek(0)
    loaded = torch.load(file, map_location=map_location)["weight"]
    assert loaded.tolist() == [0, 1, 2]
    if map_location in ("hpu", HPU):
        assert loaded.device.type == DEVICE


@pytest.mark.parametrize("backend", ["hccl", "HCCL", "hpu:hccl", "cpu:gloo,hpu:hccl"])
@pytest.mark.usefixtures("shim")
def test_hccl_process_groups_use_the_backend_of_the_device(backend: str) -> None:
    """A script that asks for Habana's collectives gets those of the device."""
    torch.distributed.init_process_group(
        backend=backend, store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        name = "nccl" if DEVICE == "cuda" else "gloo"
        assert torch.distributed.get_backend().endswith(name)
    finally:
        torch.distributed.destroy_process_group()


# --- modules -----------------------------------------------------------------------------------


#: Module -> names that public scripts of HMP's time, and libraries that they use, import or ask for.
NAMES = {
    "hmp": "hmp",
    "hmp.hmp": "convert disable_casts",
    "habana_dataloader": "HabanaDataLoader",
    "habana_frameworks": "torch",
    "habana_frameworks.torch": "core hpu hpex distributed utils _hpex_C",
    "habana_frameworks.torch.core": "mark_step hpu_initialize hpu_set_env hpu_inference_set_env "
    "is_enabled_weight_permute_pass enable_weight_permute_pass set_dynamic_mode",
    "habana_frameworks.torch.core.hccl": "initialize_distributed_hpu",
    "habana_frameworks.torch.distributed.hccl": "initialize_distributed_hpu",
    "habana_frameworks.torch.hpex": "hmp",
    "habana_frameworks.torch.hpex.hmp": "convert disable_casts",
    "habana_frameworks.torch.hpex.movingavrg": "FusedEMA",
    "habana_frameworks.torch.hpex.normalization": "FusedClipNorm",
    "habana_frameworks.torch.hpex.optimizers": "FusedAdagrad FusedAdamW FusedLamb FusedLars FusedSGD "
    "FusedResourceApplyMomentum",
    "habana_frameworks.torch.hpu": "is_available is_initialized device_count current_device set_device "
    "synchronize Stream Event HPUGraph graph ModuleCacher wrap_in_hpu_graph make_graphed_callables "
    "memory_stats memory_allocated max_memory_allocated reset_peak_memory_stats mem_get_info random "
    "graphs memory stream current_stream empty_cache enable_dynamic_shape disable_dynamic_shape "
    "setDeterministic get_rng_state_all get_device_name manual_seed",
    "habana_frameworks.torch.hpu.graphs": "wrap_in_hpu_graph HPUGraph ModuleCacher",
    "habana_frameworks.torch.hpu.memory": "memory_stats reset_peak_memory_stats",
    "habana_frameworks.torch.hpu.random": "manual_seed manual_seed_all get_rng_state set_rng_state "
    "get_rng_state_all set_rng_state_all seed seed_all initial_seed",
    "habana_frameworks.torch.hpu.streams": "Stream current_stream",
    "habana_frameworks.torch.utils": "debug experimental library_loader",
    "habana_frameworks.torch.utils.debug": "_enable_fallback_ops _mem_log _set_module_name "
    "_memstat_livealloc _is_enabled_weight_permute_pass",
    "habana_frameworks.torch.utils.distributed_utils": "initialize_distributed_hpu",
    "habana_frameworks.torch.utils.experimental": "_get_device_type synDeviceType _record_params",
    "habana_frameworks.torch.utils.internal": "is_lazy",
    "habana_frameworks.torch.utils.library_loader": "load_habana_module is_habana_available "
    "is_habana_avaialble load_habana_profiler",
    "torch.hpu": "is_available memory_stats",
    "torch.hpu.random": "manual_seed_all",
    "torch.hpu.graphs": "HPUGraph",
}


@pytest.mark.parametrize("module", NAMES)
@pytest.mark.usefixtures("shim")
def test_modules_import_by_the_names_in_use(module: str) -> None:
    """Every module that Habana's scripts import is there with its names, for find_spec too."""
    found = importlib.import_module(module)
    assert importlib.util.find_spec(module) is not None
    for name in NAMES[module].split():
        assert getattr(found, name) is not None


@pytest.mark.usefixtures("shim")
def test_a_module_without_stand_in_is_not_found() -> None:
    """Programs look for optional parts this way."""
    assert importlib.util.find_spec("habana_frameworks.torch.hpex.kernels") is None


MODULES = "hmpx's stand-in for 'habana_frameworks' has no "
NAMED = "hmpx's stand-in for 'habana_frameworks.torch.core' has no 'quantize'; "


@pytest.mark.usefixtures("shim")
@pytest.mark.parametrize(
    ("statement", "error", "message"),
    [
        (
            "from habana_frameworks.mediapipe import fn",
            ModuleNotFoundError,
            f"{MODULES}'habana_frameworks.mediapipe'; load data with torch.utils.data.DataLoader, or",
        ),
        (
            "from habana_frameworks.torch.hpex.kernels import FusedSDPA",
            ModuleNotFoundError,
            f"{MODULES}'habana_frameworks.torch.hpex.kernels'; call torch's function, such as",
        ),
        (
            "import habana_frameworks.torch.gpu_migration",
            ModuleNotFoundError,
            f"{MODULES}'habana_frameworks.torch.gpu_migration'; leave out the import, and place",
        ),
        (
            "from habana_frameworks.torch.hpex.optimizers import FusedAdadelta",
            ImportError,
            f"{MODULES}'habana_frameworks.torch.hpex.optimizers.FusedAdadelta'; use an optimizer of",
        ),
        (
            "import habana_frameworks.torch.hpex.custom",
            ModuleNotFoundError,
            f"{MODULES}'habana_frameworks.torch.hpex.custom'; guard its import with try and except "
            "ImportError, or run where the real one is installed",
        ),
        (
            "import habana_frameworks.torch.core as core; core.quantize",
            AttributeError,
            f"{NAMED}guard its use with hasattr(core, 'quantize'), or run where the real one is "
            "installed",
        ),
        (
            "import habana_frameworks.torch.utils.debug as debug; debug._dump_recipe_memory_stat",
            AttributeError,
            "has no '_dump_recipe_memory_stat'; look with torch.profiler, or",
        ),
    ],
)
def test_what_is_missing_says_so(statement: str, error: type[Exception], message: str) -> None:
    """With the remedy: a module or an imported name is an ImportError, an attribute an AttributeError."""
    with pytest.raises(error) as caught:
        exec(statement, {})
    assert message in str(caught.value)


@pytest.mark.usefixtures("shim")
def test_device_functions_answer() -> None:
    """What scripts ask of the device has an answer on every machine."""
    hpu = importlib.import_module("habana_frameworks.torch.hpu")
    assert hpu.is_available() and hpu.device_count() >= 1 and hpu.current_device() == 0
    assert torch.hpu.memory_allocated() >= 0  # type: ignore[attr-defined]
    hpu.synchronize()
    importlib.import_module("habana_frameworks.torch.core").mark_step()
    hpu.random.manual_seed_all(3)
    first = torch.rand(2, device="hpu")
    hpu.random.manual_seed_all(3)
    assert torch.equal(torch.rand(2, device="hpu"), first)


@pytest.mark.usefixtures("shim")
def test_launcher_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """initialize_distributed_hpu gives world size, rank and local rank; -1 without a launcher."""
    hccl = importlib.import_module("habana_frameworks.torch.distributed.hccl")
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert hccl.initialize_distributed_hpu() == (1, 0, -1)
    for name, value in (("WORLD_SIZE", "8"), ("RANK", "5"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert hccl.initialize_distributed_hpu() == (8, 5, 1)


@pytest.mark.usefixtures("shim")
def test_convert_has_hmps_positional_order(tmp_path: Path) -> None:
    """The script's own convert replaces the one in force, on the device really used."""
    low, fp32 = tmp_path / "low.txt", tmp_path / "fp32.txt"
    low.write_text("softmax\n")
    fp32.write_text("tanh\n")
    hmpx.convert(device_types={"cpu"})
    hmp = importlib.import_module("hmp").hmp
    hmp.convert("O1", str(low), str(fp32), False, torch.float16)
    current = session.current()
    assert current is not None and current.device_types == {DEVICE}
    x = torch.ones(2, 2, device="hpu")
    assert torch.softmax(x, 0).dtype is torch.float16
    with hmp.disable_casts():
        assert torch.softmax(x, 0).dtype is torch.float32
    hmp.convert(opt_level="O2")
    assert (x @ x).dtype is torch.bfloat16
    hmp.convert(bf16_file_path=None, fp32_file_path=None)
    assert torch.nn.functional.linear(x, x).dtype is torch.bfloat16
    current = session.current()
    assert current is not None and current.policy == hmpx.load_policy(lists="hmp")


# --- in and out --------------------------------------------------------------------------------


def test_uninstall_leaves_no_trace() -> None:
    """Modules, attributes and the mode are as before, also after a second install."""
    before = state()
    assert habana_shim.install() and habana_shim.install()
    assert state() != before
    habana_shim.uninstall()
    habana_shim.uninstall()
    after = state()
    for owner, values in before.items():
        assert values.keys() == after[owner].keys(), owner
        assert all(after[owner][key] is value for key, value in values.items()), owner
    with pytest.raises(ModuleNotFoundError, match="hpu"):
        torch.zeros(2, device="hpu")


def package(directory: Path, name: str) -> None:
    """Makes ``name`` a regular, empty package below ``directory``."""
    for part in name.split("."):
        directory = directory / part
        directory.mkdir(exist_ok=True)
        (directory / "__init__.py").touch()


def test_the_real_package_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is installed where habana_frameworks.torch is importable."""
    monkeypatch.syspath_prepend(tmp_path)
    package(tmp_path, "habana_frameworks.torch")
    try:
        assert not habana_shim.install()
        assert not hasattr(torch, "hpu")
    finally:
        sys.modules.pop("habana_frameworks", None)


# --- the command line --------------------------------------------------------------------------

TRAINING = """
import torch
import habana_frameworks.torch.core as htcore
from habana_frameworks.torch.hpex import hmp
from habana_frameworks.torch.utils.library_loader import load_habana_module

load_habana_module()
print(torch.nn.functional.linear(torch.ones(2, 2, device="hpu"), torch.ones(2, 2).to("hpu")).dtype)
hmp.convert(opt_level="O1", bf16_file_path="", fp32_file_path="", isVerbose=False,
            low_precision_type=torch.float16)
device = torch.device("hpu")
model = torch.nn.Linear(4, 2).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
output = model(torch.ones(3, 4).to(device, non_blocking=True))
loss = torch.nn.functional.cross_entropy(output, torch.zeros(3, dtype=torch.long, device=device))
loss.backward()
htcore.mark_step()
with hmp.disable_casts():
    optimizer.step()
htcore.mark_step()
print(output.dtype, loss.dtype, model.weight.dtype)
"""


def run(
    script: Path, python_path: str = "", options: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Returns the outcome of ``hmpx run --habana-shim`` on ``script``."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([python_path, str(Path(hmpx.__file__).parent.parent)]),
    }
    command = ["-m", "hmpx", "run", "--habana-shim", *options, script.name]
    return forks.run(*command, cwd=script.parent, env=environment)


def test_run_trains_a_script_written_for_gaudi(tmp_path: Path) -> None:
    """An unmodified HMP script trains, and is cast from its own convert on."""
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    finished = run(script)
    assert (finished.stderr, finished.returncode) == ("", 0)
    assert finished.stdout.splitlines() == [
        "torch.float32",
        "torch.float16 torch.float32 torch.float32",
    ]


# --- options of the command line ----------------------------------------------------------------


def merged(said: dict[str, Any], given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the options that hold beside what a script says, and those that don't."""
    from hmpx.integrations import hpex as hmp

    return hmp.merged(said, given)


@pytest.mark.parametrize(
    ("said", "given", "taken", "unused"),
    [
        ({}, {"legalize": "never"}, ["legalize"], []),
        ({"opt_level": "O1"}, {"opt_level": "O2"}, [], ["opt_level"]),
        ({"opt_level": "O2"}, {"opt_level": "O2"}, [], []),
        (
            {"opt_level": "O2"},
            {"bf16_file_path": "a", "strict": True},
            ["strict"],
            ["bf16_file_path"],
        ),
        ({"opt_level": "O2"}, {"lists": "hmp"}, [], ["lists"]),
        ({"bf16_file_path": "a"}, {"fp32_file_path": "b"}, ["fp32_file_path"], []),
        ({"bf16_file_path": "a"}, {"bf16_file_path": "b"}, [], ["bf16_file_path"]),
        ({"bf16_file_path": "a"}, {"policy": "p.yaml"}, [], ["policy"]),
        ({"opt_level": "O2"}, {"policy": "p.yaml"}, [], ["policy"]),
        ({"opt_level": "O1"}, {"policy": "p.yaml"}, ["policy"], []),
        ({"isVerbose": True}, {"isVerbose": "once"}, [], ["isVerbose"]),
    ],
)
def test_what_the_script_says_outranks_the_command_line(
    said: dict[str, Any], given: dict[str, Any], taken: list[str], unused: list[str]
) -> None:
    """And so it does where the two would contradict each other."""
    found = merged(said, given)
    assert [[*each] for each in found] == [taken, unused]


@pytest.mark.usefixtures("shim")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("O3",), "opt_level must be"),
        (("O1", "absent.txt"), "absent.txt: no such file"),
        (("O1", 3), "bf16_file_path must be"),
        (("O1", "", "", "loud"), "isVerbose must be"),
        (("O1", "", "", False, torch.int64), "low_precision_type must be"),
    ],
)
def test_wrong_arguments_of_a_script_convert_nothing(
    arguments: tuple[Any, ...], message: str
) -> None:
    """The error is hmpx.convert's."""
    hmp = importlib.import_module("habana_frameworks.torch.hpex.hmp")
    with pytest.raises(HmpxError, match=message):
        hmp.convert(*arguments)
    assert session.current() is None and not integrations.has_converted()


@pytest.mark.usefixtures("shim")
def test_true_prints_hmps_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Under the stand-in; scripts look for them."""
    hmp = importlib.import_module("habana_frameworks.torch.hpex.hmp")
    hmp.convert(isVerbose=True)
    x = torch.ones(2, 2, device="hpu")
    torch.mm(x, x)
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if "mm" in line or line.startswith("hmp:")] == [
        "hmp:verbose_mode  True",
        "hmp:opt_level O1",
        printed[-1],
    ]
    assert printed[-1].startswith("casting  <built-in method mm") and printed[-1].endswith(
        "> to_bf16"
    )
