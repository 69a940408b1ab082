"""Copies of models and functions, other processes, other threads, and convert run again."""

from __future__ import annotations

import concurrent.futures
import copy
import functools
import io
import multiprocessing
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import hmpx
from hmpx import Policy

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

#: What a user's list may hold, builtins and Python functions among them.
LISTED = Policy.from_ops(
    low=["linear", "gelu", "softmax", "relu", "matmul", "normalize", "cat", "conv2d"],
    fp32=["cross_entropy", "layer_norm"],
)
POLICIES: dict[str, dict[str, Any]] = {
    "hmp": {},
    "o2": {"opt_level": "O2"},
    "listed": {"policy": LISTED},
}


def x() -> Tensor:
    return torch.linspace(-1, 1, 12).reshape(3, 4)


def pickled(value: Any, protocol: int = pickle.DEFAULT_PROTOCOL) -> Any:
    return pickle.loads(pickle.dumps(value, protocol))


def saved(value: Any) -> Any:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickled,
    "pickle protocol 2": functools.partial(pickled, protocol=2),
    "torch.save": saved,
}

#: Functions that models hold as attributes.
ACTIVATIONS: dict[str, Callable[[], Callable[..., Any]]] = {
    "F.gelu": lambda: F.gelu,
    "F.relu": lambda: F.relu,
    "F.softmax": lambda: functools.partial(F.softmax, dim=-1),
    "F.normalize": lambda: F.normalize,
    "torch.relu": lambda: torch.relu,
    "torch.softmax": lambda: functools.partial(torch.softmax, dim=-1),
    "Tensor.relu": lambda: Tensor.relu,
    "F.linear": lambda: functools.partial(F.linear, weight=torch.ones(4, 4)),
    "torch.tanh": lambda: torch.tanh,
}


class Holder(nn.Module):
    """A model that holds a function and a bound method from the time when it was made."""

    def __init__(self, activation: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.activation = activation
        self.project = self.linear.forward

    def forward(self, value: Tensor) -> Tensor:
        return self.activation(self.project(value).float())


# --- models -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "made"),
    [
        (n, m)
        for n in ACTIVATIONS
        for m in ("before", "during")
        if (n, m) != ("F.normalize", "before")
    ],
)
def test_a_model_that_holds_functions_is_copied_while_converted(name: str, made: str) -> None:
    """Made before convert or during it, its copies compute exactly what it computes.

    Only a builtin of torch._C._nn is pickled as what is in its slot: the copy casts.
    """
    before = Holder(ACTIVATIONS[name]())
    for policy in POLICIES.values():
        with hmpx.convert(**policy):
            during = Holder(ACTIVATIONS[name]())
            model = before if made == "before" else during
            is_by_slot = name in {"F.gelu", "F.linear"}
            for how, copied in COPIES.items():
                expected = during if is_by_slot and "copy" not in how else model
                assert torch.equal(copied(model)(x()), expected(x())), how


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_what_a_model_kept_from_an_earlier_convert_casts_in_the_next(name: str) -> None:
    """Its wrapper passes calls on to the one that is in force."""
    with hmpx.convert(policy=LISTED):
        model = Holder(ACTIVATIONS[name]())
        expected = model(x())
    with hmpx.convert(policy=LISTED):
        assert torch.equal(model(x()), expected)
        assert model(x()).dtype is expected.dtype
    plain = Holder(ACTIVATIONS[name]())(x())
    assert torch.equal(model(x()), plain)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_model_made_during_convert_is_copied_after_revert(name: str) -> None:
    """The wrappers that it still holds don't keep it from being saved; they cast nothing now."""
    expected = Holder(ACTIVATIONS[name]())(x())
    with hmpx.convert(policy=LISTED):
        model = Holder(ACTIVATIONS[name]())
    for how, copied in COPIES.items():
        assert torch.equal(copied(model)(x()), expected), how
    with hmpx.convert(opt_level="O2"):
        for how, copied in COPIES.items():
            assert torch.equal(copied(model)(x()), model(x())), how


