"""Wrappers that conversions share: in use again, retired again, and never two for one function."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import hmpx
from hmpx import Policy

NOTHING, ONE = Policy.from_ops(), Policy.from_ops(low=["mm"])


#: An op in no list, without a kernel for bf16 on the CPU.
NAME = "matrix_exp"


def convert(policy: Policy = NOTHING) -> hmpx.Session:
    return hmpx.convert(policy=policy, device_types={"cpu"})


def in_slot() -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(torch, NAME)
    return found


def test_the_next_conversion_uses_it_again() -> None:
    """Whatever its policy is; in between it is torch's function by another name."""
    original = in_slot()
    with convert():
        first = in_slot()
        assert first is not original
        with convert(ONE):
            assert in_slot() is first
        assert in_slot() is first
        assert (first.__module__, first.__qualname__) == ("torch", NAME)
    assert in_slot() is original
    assert first.__module__ != "torch"
    with convert(ONE):
        assert in_slot() is first
        assert (first.__module__, first.__qualname__) == ("torch", NAME)
        assert pickle.loads(pickle.dumps(first)) is first
    assert pickle.loads(pickle.dumps(first)) is first


def test_a_kept_one_does_what_is_in_its_slot() -> None:
    """Also while a conversion casts the op, and has another wrapper for it."""
    calls: list[str] = []

    class Told(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            calls.append("wrapper" if hasattr(func, "__hmpx_site__") else "torch's")
            return None

    told = torch.ones(2, 2).as_subclass(Told)
    with convert():
        kept = in_slot()
        kept(told)
    kept(told)
    with convert(Policy.from_ops(fp32=[NAME])):
        assert in_slot() is not kept
        kept(told)
    with convert():
        kept(told)
    assert calls == ["wrapper", "torch's", "wrapper", "wrapper"]
