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


@pytest.mark.slow
def test_profile_step(tmp_path: Path) -> None:
    """Kinds of work add up to the step; only legalized steps have casts, and both have the same products."""
    options = ["--sizes", "small", "--rounds", "1", "--steps", "1", "--candidates", "hmpx fast"]
    run("profile_step.py", "--models", "gpt", *options, folder=tmp_path)
    figures = saved(tmp_path / "profile_step-cpu.json")["figures"]["gpt"]["small"]
    assert list(figures) == ["fp32", "hmpx fast"]
    for figure in figures.values():
        kinds = ("raising", "rounding", "layout", "elementwise", "optimizer", "allocation", "rest")
        assert sum(figure[f"{kind}_s"] for kind in kinds) == pytest.approx(figure["step_s"])
    assert figures["fp32"]["raising_s"] == figures["fp32"]["rounding_s"] == 0
    assert figures["hmpx fast"]["rounding_s"] > 0


@pytest.mark.slow
def test_inference(tmp_path: Path) -> None:
    """Frozen weights take about half the bytes; each candidate runs compiled, too."""
    names = ["fp32", "hmpx frozen", "fp32, compiled", "hmpx frozen, compiled"]
    options = ["--candidates", *names[:2], "--compile", "--backend", "eager"]
    output = run("inference.py", "--cases", "decode", *QUICK, *options, folder=tmp_path)
    assert all(name in output for name in names)
    figures = saved(tmp_path / "inference-cpu.json")["figures"]["decode"]["small"]
    assert list(figures) == names
    for figure in figures.values():
        assert figure.keys() == TIMES | {"weight_bytes", "weight_ratio", "process_bytes"}
    assert figures["fp32"]["weight_ratio"] == 1
    assert 0.5 <= figures["hmpx frozen"]["weight_ratio"] < 0.7


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


@pytest.mark.slow
def test_overhead(tmp_path: Path) -> None:
    """All tables are there."""
    run("overhead.py", "--repeats", "1", folder=tmp_path)
    result = saved(tmp_path / "overhead-cpu.json")
    assert list(result)[len(HEADER) :] == ["convert_ms", "ops_us", "models_us"]


def test_first_use(tmp_path: Path) -> None:
    """Neither the import nor `convert` compiles or opens a connection, or the program would fail."""
    run("first_use.py", "--processes", "1", folder=tmp_path)
    figures = saved(tmp_path / "first_use-cpu.json")["figures"]
    assert 0 < figures["import_share"] < 1
    assert 0 < figures["convert_share"] < 1
    assert figures["import_gc_ms"] < figures["import_ms"]


@pytest.mark.slow
def test_calls(tmp_path: Path) -> None:
    """Each case is measured in both checkouts."""
    checkout = str(BENCHMARKS.parent)
    run("calls.py", "--rounds", "1", "--against", checkout, folder=tmp_path)
    figures = saved(tmp_path / "calls-cpu.json")["calls_us"]
    assert {"linear", "linear, casting 3", "module"} <= figures.keys()
    for figure in figures.values():
        assert figure.keys() == {"raw", "adds", "adds there"}
        assert figure["raw"] > 0


@pytest.mark.slow
def test_observers(tmp_path: Path) -> None:
    """Each candidate trains, and has its ratio."""
    options = "--models gpt --sizes small --rounds 1 --steps 1 --candidates record watch"
    run("observers.py", *options.split(), folder=tmp_path)
    figures = saved(tmp_path / "observers-cpu.json")["figures"]["gpt"]["small"]
    assert figures.keys() == {"hmpx", "record", "watch"}
    assert figures["hmpx"]["ratio"] == 1


@pytest.mark.slow
def test_tuning(tmp_path: Path) -> None:
    """Each search passes; hmpx asks for fewer sets than one at a time and keeps no more than ddmin."""
    run("tuning.py", "--models", "mlp", "--sizes", "small", "--threads", "1", folder=tmp_path)
    for found in saved(tmp_path / "tuning-cpu.json")["figures"]["mlp"]["small"].values():
        assert found.keys() == {"hmpx", "one at a time", "ddmin", "halving", "prefix"}
        for figures in found.values():
            assert figures["error"] <= figures["tolerance"]
        assert found["hmpx"]["evaluations"] <= 40