# torch.softmax is pickled as a method of a class that torch keeps: no slot to patch.
@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name != "torch.softmax"])
def test_a_model_saved_in_one_state_loads_in_the_other(name: str) -> None:
    """What was pickled unconverted casts where it is loaded converted, and the reverse."""
    plain = Holder(ACTIVATIONS[name]())
    expected, blob = plain(x()), pickle.dumps(plain)
    with hmpx.convert(policy=LISTED):
        model = Holder(ACTIVATIONS[name]())
        during, blob_during = model(x()), pickle.dumps(model)
        assert torch.equal(pickle.loads(blob)(x()), during)
    loaded = pickle.loads(blob_during)
    assert torch.equal(loaded(x()), expected)
    assert torch.equal(pickled(loaded)(x()), expected)


def test_a_file_saved_while_converted_loads_without_hmpx() -> None:
    """It names torch's functions, not wrappers."""
    with hmpx.convert(policy=LISTED):
        for name, activation in ACTIVATIONS.items():
            assert b"hmpx" not in pickle.dumps(Holder(activation())), name


def test_state_dicts_hold_what_the_model_holds() -> None:
    """fp32 weights, in a file that torch loads with weights_only."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    stream = io.BytesIO()
    with hmpx.convert():
        model(x()).sum().backward()
        torch.save(model.state_dict(), stream)
        stream.seek(0)
        loaded = torch.load(stream, weights_only=True)
        copied = copy.deepcopy(model)
        copied.load_state_dict(loaded)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded[name], value), name
        assert torch.equal(copied.state_dict()[name], value), name
        assert loaded[name].dtype is value.dtype


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copied_training_run_goes_on_identically(how: str) -> None:
    """Model and optimizer copied in mid-training reach the same weights bit for bit."""

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model(x()), torch.tensor([0, 1, 2])).backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with hmpx.convert():
        run(model, optimizer)
        copied_model, copied_optimizer = COPIES[how]((model, optimizer))
        expected, actual = run(model, optimizer), run(copied_model, copied_optimizer)
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


# --- functions ----------------------------------------------------------------------------------

FUNCTIONS: dict[str, Callable[[], Any]] = {
    "torch.matmul": lambda: torch.matmul,
    "torch.conv2d": lambda: torch.conv2d,
    "torch.linalg.matmul": lambda: torch.linalg.matmul,
    "torch.special.softmax": lambda: torch.special.softmax,
    "torch.cat": lambda: torch.cat,
    "F.linear": lambda: F.linear,
    "F.conv2d": lambda: F.conv2d,
    "F.softmax": lambda: F.softmax,
    "F.layer_norm": lambda: F.layer_norm,
    "F.normalize": lambda: F.normalize,
    "F.cross_entropy": lambda: F.cross_entropy,
    "torch._C._nn.gelu": lambda: torch._C._nn.gelu,
    "Tensor.matmul": lambda: Tensor.matmul,
    "Tensor.__matmul__": lambda: Tensor.__matmul__,
    "Tensor.__rmatmul__": lambda: Tensor.__rmatmul__,
    "Tensor.softmax": lambda: Tensor.softmax,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_patched_functions_are_copied_by_name(name: str) -> None:
    """As torch's own are: a copy is the very object, and elsewhere whatever is there."""
    original = FUNCTIONS[name]()
    with hmpx.convert(policy=LISTED):
        patched = FUNCTIONS[name]()
        for how, copied in COPIES.items():
            assert copied(patched) is patched, how
        blob = pickle.dumps(patched)
        assert b"hmpx" not in blob
        assert patched.__name__ == original.__name__
    assert pickle.loads(blob) == original


