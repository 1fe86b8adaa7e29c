"""Linear, activation and dropout in PyTorch ops (the CPU path), and what the op saves for its backward pass."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from onelaunch.activations import activate, activation_gradient, activation_gradient_from_output, saves_input
from onelaunch.ops.dropout import bytes_for, draw_keep, pack, unpack
from onelaunch.ops.widen import widen
from onelaunch.rng import keep_scale

Outputs = tuple[Tensor, Tensor, Tensor]


def linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, keep: Tensor | None, p: float
) -> Tensor:
    """The op's result for a given dropout mask; differentiable."""
    y = activate(F.linear(x, weight, bias), activation)
    return y if keep is None else torch.where(keep, y * keep_scale(p), 0)


def saves_z(activation: str | None) -> bool:
    return saves_input(activation)


def empty_outputs(x: Tensor, weight: Tensor, activation: str | None, p: float, save: bool) -> Outputs:
    """Empty (y, z, keep bits); z and the bits have no elements if the backward pass does not need them."""
    m, n = x.shape[0], weight.shape[0]
    z = torch.empty((m, n) if save and saves_z(activation) else (0, 0), dtype=x.dtype, device=x.device)
    bits = torch.empty(bytes_for(m, n) if p else (0, 0), dtype=torch.uint8, device=x.device)
    return torch.empty((m, n), dtype=x.dtype, device=x.device), z, bits


def forward_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, p: float, save: bool
) -> Outputs:
    y, z, bits = empty_outputs(x, weight, activation, p, save)
    before = F.linear(x, weight, bias)
    value = activate(before, activation)
    if p:
        keep = draw_keep(before, p)
        value = torch.where(keep, value * keep_scale(p), 0)
        bits.copy_(pack(keep & ~(before <= 0) if activation == "relu" else keep))
    y.copy_(value)
    if z.numel():
        z.copy_(before)
    return y, z, bits


def backward_needs(activation: str | None, p: float) -> str:
    """What the backward pass reads besides the gradient and the keep bits: "output", "z" or "nothing"."""
    if activation is None or (activation == "relu" and p):
        return "nothing"
    return "z" if saves_input(activation) else "output"


def backward_reference(
    dy: Tensor, saved: Tensor, bits: Tensor, activation: str | None, p: float
) -> tuple[Tensor, Tensor]:
    dz = widen(dy) * keep_scale(p) if p else widen(dy)
    needs = backward_needs(activation, p)
    if activation is not None and needs == "output":
        dz = dz * activation_gradient_from_output(widen(saved) * (1 - p), activation)
    elif needs == "z":
        dz = dz * activation_gradient(widen(saved), activation)
    if p:
        dz = torch.where(unpack(bits, dy.shape[1]), dz, 0)
    rounded = dz.to(dy.dtype)
    return rounded.clone() if rounded is dy else rounded, dz.sum(0).to(dy.dtype)


def differentiable_backward_reference(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, bits: Tensor, activation: str | None, p: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(dx, dweight, dbias) as functions of dy, x, weight and bias, in ops that can be differentiated again."""
    dz = dy
    if activation is not None:
        dz = (dy * activation_gradient(widen(F.linear(x, weight, bias)), activation)).to(dy.dtype)
    if p:
        dz = torch.where(unpack(bits, weight.shape[0]), dz * keep_scale(p), 0)
    return dz @ weight, dz.t() @ x, None if bias is None else dz.sum(0)
