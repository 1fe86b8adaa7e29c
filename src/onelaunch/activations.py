"""The activations: one entry per function. Argument checks, network parsing, the reference path and the tests derive from them.

The device math of an activation is written once per code generator: Triton (`kernels/tiles.py`), CUDA C++
(`nvrtc/activations.cuh`) and LLVM (`engines/cpu/code/elementwise.py`). CONTRIBUTING.md lists the steps to add one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onelaunch.activation_names import ACTIVATION_NAMES

LEAKY_RELU_SLOPE = 0.01  # PyTorch's default for values below zero
SELU_SCALE = 1.0507009873554805
SELU_ALPHA = 1.6732632423543772
GELU_CUBIC = 0.044715
SOFTPLUS_THRESHOLD = 20.0  # above it PyTorch returns z itself


@dataclass(frozen=True)
class Activation:
    """An elementwise function as PyTorch defines it.

    `derivative` maps z to act'(z), and `derivative_from_output` maps a = act(z) to act'(z). Where the latter exists, a
    backward pass keeps the output (the next layer keeps it anyway) instead of z. Both are differentiable PyTorch code.
    """

    name: str
    module: type[nn.Module]
    functions: tuple[Callable[..., Tensor], ...]
    value: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]
    derivative_from_output: Callable[[Tensor], Tensor] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # the module's attributes that it requires

    @property
    def saves_input(self) -> bool:
        """Whether a backward pass needs z, because the output does not determine the derivative."""
        return self.derivative_from_output is None

    def make_module(self) -> nn.Module:
        """A new module that computes this activation."""
        return self.module(**self.settings)

    def matches(self, module: nn.Module) -> bool:
        """Whether `module` is of exactly this entry's type and has its settings."""
        return type(module) is self.module and all(getattr(module, key) == v for key, v in self.settings.items())


def _relu_from_output(a: Tensor) -> Tensor:
    return (~(a <= 0)).to(a.dtype)  # not `a > 0`: PyTorch's gradient at NaN is 1


def _leaky_relu_from_output(a: Tensor) -> Tensor:
    # where() with two Python numbers would round 0.01 to float32.
    return torch.full_like(a, LEAKY_RELU_SLOPE).masked_fill_(a > 0, 1.0)


def _gelu_derivative(z: Tensor) -> Tensor:
    density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + torch.erf(z / math.sqrt(2))) + z * density


def _gelu_tanh_derivative(z: Tensor) -> Tensor:
    u = math.sqrt(8 / math.pi) * z * (1 + GELU_CUBIC * z * z)
    s, rest = torch.sigmoid(u), torch.sigmoid(-u)  # 1 - s loses digits, most of all in second derivatives
    return s + z * s * rest * math.sqrt(8 / math.pi) * (1 + 3 * GELU_CUBIC * z * z)


def _selu_from_output(a: Tensor) -> Tensor:
    return torch.where(a > 0, torch.full_like(a, SELU_SCALE), a + SELU_SCALE * SELU_ALPHA)


def _mish_derivative(z: Tensor) -> Tensor:
    t = torch.tanh(F.softplus(z))
    return t + z * (1 - t * t) * torch.sigmoid(z)


def _softplus_derivative(z: Tensor) -> Tensor:
    return torch.where(z > SOFTPLUS_THRESHOLD, torch.ones_like(z), torch.sigmoid(z))


def _hardswish_derivative(z: Tensor) -> Tensor:
    inside = z / 3 + 0.5
    return torch.where(z <= -3, torch.zeros_like(z), torch.where(z >= 3, torch.ones_like(z), inside))


def _activation(
    name: str, module: type[nn.Module], functions: tuple[Callable[..., Tensor], ...], *,
    derivative: Callable[[Tensor], Tensor] | None = None, from_output: Callable[[Tensor], Tensor] | None = None,
    **settings: Any,
) -> Activation:  # fmt: skip
    """An entry whose value is `functions[0]` with `settings`; without `derivative`, it is taken from the output."""
    function = functions[0]

    def value(z: Tensor) -> Tensor:
        return function(z, **settings)

    def derivative_by_output(z: Tensor) -> Tensor:
        assert from_output is not None
        return from_output(value(z))

    return Activation(name, module, functions, value, derivative or derivative_by_output, from_output, settings)


ACTIVATIONS: Mapping[str, Activation] = {
    entry.name: entry
    for entry in (
        _activation("relu", nn.ReLU, (torch.relu, F.relu), from_output=_relu_from_output),
        _activation("leaky_relu", nn.LeakyReLU, (F.leaky_relu,), from_output=_leaky_relu_from_output),
        _activation("sigmoid", nn.Sigmoid, (torch.sigmoid, F.sigmoid), from_output=lambda a: a * (1 - a)),
        _activation("tanh", nn.Tanh, (torch.tanh, F.tanh), from_output=lambda a: 1 - a * a),
        _activation("gelu", nn.GELU, (F.gelu,), derivative=_gelu_derivative, approximate="none"),
        _activation("gelu_tanh", nn.GELU, (F.gelu,), derivative=_gelu_tanh_derivative, approximate="tanh"),
        _activation("silu", nn.SiLU, (F.silu,), derivative=lambda z: torch.sigmoid(z) * (1 + z * torch.sigmoid(-z))),
        _activation(
            "elu", nn.ELU, (F.elu,), from_output=lambda a: torch.where(a > 0, torch.ones_like(a), a + 1), alpha=1.0
        ),
        _activation("selu", nn.SELU, (F.selu, torch.selu), from_output=_selu_from_output),
        _activation("mish", nn.Mish, (F.mish,), derivative=_mish_derivative),
        _activation(
            "softplus", nn.Softplus, (F.softplus,), derivative=_softplus_derivative,
            beta=1.0, threshold=SOFTPLUS_THRESHOLD,
        ),
        _activation("hardswish", nn.Hardswish, (F.hardswish,), derivative=_hardswish_derivative),
    )
}  # fmt: skip
assert tuple(ACTIVATIONS) == ACTIVATION_NAMES


def find_activation(module: nn.Module) -> Activation | None:
    """The entry that `module` computes, or None."""
    return next((entry for entry in ACTIVATIONS.values() if entry.matches(module)), None)


def saves_input(name: str | None) -> bool:
    """Whether the backward pass of the activation called `name` (None: no activation) needs the value before it."""
    return name is not None and ACTIVATIONS[name].saves_input


def activate(z: Tensor, name: str | None) -> Tensor:
    """act(z); z itself for None."""
    return z if name is None else ACTIVATIONS[name].value(z)


def activation_gradient(z: Tensor, name: str | None) -> Tensor:
    """act'(z); ones for None."""
    return torch.ones_like(z) if name is None else ACTIVATIONS[name].derivative(z)


def activation_gradient_from_output(a: Tensor, name: str) -> Tensor:
    """act'(z) from a = act(z), for an activation with `saves_input` False."""
    from_output = ACTIVATIONS[name].derivative_from_output
    assert from_output is not None, f"{name} needs its input"
    return from_output(a)