def test_a_python_function_from_before_convert_is_refused() -> None:
    """Pickle stores those by name alone, and says that another is there now."""
    original = F.normalize
    with hmpx.convert(policy=LISTED), pytest.raises(pickle.PicklingError, match="not the same"):
        pickle.dumps(original)
    assert pickle.loads(pickle.dumps(original)) is original


# --- processes ----------------------------------------------------------------------------------


class Products(Dataset[Tensor]):
    """Computes with torch where it is indexed, and tells in which dtype."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.matmul(x(), x().t() * (index + 1))


def collated(batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the batch, and a product of its own."""
    stacked = torch.stack(batch)
    return stacked, torch.ones(2, 2) @ torch.ones(2, 2)


def loaded_dtypes(**options: Any) -> list[tuple[torch.dtype, torch.dtype]]:
    loader = DataLoader(Products(), batch_size=2, collate_fn=collated, **options)
    return [(batch.dtype, product.dtype) for batch, product in loader]


POLICY = Policy.from_ops(low=["matmul"])


def convert_in_worker(_: int) -> None:
    hmpx.convert(policy=POLICY)


def test_data_loader_workers_by_fork_are_converted() -> None:
    """A forked worker is converted as its parent was; the parent stays so."""
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("this platform can't fork")
    with hmpx.convert(policy=POLICY):
        assert loaded_dtypes() == [(BF16, BF16)] * 2
        assert loaded_dtypes(num_workers=2, multiprocessing_context="fork") == [(BF16, BF16)] * 2
        with hmpx.disable_casts():
            off = loaded_dtypes(num_workers=1, multiprocessing_context="fork")
        assert off == [(FP32, FP32)] * 2
        assert (x() @ x().t()).dtype is BF16
    assert loaded_dtypes(num_workers=1, multiprocessing_context="fork") == [(FP32, FP32)] * 2


def test_data_loader_workers_by_spawn_convert_for_themselves() -> None:
    """A spawned worker is a fresh process: unconverted, unless worker_init_fn converts it."""
    with hmpx.convert(policy=POLICY):
        options = {"num_workers": 1, "multiprocessing_context": "spawn"}
        assert loaded_dtypes(**options, worker_init_fn=convert_in_worker) == [(BF16, BF16)] * 2
        assert hmpx.is_converted()


def child(queue: Any, model: nn.Module) -> None:
    queue.put((str(model(x()).dtype), hmpx.is_converted()))


