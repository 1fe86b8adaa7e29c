"""Argument checks that the ops share, the calls that passed them, and the import of kernels on demand."""

from __future__ import annotations

import functools
import importlib
import numbers
from typing import Any

import torch

from onelaunch.activations import ACTIVATIONS
from onelaunch.errors import ArgumentTypeError, OnelaunchError, abbreviate, require_option

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # float64 takes the reference path, on any device


def check_number(argument: str, value: object, expected: str) -> float:
    """`value` as a float; raises an error that asks for `expected` if it is not a number."""
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
        raise ArgumentTypeError(f"{argument}={abbreviate(value)} is not a number: pass {expected}")
    try:
        return float(value)
    except OverflowError:
        raise OnelaunchError(f"{argument}={abbreviate(value)} is out of range: pass {expected}") from None


def check_probability(argument: str, p: object) -> float:
    number = check_number(argument, p, "a probability from 0 to 1")
    if not 0 <= number <= 1:
        raise OnelaunchError(f"{argument}={p} is not a probability: pass a number from 0 to 1")
    return number


def check_activation(activation: object) -> None:
    if activation is not None:
        require_option("activation", activation, ACTIVATIONS, or_else="None for none")


def check_float(argument: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentTypeError(f"{argument} is a {type(tensor).__name__}: pass a torch.Tensor")
    if not tensor.dtype.is_floating_point or tensor.element_size() < 2:
        raise ArgumentTypeError(f"{argument} has dtype {tensor.dtype}: pass float32, float16, bfloat16 or float64")
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind, remedy = (
            ("nested", "to_padded_tensor(0.0)") if tensor.is_nested else (f"of layout {tensor.layout}", "to_dense()")
        )
        raise ArgumentTypeError(f"{argument} is {kind}: pass a dense tensor, such as {argument}.{remedy}")


def check_beside(argument: str, tensor: torch.Tensor | None, name: str, other: torch.Tensor) -> None:
    """Check that `tensor`, unless it is None, is a floating-point tensor on the device of `other`."""
    if tensor is None:
        return
    check_float(argument, tensor)
    if tensor.device != other.device:
        raise OnelaunchError(
            f"{argument} is on {tensor.device} and {name} on {other.device}: move one, as in {argument}.to({name}.device)"
        )


def check_same_dtype(argument: str, tensor: torch.Tensor | None, x: torch.Tensor) -> None:
    if tensor is not None and tensor.dtype != x.dtype:
        raise OnelaunchError(f"{argument} has dtype {tensor.dtype} and x {x.dtype}: cast one, or use torch.autocast")


class KnownCalls:
    """Calls whose arguments passed the checks.

    A call with the same options and the same dtypes, shapes and devices of its tensors need not be checked again. The checks
    take microseconds, as long as the launch.
    """

    MAX_CALLS = 4096

    def __init__(self) -> None:
        self._found: dict[Any, Any] = {}

    def ask(self, tensors: tuple[Any, ...], *options: Any) -> Any:
        """For a known call, what was added with it (True by default). For a new call, the key to `add` once it is checked.

        None, which must not be added, if a tensor is not a tensor or an option cannot be hashed. A compiled call must not ask:
        it would be compiled again whenever an eager call is added.
        """
        try:
            described = [t if t is None else (t.dtype, t.shape, t.get_device()) for t in tensors]
            key = (*described, options, *map(type, options))  # with types, because True == 1.0
            return self._found.get(key, key)
        except (AttributeError, TypeError):
            return None

    def add(self, key: Any, found: Any = True) -> None:
        if len(self._found) >= self.MAX_CALLS:
            self._found.clear()
        self._found[key] = found


@functools.cache
def kernels(name: str) -> Any:
    """The module `onelaunch.kernels.<name>`; the first call imports Triton. An import statement would cost time per call."""
    return importlib.import_module(f"onelaunch.kernels.{name}")
