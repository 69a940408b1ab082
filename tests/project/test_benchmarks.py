"""Each benchmark runs, at settings that say nothing about speed, and saves what draw.py reads."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests import forks

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULTS = sorted((BENCHMARKS / "results").glob("*.json"))
HEADER = ["machine", "torch", "hmpx", "date", "command"]
TIMES = {"ratio", "ratio_min", "ratio_max", "median_s", "min_s", "rounds", "steps"}

QUICK = ["--sizes", "small", "--rounds", "1", "--turn", "0.01", "--warm-up", "0", "--threads", "1"]


def run(script: str, *arguments: str, folder: Path) -> str:
    """Returns what a benchmark prints that saves to ``folder``; nothing may go to stderr."""
    command = ["-W", "error", str(BENCHMARKS / script), *arguments, "--save", "."]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = forks.run(*command, cwd=folder, env=environment)
    assert (result.returncode, result.stderr) == (0, ""), result.stdout + result.stderr
    return result.stdout


def saved(path: Path) -> dict[str, Any]:
    """Returns the content of a result file, whose header must be complete."""
    result = json.loads(path.read_text(encoding="utf-8"))
    assert list(result)[: len(HEADER)] == HEADER
    machine = {"processor", "architecture", "cores", "threads"}
    assert result["machine"].keys() - {"gpu", "environment"} == machine
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", result["date"])
    assert result["command"].startswith(f"python benchmarks/{path.stem.split('-')[0]}.py")
    return result


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that imports a module of benchmarks/, for one test."""

    def load_module(name: str) -> ModuleType:
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        monkeypatch.delitem(sys.modules, name, raising=False)
        module = importlib.import_module(name)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return load_module


@pytest.mark.sampled(3)
def test_train(tmp_path: Path) -> None:
    """Each candidate has its times, its memory, and its loss after as many steps as fp32's."""
    options = ["--candidates", "hmpx", "--steps", "3"]
    run("train.py", "--models", "gpt", *QUICK, *options, folder=tmp_path)
    result = saved(tmp_path / "train-cpu.json")
    figures = result["figures"]["gpt"]["small"]
    assert list(figures) == ["fp32", "hmpx"]
    for figure in figures.values():
        assert figure.keys() == TIMES | {"peak_bytes", "loss", "loss_steps", "loss_minus_fp32"}
        assert figure["loss_steps"] == 3
        assert abs(figure["loss_minus_fp32"]) < 0.05 * figures["fp32"]["loss"]
    assert figures["fp32"]["ratio"] == 1
    assert figures["fp32"]["loss_minus_fp32"] == 0
    assert figures["hmpx"]["loss_minus_fp32"] != 0


def test_memory(tmp_path: Path) -> None:
    """bf16 weights and inputs halve what is saved, and both ways to count agree.

    The processes of the candidates don't look in the current directory for hmpx, as the program doesn't.
    """
    (tmp_path / "hmpx.py").write_text("raise RuntimeError('the wrong hmpx')", encoding="utf-8")
    options = ["--candidates", "fp32", "bf16", "--threads", "1"]
    run("memory.py", "--models", "gpt", "--sizes", "small", *options, folder=tmp_path)
    figures = saved(tmp_path / "memory-cpu.json")["figures"]["gpt"]["small"]
    for figure in figures.values():
        assert figure["peak_bytes"] > 0
        if figure["live_bytes"] is not None:  # only glibc tells
            assert figure["live_bytes"] == pytest.approx(figure["saved_bytes"], rel=0.1)
    assert figures["bf16"]["saved_ratio"] == pytest.approx(0.5, abs=0.05)


@pytest.mark.sampled(3)
def test_first_use(tmp_path: Path) -> None:
    """Neither the import nor `convert` compiles or opens a connection, or the program would fail."""
    run("first_use.py", "--processes", "1", folder=tmp_path)
    figures = saved(tmp_path / "first_use-cpu.json")["figures"]
    assert 0 < figures["import_share"] < 1
    assert 0 < figures["convert_share"] < 1
    assert figures["import_gc_ms"] < figures["import_ms"]
    assert figures["block_ms"] < figures["convert_ms"] / 20


