"""Wrappers of torch's functions: what `casting` says, with a few identity checks a call.

`make_wrapper` makes, for one call site, the code that decides whether there is anything to cast;
whatever a call does not need was settled when the wrapper was made. Here is what calls do off the
usual path. Knows neither lists nor how wrappers get into torch.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
import types
from collections.abc import Callable, Hashable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from .. import compute, patches, torch_state
from ..casting import (
    TARGET,
    Recipe,
    cast_args,
    converter,
    decided_by,
    floating_inputs,
    is_on_device,
    is_widened,
    target_dtype,
    widest,
    written,
)
from ..compute import (
    SMALL_PRODUCT,
    Accumulation,
    Callee,
    Emulation,
    Lacking,
    Statistics,
    computed_in_fp32,
    inputs_of,
    is_reported_of_all,
    name_of,
    rounded,
)
from ..frames import is_ours
from ..observers import Observer, OpCall, user_location
from ..patching import Patch
from ..policy import INPUT, CastPolicy
from ..tensors import CAST, ELIGIBLE, LOW_DTYPES, SEQUENCES, Args, Kwargs
from ..torch_internals import (
    DisableAutocast,
    DisableTorchFunctionSubclass,
    is_any_autocast_enabled,
    run_when_traced,
    user_hooks,
)
from ..torch_state import disable_casts, is_below_dispatcher, is_off, is_training, partly_off
from . import source

LOGGER: Final = logging.getLogger("hmpx")

#: Runs torch's function, its first argument, on arguments that are cast; last come those given.
Runner = Callable[[Callable[..., Any], Args, Kwargs, Args], Any]


def make_wrapper(
    original: Callable[..., Any], recipe: Recipe, public: Callable[..., Any] | None = None
) -> Callable[..., Any] | None:
    """Returns the wrapper of ``original`` at ``recipe.site.name``; None if no call would ever be cast.

    Args:
        original: torch's function.
        recipe: That of the call site.
        public: What stands under the function's name, if that is another wrapper.
    """
    is_single = not recipe.site.is_python and not recipe.site.parameters.has_several_tensors
    if recipe.is_relative and is_single and not recipe.composes:
        return make_wrapper_where_lacking(original, recipe)
    dtype = recipe.decision.dtype if isinstance(recipe.decision.dtype, torch.dtype) else None

    def cast(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        return cast_args(recipe, args, kwargs)

    settled: set[str] = set()

    def settle(device_type: str) -> None:
        settled.add(device_type)
        cell = _cells(wrapper).get("legalizes")
        if (
            cell is not None and settled >= recipe.device_types
        ):  # elsewhere ``run`` is called in any case
            cell.cell_contents = False

    def is_open(first: Any) -> bool:
        if torch.compiler.is_dynamo_compiling():  # which would guard on what is settled
            return True
        # Beside a tensor of another dtype, the next input decides.
        return getattr(first, "dtype", None) not in ELIGIBLE or first.device.type not in settled

    def override_here(wrapper: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        cast_here = functools.partial(cast_where_on, recipe)
        return override(original, cast_here, public or wrapper, args, kwargs)

    wrapper = source.factory(recipe)(
        original=completed(original, recipe),
        cast=cast,
        run=_runner(recipe, settle, settled),
        is_large=_size_test(recipe),
        retry=functools.partial(_retry_in_fp32, recipe, original),
        override=override_here,
        dtype=dtype,
        other_dtypes=ELIGIBLE - {dtype},
        convert=None if dtype is None else converter(recipe, dtype),
        device_types=recipe.device_types,
        is_autocast_on=is_any_autocast_enabled,
        narrowed=_narrower(
            original, recipe, lambda others: make_wrapper(original, others, public=wrapper)
        ),
        is_open=is_open,
        legalizes=recipe.legalizes,
    )
    return named_after(original, wrapper, recipe.site.name)


def _narrower(
    original: Callable[..., Any],
    recipe: Recipe,
    make: Callable[[Recipe], Callable[..., Any] | None],
) -> Callable[[], Callable[..., Any] | None]:
    """Returns what finds the wrapper for the device types whose casts are on; None where all are."""
    made: dict[frozenset[str], Callable[..., Any]] = {}

    def narrowed() -> Callable[..., Any] | None:
        off = partly_off()
        if not off:
            return None
        if off not in made:
            made[off] = make(_without(recipe, off)) or original
        return made[off]

    run_when_traced(narrowed)
    return narrowed


def _without(recipe: Recipe, off: frozenset[str]) -> Recipe:
    return dataclasses.replace(recipe, device_types=recipe.device_types - off, is_narrowed=True)


def cast_where_on(recipe: Recipe, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Returns the arguments cast as `cast_args` does, on device types whose casts are on.

    Where the result is to have the dtype that an input is given in they are left to the call that
    computes, which must still see it.
    """
    if recipe.returns_input_dtype:
        return args, kwargs
    off = partly_off() if recipe.narrows else None
    return cast_args(_without(recipe, off) if off else recipe, args, kwargs)


