"""`verify=True`: what compiled code computes, compared with plain PyTorch before it is used.

Compilers do compute wrong gradients without an error. The reference is the same program, uncompiled and in float32, without
dropout. Rounding makes every result of a 16-bit program differ from it, so the same program uncompiled in its own types shows
how much rounding alone does.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from onelaunch.capture.dynamo import without_log_breaks
from onelaunch.errors import OnelaunchError
from onelaunch.trial_runs import Undo, copied

log = logging.getLogger("onelaunch")
# Of a tensor's error relative to its norm, in these types: a few times what rounding does in a deep network.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
ROUNDING = 3.0  # times the error of the uncompiled program that are rounding too
SMALL = 1e-3  # of the largest gradient: a smaller one, as of a bias before a batch norm, may be nothing but rounding
DROPOUTS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout,
    torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout,
}  # fmt: skip
DROPOUT_LAYERS = ((nn.modules.dropout._DropoutNd, "p"), (nn.RNNBase, "dropout"), (nn.MultiheadAttention, "dropout"))
Function = Callable[..., Any]
Results = dict[str, torch.Tensor]  # outputs, and gradients by the names of their parameters


class VerificationError(OnelaunchError):
    """Compiled code computes something else than plain PyTorch."""


class _NoDropout(TorchFunctionMode):
    """Functions for dropout return their input, and are counted."""

    calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in DROPOUTS:
            _NoDropout.calls += 1
            return args[0] if args else (kwargs or {})["input"]
        if func is F.scaled_dot_product_attention:
            named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False))
            named |= kwargs or {}
            _NoDropout.calls += bool(named.get("dropout_p"))
            return func(**{**named, "dropout_p": 0.0})
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Inside, layers for dropout and recurrent layers drop nothing: their probabilities are 0."""
    owners = [
        (one, name) for one in model.modules() for kind, name in DROPOUT_LAYERS
        if isinstance(one, kind) and type(vars(one).get(name)) is float
    ]  # fmt: skip
    before = [(one, name, vars(one)[name]) for one, name in owners]
    for one, name, _ in before:
        setattr(one, name, 0.0)
    try:
        yield
    finally:
        for one, name, value in before:
            setattr(one, name, value)


def verify(
    caller: str, model: nn.Module, compiled: Function, plain: Function, args: tuple[Any, ...], kwargs: dict[str, Any],
    contexts: Function = contextlib.nullcontext,
) -> None:  # fmt: skip
    """Raise VerificationError if `compiled` computes other outputs or gradients than `plain`, of the same model.

    model: all modules that the functions call. contexts: what both run in, such as autocast. The modules' buffers and
    attributes, gradients and random generators are afterwards as before; inputs are copied. What else the functions change,
    such as a list, they change in each of these calls. A program whose results depend on other random numbers than those of
    dropout is not compared, which a log line says: compiled code draws others.
    """
    dtype = _computes_in(model, args, kwargs, contexts)

    def run(function: Function, without_functions: bool, *, wide: bool = False) -> Results:
        mine, named = copied((args, kwargs))
        parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
        undo = Undo(model, parameters.values())
        try:
            with (
                _without_dropout(model),
                without_log_breaks(),
                _NoDropout() if without_functions else contextlib.nullcontext(),
            ):
                if wide:
                    return _in_float32(model, function, mine, named)
                with contexts():
                    output = function(*mine, **named)
                return _results(output, parameters)
        finally:
            undo()

    calls = _NoDropout.calls
    rounded = run(plain, True)
    drops = _NoDropout.calls > calls  # else the very code is verified that will run
    with _other_random_numbers():
        again = run(plain, True)
    if any(error > TOLERANCES[dtype] for error in _errors(again, rounded).values()):
        log.warning(
            "%s: verify=True compares nothing, as results depend on random numbers, or on what changes from call to call",
            caller,
        )
        return
    found = run(compiled, drops)
    try:
        exact = run(plain, drops, wide=True)
    except Exception:  # a loss with tensors of its own in another type
        exact = rounded
    _compare(caller, found, rounded, exact, TOLERANCES[dtype])


@contextlib.contextmanager
def _other_random_numbers() -> Iterator[None]:
    """Inside, generators of PyTorch on the host and all GPUs give other numbers; afterwards, those they would have given."""
    with torch.random.fork_rng():
        torch.manual_seed(torch.initial_seed() + 1)
        yield