def test_launches_are_counted_once(load: Any) -> None:
    """A profile of a device has its kernels and the calls by which the host launched them."""
    event = torch.autograd.profiler_util.FunctionEvent
    device, host = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    names = [("cudaLaunchKernel", host, 2), ("gemm", device, 9), ("cudaMemcpyAsync", host, 1)]
    names += [("cudaLaunchKernel", host, 2), ("gemm", device, 9), ("Memcpy HtoD", device, 4)]
    events = torch.autograd.profiler_util.EventList(
        [
            event(number, name, 0, 0.0, float(us), device_type=on, stack=[], use_device="cuda")
            for number, (name, on, us) in enumerate(names)
        ]
    )
    events._build_tree()
    found = load("gpu_step").on_device(events.key_averages())
    assert {each.key: each.count for each in found} == {"gemm": 2, "Memcpy HtoD": 1}
    assert sum(each.self_device_time_total for each in found) == 22


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", ["gpt", "lstm"])
def test_steps_of_a_gpu_are_tried_out_on_a_cpu(model: str, tmp_path: Path) -> None:
    """Without its kernels; the backward has nodes, and takes a part of the step."""
    options = ["--size", "small", "--rounds", "1", "--steps", "1", "--candidates", "fp32", "hmpx"]
    command = [str(BENCHMARKS / "gpu_step.py"), "--device", "cpu", "--save", "."]
    done = forks.run(*command, "--model", model, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [path] = tmp_path.glob("gpu_step*.json")
    assert path.name.startswith(f"gpu_step{'-lstm' * (model == 'lstm')}")
    for figures in saved(path)["figures"].values():
        assert 0 < figures["backward_s"] < figures["step_s"]
        assert figures["backward"]["host: backward"] > 0
        assert figures["kernels"] == 0


def test_tables_of_kernels_are_those_saved(load: Any) -> None:
    """In docs/evidence/speed.md."""
    kernels = load("kernel_counts")
    figures = saved(BENCHMARKS / "results" / "kernel_counts-fake_cuda.json")["figures"]
    text = kernels.DOCUMENT.read_text("utf-8")
    assert kernels.documented(text, figures) == text
    with pytest.raises(SystemExit, match="has 0 tables marked 'training', not one"):
        kernels.documented("", figures)


@pytest.mark.sampled(3)
def test_trainings(load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each mode starts from fp32's weights and batches; what is in the journal is not trained again."""
    journal = ["--journal", "journal.jsonl"]
    options = [
        "--tasks",
        "mlp",
        "--modes",
        "fp32",
        "hmpx",
        "--seeds",
        "1",
        "--steps",
        "3",
        *journal,
    ]
    assert "2/2  mlp, hmpx, seed 0: " in run("trainings.py", *options, folder=tmp_path)
    figures = saved(tmp_path / "trainings-cpu.json")["figures"]
    fp32, hmpx = figures["mlp"].values()
    assert hmpx["curve"][0] == pytest.approx(fp32["curve"][0], rel=0.01)
    assert hmpx["curve"] != fp32["curve"]
    assert "training loss" in (tmp_path / "trainings-cpu.svg").read_text(encoding="utf-8")
    program = load("trainings")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(program, "attempted", None)
    monkeypatch.setattr(sys, "argv", ["benchmarks/trainings.py", *options, "--save", "again"])
    program.main()
    assert saved(tmp_path / "again" / "trainings-cpu.json")["figures"] == figures
    marks = "".join(
        f"<!-- {name} -->\n\n\n<!-- end -->\n" for name in ("scores", "losses", "times")
    )
    made = program.documented(f"<!-- modes -->\n\n\n<!-- end -->\n{marks}", figures)
    assert f"| mlp | 1.00 | {hmpx['time_ratio']:.2f} |" in made
    with pytest.raises(SystemExit, match="has 0 tables marked 'modes', not one"):
        program.documented(marks, figures)


def test_tables_of_trainings_are_those_saved(load: Any) -> None:
    """In docs/evidence/trainings.md."""
    trainings = load("trainings")
    figures = saved(BENCHMARKS / "results" / "trainings-cuda.json")["figures"]
    text = trainings.DOCUMENT.read_text("utf-8")
    assert trainings.documented(text, figures) == text


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_saved_results(path: Path) -> None:
    """Each file in the repository has a complete header and figures after it."""
    assert len(saved(path)) > len(HEADER)


def test_readme_names_each_benchmark() -> None:
    """Every program has its command in benchmarks/README.md and in its own docstring."""
    readme = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    for path in BENCHMARKS.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "__main__" in text:
            assert f"`python benchmarks/{path.name}" in readme
            assert f"    python benchmarks/{path.name} " in text


@pytest.mark.parametrize("size", ["small", "medium"])
@pytest.mark.parametrize("name", ["gpt", "decoder", "llama", "bert", "vit", "resnet", "mlp"])
def test_shapes(load: Any, name: str, size: str) -> None:
    """Logits fit the labels; the same seed gives the same loss."""
    models = load("models")
    losses = []
    for _ in range(2):
        batch = models.batch(name, size, rows=2)
        with torch.no_grad():
            logits = models.build(name, size)(batch.inputs)
        assert logits.shape[:-1] == batch.labels.shape
        losses.append(models.loss(logits, batch.labels).item())
    assert losses[0] == losses[1] > 0


def test_draw(load: Any, tmp_path: Path) -> None:
    """Draws every group, and writes the figure of a bar that is too long; or asks for matplotlib."""
    draw = load("draw")
    ratios = {"fp32": 1.0, "autocast": 41.0, "hmpx": 1.25, "hmpx fast": 1.5, "hmpx frozen": 0.75}
    figures = {"medium": {name: {"ratio": ratio} for name, ratio in ratios.items()}}
    for name, cases in (("train", draw.MODELS), ("inference", draw.CASES)):
        content = {"figures": dict.fromkeys(cases, figures)}
        (tmp_path / f"{name}-cpu.json").write_text(json.dumps(content), encoding="utf-8")
    panels = draw.read_panels(tmp_path, "cpu")
    assert [panel.title for panel in panels] == ["Training step", "Inference"]
    picture = tmp_path / "cpu.svg"
    if importlib.util.find_spec("matplotlib") is None:  # no dependency of the tests
        with pytest.raises(SystemExit, match="pip install matplotlib"):
            draw.draw(panels, picture)
        return
    draw.draw(panels, picture)
    text = picture.read_text(encoding="utf-8")
    for label in (*draw.MODELS.values(), *draw.CASES.values(), "hmpx frozen", "41", "0.75"):
        assert f">{label}<" in text


@pytest.mark.sampled(3)
def test_formats(tmp_path: Path) -> None:
    """Each shipped format is rounded to, by kernels and by torch ops."""
    options = ["--elements", "4096", "--rounds", "1", "--threads", "1"]
    output = run("formats.py", *options, folder=tmp_path)
    saved(tmp_path / "formats-cpu.json")
    assert all(name in output for name in ("float8_e4m3fn", "posit16_1", "mxfp8_e4m3"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run all tests on the GPU")
def test_table_of_what_a_gpu_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without one it tells so, and does not end as if something had been tested."""
    script = BENCHMARKS.parent / "scripts" / "gpu.py"
    monkeypatch.setattr(sys, "argv", [str(script), "-k", "graph or wait"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(script), run_name="__main__")
    assert end.value.code == 1
    head, _, *table = capsys.readouterr().out.splitlines()
    assert head.startswith(f"no CUDA device, torch {torch.__version__}, hmpx ")
    assert table[0] == "| test | outcome | s | figure |"
    assert len(table) == 28
    assert all(row.endswith("| Skipped: needs a CUDA device |") for row in table[2:])