def make_completed_wrapper(callee: Callee, lacking: Lacking, where: str) -> Callable[..., Any]:
    """Returns the wrapper of an op that nothing casts: it computes in fp32 where a kernel is lacking."""
    original, complete = callee.function, compute.completed(callee, lacking)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if source.is_overridden(args, kwargs):
            return override(original, _cast_nothing, wrapper, args, kwargs)
        return complete(*args, **kwargs)

    return named_after(original, wrapper, where)


def make_wrapper_where_lacking(
    original: Callable[..., Any], recipe: Recipe
) -> Callable[..., Any] | None:
    """Returns the wrapper of a function that nothing casts; None if it lacks no kernel either."""
    if recipe.site.lacking is None:
        return None
    return make_completed_wrapper(_callee(original, recipe), recipe.site.lacking, recipe.site.name)


def completed(original: Callable[..., Any], recipe: Recipe) -> Callable[..., Any]:
    """Returns ``original``, such that it computes in fp32 where its kernel is lacking."""
    if recipe.site.lacking is None:
        return original
    return compute.completed(_callee(original, recipe), recipe.site.lacking)


def _callee(original: Callable[..., Any], recipe: Recipe) -> Callee:
    return Callee(
        recipe.site.op,
        original,
        recipe.site.parameters.names,
        frozenset(recipe.site.writes),
        recipe.site.is_python,
        recipe.facts.is_random,
        recipe.facts.promotes,
    )