@pytest.mark.models
@pytest.mark.slow
def test_tuned_lists(tmp_path: Path) -> None:
    """Within the error of each list, and of halving; what lists keep is counted among the candidates."""
    run("tuned_lists.py", "--models", "vit", "--steps", "3", "--threads", "1", folder=tmp_path)
    figures = saved(tmp_path / "tuned_lists-cpu.json")["figures"]["vit"]
    assert figures.keys() == {"op", "module"}
    for rivals in figures.values():
        assert rivals.keys() == {"hmp", "autocast-cpu", "halving"}
        for label, found in rivals.items():
            assert 0 < found["rival"]["flops_share"] <= 1 or label == "halving"
            assert found["rival"]["kept"] < found["rival"]["candidates"]
            if label != "halving":  # which stops below its tolerance
                assert found["hmpx"]["error"] <= found["rival"]["error"] * (1 + 1e-6)


@pytest.mark.slow
def test_compiled(tmp_path: Path) -> None:
    """The results of hmpx and of casts by hand are bit-equal, or the program would fail."""
    options = ["--rounds", "1", "--samples", "1", "--backend", "eager"]
    run("compiled.py", *options, folder=tmp_path)
    assert saved(tmp_path / "compiled-cpu.json")["bit_equal"] is True


def test_compiled_models(load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is measured is shown and saved; to measure it takes minutes of inductor's."""
    program = load("compiled_models")
    row = dict.fromkeys(program.COLUMNS, 1.0)
    monkeypatch.setattr(program, "measure", lambda *what: {"fp32, compiled": row})
    words = ["--phases", "inference", "--models", "gpt", "--save", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["benchmarks/compiled_models.py", *words])
    program.main()
    figures = saved(tmp_path / "compiled_models-cpu.json")["figures"]
    assert figures == {"inference": {"gpt": {"medium": {"fp32, compiled": row}}}}


@pytest.mark.models
@pytest.mark.slow
def test_kernels(tmp_path: Path, on_fake_cuda: Any) -> None:
    """Counts every candidate."""
    run("kernel_counts.py", "--models", "lstm", folder=tmp_path)
    figures = saved(tmp_path / "kernel_counts-fake_cuda.json")["figures"]["lstm"]
    assert {"fp32", "autocast", "hmpx", "inference, hmpx frozen"} <= figures.keys()
    assert figures["fp32"]["casts"] == 0 < figures["hmpx"]["casts"]


def test_tables_of_kernels_are_those_saved(load: Any) -> None:
    """In docs/speed.md."""
    kernels = load("kernel_counts")
    figures = saved(BENCHMARKS / "results" / "kernel_counts-fake_cuda.json")["figures"]
    text = kernels.DOCUMENT.read_text("utf-8")
    assert kernels.documented(text, figures) == text
    with pytest.raises(SystemExit, match="has 0 tables marked 'training', not one"):
        kernels.documented("", figures)


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


def test_trainings_are_compared_pair_by_pair(load: Any) -> None:
    """By the paired t-test; a difference within the spread of the seeds is none, NaN is one."""
    outcomes = load("outcomes")
    base, values = [0.90, 0.95, 0.91, 0.97], [0.89, 0.93, 0.91, 0.94]
    test = pytest.importorskip("scipy.stats").ttest_rel(values, base)
    found = outcomes.compared(values, base)
    assert found["p"] == pytest.approx(test.pvalue)
    interval = test.confidence_interval()
    assert [found["low"], found["high"]] == pytest.approx([interval.low, interval.high])
    assert outcomes.compared(base, base)["p"] == 1
    for shift, differs in ((0.001, False), (0.5, True), (float("nan"), True)):
        found = outcomes.compared([value + shift for value in base], base)
        assert found["differs"] is differs
        assert "p" not in found or found["p"] < 1e-6


def test_tables_of_trainings_are_those_saved(load: Any) -> None:
    """In docs/trainings.md."""
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


def test_sizes_are_the_same_everywhere(load: Any) -> None:
    """Each device has each model in both sizes."""
    sizes = load("models").SIZES
    assert sizes["cpu"].keys() == sizes["cuda"].keys()
    for models in sizes.values():
        assert all(list(model) == ["small", "medium"] for model in models.values())


@pytest.mark.parametrize("is_explicit", [False, True])
def test_decoding(load: Any, is_explicit: bool) -> None:
    """A token at a time from the cache gives the logits of the whole text at once."""
    models = load("models")
    model = models.build("decoder", "small", is_attention_explicit=is_explicit)
    tokens = models.batch("decoder", "small", rows=2).inputs[:, :8]
    with torch.inference_mode():
        expected = model(tokens)
        cache = model.new_cache(2)
        parts = [model(tokens[:, :5], torch.arange(5), cache)]
        parts += [model(tokens[:, i : i + 1], torch.tensor([i]), cache) for i in range(5, 8)]
    torch.testing.assert_close(torch.cat(parts, 1), expected)


class Fake:
    """Takes the given durations, one step a turn, and notes its turns."""

    def __init__(self, name: str, durations: list[float], log: list[str]) -> None:
        self.name, self.durations, self.log = name, iter(durations), log

    def call(self, method: str, *arguments: Any) -> list[float]:
        self.log.append(self.name)
        return [next(self.durations)]


def test_turns(load: Any) -> None:
    """The order alternates, who is over the limit sits out, ratios are taken round by round."""
    timing = load("timing")
    log: list[str] = []
    fakes = {
        "fp32": Fake("fp32", [1.0, 2.0, 4.0], log),
        "fast": Fake("fast", [0.5, 1.0, 1.0], log),
        "slow": Fake("slow", [30.0], log),
    }
    turns = timing.take_turns(fakes, base="fp32", rounds=3, turn_s=0.1, limit_s=5.0)
    assert log == ["fp32", "fast", "slow", "fast", "fp32", "fp32", "fast"]
    summary = timing.summarize(turns, "fp32")
    assert summary["fast"] == {
        "ratio": 0.5,
        "ratio_min": 0.25,
        "ratio_max": 0.5,
        "median_s": 1.0,
        "min_s": 0.5,
        "rounds": 3,
        "steps": 3,
    }
    assert (summary["slow"]["ratio"], summary["slow"]["rounds"]) == (30.0, 1)


def test_failing_worker(load: Any) -> None:
    """What fails in a process ends the program, with the candidate's name and its traceback."""
    timing = load("timing")
    with (
        pytest.raises(SystemExit, match=r"(?s)fp32 failed in its process.*'no_such_method'"),
        timing.workers(["fp32"], str, threads=1) as workers,
    ):
        workers["fp32"].call("no_such_method")


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


def test_nothing_to_draw(load: Any, tmp_path: Path) -> None:
    """Without results, the error tells how to get them."""
    with pytest.raises(SystemExit, match=r"run train\.py and inference\.py with --save"):
        load("draw").read_panels(tmp_path, "cpu")


def test_formats(tmp_path: Path) -> None:
    """Each shipped format is rounded to, by kernels and by torch ops."""
    options = ["--elements", "4096", "--rounds", "1", "--threads", "1"]
    output = run("formats.py", *options, folder=tmp_path)
    saved(tmp_path / "formats-cpu.json")
    assert all(name in output for name in ("float8_e4m3fn", "posit16_1", "mxfp8_e4m3"))


@pytest.mark.models
def test_casts() -> None:
    """Queries, keys and values each cast their input, as under torch.autocast."""
    result = forks.run(str(BENCHMARKS / "casts.py"))
    assert result.returncode == 0, result.stderr
    rows = {tuple(line.split()[:2]): line.split()[2:] for line in result.stdout.splitlines()[1:]}
    assert rows["bert", "hmpx"] == ["17", "8", "50"]
    assert rows["bert", "autocast-cuda"] == ["17", "8", "50"]
    assert rows["resnet", "autocast-cpu"] == ["1", "0", "22"]


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
    assert len(table) == 6
    assert all(row.endswith("| Skipped: needs a CUDA device |") for row in table[2:])
