"""The activations in plain PyTorch: the reference for the kernels, and the CPU path."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# Activations whose slope follows from their output: it is saved (the next layer keeps it anyway) instead of the input.
FROM_OUTPUT = ("relu", "leaky_relu", "sigmoid", "tanh")


def exact(tensor: Tensor) -> Tensor:
    """In the type that sums and slopes are taken in: halves lose digits there, and overflow."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def activate(z: Tensor, activation: str | None) -> Tensor:
    match activation:
        case None:
            return z
        case "relu":
            return torch.relu(z)
        case "leaky_relu":
            return F.leaky_relu(z)
        case "sigmoid":
            return torch.sigmoid(z)
        case "tanh":
            return torch.tanh(z)
        case "gelu":
            return F.gelu(z)
        case "gelu_tanh":
            return F.gelu(z, approximate="tanh")
        case "silu":
            return F.silu(z)
    raise ValueError(f"activation={activation!r} is not known")


def activation_gradient(z: Tensor, activation: str | None) -> Tensor:
    """act'(z)"""
    match activation:
        case None:
            return torch.ones_like(z)
        case "relu" | "leaky_relu" | "sigmoid" | "tanh":
            return activation_gradient_from_output(activate(z, activation), activation)
        case "gelu":
            density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
            return 0.5 * (1 + torch.erf(z / math.sqrt(2))) + z * density
        case "gelu_tanh":
            u = math.sqrt(8 / math.pi) * z * (1 + 0.044715 * z * z)
            s, rest = torch.sigmoid(u), torch.sigmoid(-u)  # 1 - s loses digits, most of all in second derivatives
            return s + z * s * rest * math.sqrt(8 / math.pi) * (1 + 3 * 0.044715 * z * z)
        case "silu":
            return torch.sigmoid(z) * (1 + z * torch.sigmoid(-z))
    raise ValueError(f"activation={activation!r} is not known")


def activation_gradient_from_output(a: Tensor, activation: str) -> Tensor:
    """act'(z) from a = act(z)."""
    match activation:
        case "relu":
            return (~(a <= 0)).to(a.dtype)
        case "leaky_relu":
            # where() with two numbers would round 0.01 to float32.
            return torch.full_like(a, 0.01).masked_fill_(a > 0, 1.0)
        case "sigmoid":
            return a * (1 - a)
        case _:
            return 1 - a * a