def test_a_model_is_handed_to_a_spawned_process() -> None:
    """With the patched functions that it holds; there they are torch's own."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with hmpx.convert(policy=LISTED):
        process = context.Process(target=child, args=(queue, Holder(F.gelu)))
        process.start()
    try:
        assert queue.get(timeout=120) == ("torch.float32", False)
    finally:
        process.join(120)
    assert process.exitcode == 0


# --- threads ------------------------------------------------------------------------------------


def test_two_threads_decide_for_themselves_ten_thousand_times() -> None:
    """One inside disable_casts, one outside, one that switches: never a wrong decision."""
    a, w = torch.ones(1, 1), torch.ones(1, 1)
    barrier, wrong = threading.Barrier(3, timeout=60), []
    switch_interval = sys.getswitchinterval()

    def off() -> None:
        with hmpx.disable_casts():
            barrier.wait()
            wrong.extend(1 for _ in range(5000) if (a @ w).dtype is not FP32)
            wrong.extend(2 for _ in range(5000) if F.linear(a, w).dtype is not FP32)

    def on() -> None:
        barrier.wait()
        wrong.extend(3 for _ in range(5000) if (a @ w).dtype is not BF16)
        wrong.extend(4 for _ in range(5000) if F.linear(a, w).dtype is not BF16)

    def switching() -> None:
        barrier.wait()
        for _ in range(2500):
            with hmpx.disable_casts():
                if (a @ w).dtype is not FP32:
                    wrong.append(5)
            if (a @ w).dtype is not BF16:
                wrong.append(6)

    with hmpx.convert(policy=Policy.from_ops(low=["matmul", "linear"])):
        sys.setswitchinterval(1e-5)
        try:
            with concurrent.futures.ThreadPoolExecutor(3) as pool:
                for future in [pool.submit(f) for f in (off, on, switching)]:
                    future.result()
        finally:
            sys.setswitchinterval(switch_interval)
        assert hmpx.casts_enabled()
    assert wrong == []


def test_gradients_computed_in_threads_are_those_of_one_thread() -> None:
    """A pool of replicas, as DataParallel has it, each with forward and backward (pytorch #54912)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
    replicas = [copy.deepcopy(model) for _ in range(4)]

    def gradients(replica: nn.Module) -> list[Tensor]:
        output = replica(x())
        assert output.dtype is BF16
        F.cross_entropy(output, torch.tensor([0, 1, 2])).backward()
        return [p.grad for p in replica.parameters() if p.grad is not None]

    with hmpx.convert():
        expected = gradients(model)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for actual in pool.map(gradients, replicas):
                assert all(map(torch.equal, actual, expected))
        with hmpx.disable_casts(), concurrent.futures.ThreadPoolExecutor(1) as pool:
            assert pool.submit(lambda: model(x()).dtype).result() is BF16


def test_a_replica_may_switch_casts_off_for_itself() -> None:
    """In a pool as torch.nn.parallel.parallel_apply has it (pytorch #125186)."""
    layers, barrier = [nn.Linear(4, 4) for _ in range(4)], threading.Barrier(4, timeout=60)

    def forward(index: int) -> torch.dtype:
        barrier.wait()
        layer = hmpx.disable_casts()(layers[index]) if index % 2 else layers[index]
        return layer(x()).dtype

    with hmpx.convert(), concurrent.futures.ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            assert list(pool.map(forward, range(4))) == [BF16, FP32, BF16, FP32]


def test_convert_and_revert_while_other_threads_compute() -> None:
    """Each call sees one state or the other, whole; none fails."""
    a, stop, errors = torch.ones(2, 2), threading.Event(), []

    def compute() -> None:
        while not stop.is_set():
            try:
                if (F.linear(a, a) @ a).dtype not in (FP32, BF16):
                    errors.append("dtype")
                F.layer_norm(a, (2,))
            except RuntimeError as error:
                # linear saw the conversion and the product did not: another call, another state
                if "same dtype" not in str(error):
                    errors.append(repr(error))

    threads = [threading.Thread(target=compute) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            hmpx.convert()
            hmpx.revert()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert errors == []


# --- run again ----------------------------------------------------------------------------------


def test_convert_run_again_like_a_notebook_cell() -> None:
    """The same cell changes nothing, an edited one replaces; models made in between follow."""
    first = hmpx.convert(policy=POLICY)
    layer, patched = nn.Linear(4, 4), torch.matmul
    for _ in range(3):
        assert hmpx.convert(policy=POLICY) is first
    assert torch.matmul is patched
    kept = torch.matmul
    assert layer(x()).dtype is FP32
    second = hmpx.convert(policy=Policy.from_ops(low=["linear"]))
    assert second is not first
    assert layer(x()).dtype is BF16
    assert torch.matmul(x(), x().t()).dtype is FP32
    assert kept(x(), x().t()).dtype is FP32
    hmpx.convert(policy=POLICY)
    assert layer(x()).dtype is FP32
    assert torch.matmul(x(), x().t()).dtype is BF16
    hmpx.revert()
    assert torch.matmul(x(), x().t()).dtype is FP32
    hmpx.revert()


def test_wrappers_do_not_pile_up() -> None:
    """After many conversions a call still goes through one wrapper to torch's own function."""
    original = torch.matmul
    policies = [POLICY, Policy.from_ops(low=["matmul", "linear"])]
    for round_ in range(10):
        hmpx.convert(policy=policies[round_ % 2])
    assert torch.matmul.__wrapped__ is original
    hmpx.revert()
    assert torch.matmul is original