class _Called(nn.Module):
    """Calls a function of a module as a module that has it."""

    def __init__(self, model: nn.Module, function: Function) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def _in_float32(model: nn.Module, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Results:
    """The results with parameters, buffers and inputs in float32 (or wider), and products in full precision."""

    def widened(value: Any) -> Any:
        half = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
        return value.detach().float().requires_grad_(value.requires_grad) if half else value

    tensors = [(name, widened(one)) for name, one in (*model.named_parameters(), *model.named_buffers())]
    state = {f"model.{name}": one for name, one in tensors}
    parameters = {
        name: one for name, one in tensors if isinstance(one, nn.Parameter) or (one.is_leaf and one.requires_grad)
    }
    args, kwargs = tree_map(widened, (args, kwargs))
    devices = {one.device.type for _, one in tensors}
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, allow_tf32=False))
            for device in devices:
                stack.enter_context(torch.autocast(device, enabled=False))
            output = torch.func.functional_call(_Called(model, function), state, args, kwargs)
        return _results(output, parameters)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _results(output: Any, parameters: Mapping[str, torch.Tensor]) -> Results:
    outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    found = {"the loss" if len(outputs) == 1 and not one.dim() else f"output {i}": one for i, one in enumerate(outputs)}
    differentiated = [one for one in outputs if one.requires_grad]
    if differentiated and parameters:
        generator = torch.Generator(differentiated[0].device).manual_seed(0)
        upstream = [  # the same random numbers in every run; 1 for a loss
            torch.randn(one.shape, generator=generator, device=one.device).to(one.dtype) if one.dim() else torch.ones_like(one)
            for one in differentiated
        ]  # fmt: skip
        gradients = torch.autograd.grad(differentiated, [*parameters.values()], upstream, allow_unused=True)
        zeros = (
            torch.zeros_like(one) if each is None else each
            for each, one in zip(gradients, parameters.values(), strict=True)
        )
        found |= {f"the gradient of {name}": each for name, each in zip(parameters, zeros, strict=True)}
    return {name: one.detach().to(torch.promote_types(one.dtype, torch.float32)).clone() for name, one in found.items()}


def _compare(caller: str, found: Results, rounded: Results, exact: Results, tolerance: float) -> None:
    errors, roundings = _errors(found, exact), _errors(rounded, exact)
    wrong: list[tuple[float, float, str]] = []
    for name, one in exact.items():
        allowed = tolerance + ROUNDING * roundings[name]
        if not errors[name] <= allowed and bool(one.isfinite().all()):  # NaN is wrong too
            wrong.append((errors[name], allowed, name))
    if wrong:
        error, allowed, name = max(wrong, key=lambda each: each[0] if each[0] == each[0] else float("inf"))
        others = f", and {len(wrong) - 1} of {len(exact) - 1} others are wrong too" if len(wrong) > 1 else ""
        remedy = "compile=False" if caller == "train_step" else "the model itself instead of ol.fuse(model)"
        raise VerificationError(
            f"verify=True: compiled, {name} differs by {error:.3g} of its norm from plain PyTorch in float32, and rounding "
            f"explains {allowed:.2g}{others}: use {remedy}"
        )


def _errors(found: Results, exact: Results) -> dict[str, float]:
    """The errors of results, relative to their norms, as far as these are not nothing but rounding."""
    gradients = [float(one.norm()) for name, one in exact.items() if name.startswith("the gradient")]
    floor, tiny = SMALL * max(gradients, default=0.0), torch.finfo(torch.float32).tiny
    scales = {
        name: max(float(one.norm()), floor if name.startswith("the gradient") else 0.0, tiny)
        for name, one in exact.items()
    }
    return {name: float((found[name].to(one.dtype) - one).norm()) / scales[name] for name, one in exact.items()}


def _computes_in(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], contexts: Function) -> torch.dtype:
    """The type with the fewest digits among those of the parameters and inputs, and of autocast inside the contexts."""
    tensors = (*model.parameters(), *tree_leaves((args, kwargs)))
    types = {one.dtype for one in tensors if isinstance(one, torch.Tensor) and one.is_floating_point()}
    with contexts():
        devices = {one.device.type for one in tensors if isinstance(one, torch.Tensor)}
        types |= {torch.get_autocast_dtype(each) for each in devices if torch.is_autocast_enabled(each)}
    return max(types & TOLERANCES.keys(), key=TOLERANCES.__getitem__, default=torch.float32)