def override(
    original: Callable[..., Any],
    cast: Callable[[Args, Kwargs], tuple[Args, Kwargs]],
    wrapper: Callable[..., Any],
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Returns what the ``__torch_function__`` of a mode or an argument makes of a call of ``wrapper``.

    It is handed what stands under the function's name now, and the arguments as they came: what it
    calls in turn is cast. But a class that says by ``__torch_dispatch__`` how it computes is a tensor
    to be cast.
    """
    relevant = _values(args, kwargs)
    if not is_off() and any(_is_tensor_by_dispatch(value) for value in relevant):
        with DisableTorchFunctionSubclass():
            args, kwargs = cast(args, kwargs)
        relevant = _values(args, kwargs)
    if isinstance(original, types.FunctionType):
        return _override_python(original, wrapper, relevant, args, kwargs)
    if not isinstance(original, types.BuiltinFunctionType):  # methods are looked up by torch too
        return original(*args, **kwargs)
    return handle_torch_function(wrapper, relevant, *args, **kwargs)


def _override_python(
    original: Callable[..., Any],
    wrapper: Callable[..., Any],
    relevant: list[Any],
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Returns what a mode or an argument makes of a call of ``wrapper``, whose function is Python's.

    Called as it is, such a function may hand over itself, which casts nothing, rather than what stands
    under its name; or go on to what it calls, which would be cast op by op.
    """
    if not source.hands_over(original):
        return original(*args, **kwargs)
    if "NotImplemented" not in original.__code__.co_names:
        return handle_torch_function(wrapper, relevant, *args, **kwargs)
    try:  # operators let the other operand try
        return handle_torch_function(wrapper, relevant, *args, **kwargs)
    except TypeError:
        return NotImplemented


def _values(args: Args, kwargs: Kwargs) -> list[Any]:
    found: list[Any] = []
    for value in (*args, *kwargs.values()):
        found.extend(value if isinstance(value, SEQUENCES) else [value])
    return found


def _is_tensor_by_dispatch(value: Any) -> bool:
    own = Tensor.__torch_dispatch__
    return isinstance(value, Tensor) and type(value).__torch_dispatch__ is not own


_retried: set[tuple[str, torch.dtype | None]] = set()


def _retry_in_fp32(
    recipe: Recipe, original: Callable[..., Any], error: Exception, args: Args, kwargs: Kwargs
) -> Any:
    """Returns the call's result computed in fp32 from inputs rounded as ever, and rounded itself.

    Raises:
        Exception: What the call raises in fp32, as it does without casts; ``error`` where a half-done
            in-place update can't be ruled out, where the call has no low-precision input, where
            a hook has raised it, or where memory is exhausted, of which fp32 takes more.
    """
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    if written(recipe, args, kwargs) is not None or _is_from_hook(error):
        raise error
    given = floating_inputs(recipe, args, kwargs)
    args, kwargs = cast_args(recipe, args, kwargs)
    statistics = _statistics(recipe)
    if statistics is not None:
        original, args, kwargs = statistics.set_apart(original, args, kwargs)
    inputs = floating_inputs(recipe, args, kwargs)
    if not any(t.dtype in LOW_DTYPES for t in inputs):
        raise error
    dtype = inputs[0].dtype
    try:
        with disable_casts():
            result = computed_in_fp32(original, args, kwargs, dtype)
    except Exception as same:
        raise same from None
    output = recipe.decision.output_dtype
    if output is not None:
        output = given[0].dtype if output == INPUT else output
        result = rounded(result, CAST[output], dtype)
    if (recipe.site.op, dtype) not in _retried:
        _retried.add((recipe.site.op, dtype))
        LOGGER.warning("%s runs in fp32 and is rounded: %s", recipe.site.op, error)
    return result


def _is_from_hook(error: Exception) -> bool:
    """Whether a saved-tensor hook may have raised ``error``: to stop a checkpoint's recomputation, say.

    Kernels raise where hmpx calls them, with no function of Python's in between.
    """
    if user_hooks() is None:
        return False
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is None or not is_ours(traceback.tb_frame.f_globals.get("__name__"))


def make_observed_wrapper(
    original: Callable[..., Any], recipe: Recipe, observers: tuple[Observer, ...]
) -> Callable[..., Any]:
    """Returns a wrapper that casts as `make_wrapper`'s does and tells ``observers`` each call."""
    complete = completed(original, recipe)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if recipe.site.is_overridable and source.is_overridden(args, kwargs):
            cast_here = functools.partial(cast_where_on, recipe)
            return override(original, cast_here, wrapper, args, kwargs)
        if is_off() or is_below_dispatcher():
            return complete(*args, **kwargs)
        if narrowed is not None and (others := narrowed()) is not None:
            return others(*args, **kwargs)
        if is_autocast_on():
            with DisableAutocast():
                return wrapper(*args, **kwargs)
        dtype = target_dtype(recipe, args, kwargs)
        new_args, new_kwargs = cast(args, kwargs)
        try:
            if recipe.casts_late:
                result = run(complete, args, kwargs, args)
            else:
                result = run(complete, new_args, new_kwargs, args)
        except Exception as error:
            if not recipe.is_retried:
                raise
            result = retry(error, args, kwargs)
        before = floating_inputs(recipe, args, kwargs)
        after = floating_inputs(recipe, new_args, new_kwargs)
        outputs: list[Tensor] = []
        _collect_any(result, outputs)
        if not before:
            return result  # there was nothing to decide
        # What torch's kernel does by itself.
        if recipe.facts.promotes and recipe.target is not None:
            dtype = before[0].dtype
        elif recipe.facts.promotes and recipe.decision.cast_policy is CastPolicy.WIDEST:
            dtype = widest(before)
        elif dtype is None and is_widened(recipe, before):
            dtype = torch.float32
        cast_bytes = 0
        if not torch.compiler.is_dynamo_compiling():  # where sizes may be symbols
            for a, b in zip(before, after, strict=True):
                cast_bytes += b.numel() * b.element_size() if a.dtype is not b.dtype else 0
        tell(
            dtype,
            tuple([t.dtype for t in before]),
            tuple([t.dtype for t in after]),
            tuple([t.dtype for t in outputs]),
            before[0].device.type,
            cast_bytes,
            *decided_by(recipe, args, kwargs),
        )
        return result

    run = _runner(recipe, settle=_tell_nobody)
    is_autocast_on = is_any_autocast_enabled
    narrowed = None
    if recipe.narrows:
        narrowed = _narrower(
            original, recipe, lambda others: make_observed_wrapper(original, others, observers)
        )

    def cast(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        return cast_args(recipe, args, kwargs)

    def retry(error: Exception, args: Args, kwargs: Kwargs) -> Any:
        return _retry_in_fp32(recipe, original, error, args, kwargs)

    def tell(  # noqa: PLR0917  # torch.compile passes constants by position
        dtype: torch.dtype | None,
        input_dtypes: tuple[torch.dtype, ...],
        cast_dtypes: tuple[torch.dtype, ...],
        output_dtypes: tuple[torch.dtype, ...],
        device_type: str | None,
        cast_bytes: int,
        cast_policy: str,
        reason: str,
    ) -> None:
        call = OpCall(
            op=recipe.site.op,
            site=recipe.site.name,
            function=original,
            cast_policy=cast_policy,
            reason=reason,
            dtype=dtype
            if recipe.emulation is None or dtype is None or cast_policy == TARGET
            else recipe.emulation.format,
            input_dtypes=input_dtypes,
            cast_dtypes=cast_dtypes,
            output_dtypes=output_dtypes,
            device_type=device_type,
            cast_bytes=cast_bytes,
            module=torch_state.place().path,
            location=user_location(),
        )
        for observer in observers:
            observer(call)

    run_when_traced(tell)
    return named_after(original, wrapper, recipe.site.name)


#: Dotted name of a slot -> the wrapper that is in it.
_in_force: Mapping[str, Callable[..., Any]] = {}


def in_force(wrappers: Iterable[Callable[..., Any]]) -> Patch:
    """Returns the patch by which wrappers of earlier conversions pass their calls to ``wrappers``."""
    sites = {vars(wrapper)["__hmpx_site__"]: wrapper for wrapper in wrappers}
    return Patch(sys.modules[__name__], "_in_force", sites)


@dataclass(frozen=True, slots=True)
class Retirement:
    """Has a wrapper act as what is in its slot from now on, wherever a reference to it was kept.

    Attributes:
        wrapper: The wrapper.
        value: Its name, and what its cells hold, once it is retired.
    """

    wrapper: Callable[..., Any]
    value: tuple[str, str, Mapping[str, Any]]
    is_foreign = False
    stays_idle = True

    @property
    def key(self) -> Hashable:
        """What tells the wrapper from others."""
        return id(self.wrapper), "retirement"

    @property
    def where(self) -> str:
        """The slot's name."""
        return str(vars(self.wrapper)["__hmpx_site__"])

    def read(self) -> tuple[str, str, Mapping[str, Any]]:
        """Returns the wrapper's name, and what those of its cells hold."""
        wrapper, cells = self.wrapper, _cells(self.wrapper)
        contents = {name: cells[name].cell_contents for name in self.value[2]}
        return wrapper.__module__, wrapper.__qualname__, contents

    def write(self, value: tuple[str, str, Mapping[str, Any]]) -> None:
        """Gives the wrapper this name, and its cells these contents."""
        wrapper, cells = self.wrapper, _cells(self.wrapper)
        wrapper.__module__, wrapper.__qualname__, contents = value
        for name, content in contents.items():
            cells[name].cell_contents = content


def retirement(wrapper: Callable[..., Any]) -> Retirement:
    """Returns what retires ``wrapper``."""
    site, original = vars(wrapper)["__hmpx_site__"], vars(wrapper)["__wrapped__"]

    def forward(*args: Any, **kwargs: Any) -> Any:
        current = _in_force.get(site)
        # Not to a wrapper of what somebody else has put there since: that may call this one.
        is_same = current is not None and vars(current)["__wrapped__"] is original
        return (current if current is not None and is_same else original)(*args, **kwargs)

    def forward_overridden(wrapper: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        return forward(*args, **kwargs)

    retired = {
        "original": forward,
        "complete": forward,
        "override": forward_overridden,
        "cast": _cast_nothing,
        "run": _run,
        "retry": _raise,
        "other_dtypes": frozenset(),
        "choose": lambda args, kwargs: forward,
        "legalizes": False,
        "is_autocast_on": bool,
        "narrowed": _nothing,
        "tell": _tell_nobody,
    }
    contents = {name: retired[name] for name in _cells(wrapper) if name in retired}
    return Retirement(wrapper, (*patches.retired_name(wrapper, site), contents))


def _cells(wrapper: Callable[..., Any]) -> dict[str, types.CellType]:
    """Returns the closure's cells by name."""
    function: Any = wrapper
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def _size_test(recipe: Recipe) -> Callable[[Any, Any], bool]:
    """Returns what says whether the product of two matrices may have to be legalized."""
    if recipe.options.legalize == "always":
        return _always
    leaves_inference = _inference_test("gemv", recipe)
    is_fast = recipe.options.legalize == "fast"

    def is_large(a: Any, b: Any) -> bool:
        if torch.compiler.is_dynamo_compiling():
            return True  # comparing sizes would set guards
        try:
            size, columns = a.numel(), a.shape[-1]
            if type(size) is not int:
                return True  # torch.jit.trace has tensors for sizes, graphs have symbols
            if size * b.numel() <= SMALL_PRODUCT * columns:
                return is_fast and compute.is_watched()
        except (AttributeError, IndexError, RuntimeError):
            return True  # no matrices; nested tensors have no sizes
        return size > 2 * columns or not leaves_inference(b) or compute.is_traced()

    return is_large


def _inference_test(kind: str, recipe: Recipe) -> Callable[[Any], bool]:
    """Returns what says whether a call is left to torch's kernels, since it does not count as training.

    Of its first argument, where the recipe has no dtype. What a device does is measured when asked for.
    """
    if recipe.options.legalize == "always" or recipe.device_types != {"cpu"}:
        return _never
    known = recipe.decision.dtype if recipe.is_low else None
    is_fast = recipe.options.legalize == "fast"

    def leaves_inference(first: Any) -> bool:
        if is_training() or (is_fast and compute.is_watched()):
            return False
        dtype = getattr(first, "dtype", None) if known is None else known
        if dtype not in LOW_DTYPES:
            return False
        return not compute.is_slow_in_inference(kind, dtype)

    return leaves_inference


def _never(first: Any) -> bool:
    return False


def _always(*args: object) -> bool:
    return True


def _runner(
    recipe: Recipe, settle: Callable[[str], None], settled: AbstractSet[str] = frozenset()
) -> Runner:
    """Returns what runs the op: of torch's function, the arguments cast, and those as given.

    Args:
        recipe: That of the call site.
        settle: Called with a device type on which nothing but the function need be called from now on.
        settled: The device types that it was called with.
    """
    run: Runner = _run
    if recipe.site.is_python:
        run = _run_atomically
    elif recipe.facts.norm_parameters:
        run = functools.partial(_run_norm, recipe)
    if recipe.emulation is not None:
        run = _emulated(recipe, recipe.emulation, run)
    else:
        if recipe.legalizes:
            run = _legalized(recipe, run, settle, settled)
        if recipe.composes:
            run = _composed(recipe, run)
    statistics = _statistics(recipe)
    return run if statistics is None else _beside(statistics, recipe, run)


def _statistics(recipe: Recipe) -> Statistics | None:
    """Returns the running statistics of a norm, if it has any."""
    if not recipe.site.statistics:
        return None
    position = {name: position for position, name in enumerate(recipe.site.parameters.names)}
    updates_if = recipe.facts.updates_if
    return Statistics(
        positions={name: position[name] for name in recipe.site.statistics},
        parameters={name: position[name] for name in sorted(recipe.facts.norm_parameters)},
        first=recipe.site.parameters.names[0],
        updates_if=None if updates_if is None else (updates_if, position[updates_if]),
        mixed_device_types=recipe.facts.mixed_device_types,
    )


def _beside(statistics: Statistics, recipe: Recipe, run: Runner) -> Runner:
    """Returns what does ``run`` without the running statistics, which its function gets all the same."""
    # They are not cast then, and kernels take them.
    passes_fp32 = not recipe.composes and recipe.emulation is None and recipe.takes_fp32_statistics

    def run_beside(function: Callable[..., Any], args: Args, kwargs: Kwargs, given: Args) -> Any:
        if not (passes_fp32 and statistics.are_fp32(args, kwargs)):
            function, args, kwargs = statistics.set_apart(function, args, kwargs)
        return run(function, args, kwargs, given)

    return run_beside


def _legalized(
    recipe: Recipe, run: Runner, settle: Callable[[str], None], settled: AbstractSet[str]
) -> Runner:
    """Returns what runs the op in fp32 with rounded inputs and outputs, where ``run`` is slow."""
    legalizer = compute.Legalizer(
        recipe.site.op, recipe.facts.kind, recipe.facts.first_matrix, recipe.options.legalize
    )
    casts_late, device_types = recipe.casts_late, recipe.device_types
    may_write = recipe.may_write
    leaves_inference = (
        _never
        if recipe.facts.first_matrix is not None
        else _inference_test(recipe.facts.kind, recipe)
    )

    def run_legalized(function: Callable[..., Any], args: Args, kwargs: Kwargs, given: Args) -> Any:
        if (
            leaves_inference(args[0] if args else None)
            or is_below_dispatcher()
            or ((may_write or kwargs) and written(recipe, args, kwargs) is not None)
        ):
            return run(function, *_cast_late(recipe, args, kwargs), given)
        is_cast = not casts_late or args is not given
        # Beside a sparse input the others have its dtype.
        if not is_cast and target_dtype(recipe, args, kwargs) not in LOW_DTYPES:
            return run(function, *_cast_late(recipe, args, kwargs), given)
        inputs = inputs_of(args, kwargs)
        if inputs is None or inputs.first.device.type not in device_types:
            return run(function, *_cast_late(recipe, args, kwargs), given)
        device_type = inputs.first.device.type
        if not torch.compiler.is_dynamo_compiling() and device_type in settled:
            return run(function, *_cast_late(recipe, args, kwargs), given)
        dtype = None if inputs.low is None else inputs.low.dtype
        if casts_late and isinstance(recipe.decision.dtype, torch.dtype):
            dtype = recipe.decision.dtype
        is_beside_sparse = is_cast and not inputs.is_plain and recipe.is_low
        if dtype is None or (
            is_beside_sparse and target_dtype(recipe, args, kwargs) not in LOW_DTYPES
        ):
            return run(function, *_cast_late(recipe, args, kwargs), given)
        if not legalizer.applies(inputs, args, kwargs, dtype):
            if (
                recipe.options.legalize != "always"
                and recipe.is_low
                and not compute.is_traced()
                and not compute.is_exported()
                and not compute.is_slow(recipe.facts.kind, name_of(inputs.first.device), dtype)
                and is_reported_of_all(device_type, dtype)
            ):
                settle(device_type)
            return run(function, *_cast_late(recipe, args, kwargs), given)
        if run is not _run:
            function = functools.partial(_run_with, run, function, given)
        elif not kwargs:
            result = legalizer.compute_convolution(function, inputs, args, dtype)
            if result is not None:
                return result
        if not is_cast and recipe.options.legalize != "fast":
            args, kwargs = cast_args(recipe, args, kwargs)
        elif not is_cast and compute.is_watched():
            compute.note_unrounded(recipe.site.op, _to_be_cast(recipe, args, kwargs))
        return legalizer.compute(function, inputs, args, kwargs, given, dtype)

    return run_legalized


def _emulated(recipe: Recipe, emulation: Emulation, run: Runner) -> Runner:
    """Returns what runs the op in a number format."""

    def run_emulated(function: Callable[..., Any], args: Args, kwargs: Kwargs, given: Args) -> Any:
        if target_dtype(recipe, args, kwargs) is None or written(recipe, args, kwargs) is not None:
            return run(function, args, kwargs, given)
        if not is_on_device(recipe, args, kwargs):
            return run(function, args, kwargs, given)
        wrapped = functools.partial(_run_with, run, function, given)
        return emulation.compute(wrapped, args, kwargs)

    return run_emulated


def _composed(recipe: Recipe, run: Runner) -> Runner:
    """Returns what runs the op in its ``accumulate_dtype``, and casts what ``run`` returns."""
    decision = recipe.decision

    def ending_in(output: torch.dtype | None) -> Accumulation:
        return Accumulation(
            recipe.site.op,
            recipe.facts.kind,
            recipe.facts.casts_first,
            decision.accumulate_dtype,
            output,
        )

    output = decision.output_dtype
    accumulation = ending_in(None if output == INPUT else output)
    by_input = {each: ending_in(each) for each in ELIGIBLE} if recipe.returns_input_dtype else {}
    is_widest = decision.cast_policy is CastPolicy.WIDEST
    casts_here = recipe.returns_input_dtype and not recipe.legalizes

    def run_composed(function: Callable[..., Any], args: Args, kwargs: Kwargs, given: Args) -> Any:
        if is_below_dispatcher() or written(recipe, args, kwargs) is not None:
            cast, kwargs = cast_args(recipe, args, kwargs) if casts_here else (args, kwargs)
            return run(function, cast, kwargs, given)
        if kwargs.get("dtype") is not None or torch.dtype in map(type, args):
            cast, kwargs = cast_args(recipe, args, kwargs) if casts_here else (args, kwargs)
            return run(function, cast, kwargs, given)  # its output is as asked for
        cast = args
        first = floating_inputs(recipe, args, kwargs)[:1] if by_input else []
        if recipe.casts_late:
            cast, kwargs = cast_args(recipe, args, kwargs)
        inputs = floating_inputs(recipe, cast, kwargs)
        if not inputs or any([t.dtype not in ELIGIBLE for t in inputs]):  # noqa: C419
            return run(function, cast, kwargs, given)
        if not is_on_device(recipe, cast, kwargs):
            return run(function, cast, kwargs, given)
        known = inputs_of(cast, kwargs)
        if known is None:  # all are in lists of lists, which are not raised
            return run(function, cast, kwargs, given)
        wrapped = functools.partial(_run_with, run, function, given)
        dtype = widest(inputs) if is_widest else inputs[0].dtype
        ending = by_input[first[0].dtype] if first else accumulation
        return ending.compute(wrapped, known, cast, kwargs, given, dtype)

    return run_composed


def _run(function: Callable[..., Any], args: Args, kwargs: Kwargs, given: Args) -> Any:
    return function(*args, **kwargs)


def _run_with(
    run: Runner,
    function: Callable[..., Any],
    given: Args,
    *args: Any,
    **kwargs: Any,
) -> Any:
    return run(function, args, kwargs, given)


def _cast_late(recipe: Recipe, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    return cast_args(recipe, args, kwargs) if recipe.casts_late else (args, kwargs)


def _to_be_cast(recipe: Recipe, args: Args, kwargs: Kwargs) -> list[Tensor]:
    """Returns the inputs that ``recipe`` casts."""
    given = floating_inputs(recipe, args, kwargs)
    cast = floating_inputs(recipe, *cast_args(recipe, args, kwargs))
    return [a for a, b in zip(given, cast, strict=True) if a is not b]


def _run_atomically(function: Callable[..., Any], args: Args, kwargs: Kwargs, given: Args) -> Any:
    """Runs a Python function: what it calls is not cast again."""
    with disable_casts():
        return function(*args, **kwargs)


def _run_norm(
    recipe: Recipe, function: Callable[..., Any], args: Args, kwargs: Kwargs, given: Args
) -> Any:
    """Runs a norm, in fp32 where ONNX is to hold it, which takes no fp32 weights beside bf16.

    The kernels that do take them compute in fp32 too, and round the same result.
    """
    onnx = sys.modules.get("torch.onnx")
    if onnx is not None and onnx.is_in_onnx_export():
        dtype = floating_inputs(recipe, args, kwargs)[0].dtype
        if dtype in LOW_DTYPES:
            return computed_in_fp32(function, args, kwargs, dtype)
    return function(*args, **kwargs)


def _raise(error: Exception, args: Args, kwargs: Kwargs) -> Any:
    raise error


def _nothing() -> None:
    return None


def _tell_nobody(*args: object) -> None:
    pass


def _cast_nothing(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    return args, kwargs


def named_after(
    original: Callable[..., Any], wrapper: Callable[..., Any], site: str
) -> Callable[..., Any]:
    """Gives ``wrapper`` the name by which it can be imported, so that it can be pickled."""
    module, _, name = site.rpartition(".")
    if module == "torch.Tensor":
        module, name = "torch", f"Tensor.{name}"
    wrapper.__module__ = module
    wrapper.__name__ = getattr(original, "__name__", name)
    wrapper.__qualname__ = name
    wrapper.__doc__ = original.__doc__
    wrapper.__wrapped__ = original  # type: ignore[attr-defined]
    wrapper.__hmpx_site__ = site  # type: ignore[attr-defined]
    return wrapper


def _collect_any(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, SEQUENCES):
        for item in value:
            _collect_any(item, found)
