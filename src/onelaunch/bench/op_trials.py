"""What the cases of ops share: their dtypes, checks against float64, and the steps of their contenders."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from onelaunch.bench.case import Trial, case
from onelaunch.bench.rotation import Step, training_step

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def add_case(name: str, about: str, setup: Callable[..., Trial], *arguments: object) -> None:
    """Register `setup(*arguments)` as a case of the group "ops", whose time is that of a call."""
    case(name, "ops", about, "call")(partial(setup, *arguments))


def close(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    error = ((got.double() - expected).norm() / expected.norm()).item()
    limit = 1e-5 if got.dtype == torch.float32 else 1e-2
    assert error < limit, f"{what} differs from float64 by {error:.1e}"  # also fails on NaN


def close_gradients(
    ours: tuple[torch.Tensor, list[torch.Tensor]],
    exact: tuple[torch.Tensor, list[torch.Tensor]],
    dy: torch.Tensor,
    names: tuple[str, ...] = ("x", "weight", "bias"),
) -> None:
    """Check the gradients of an output with respect to its inputs, called `names`."""
    pairs = zip(torch.autograd.grad(*ours, dy), torch.autograd.grad(*exact, dy.double()), strict=True)
    for what, (mine, other) in zip(names, pairs, strict=True):
        close(mine, other, f"gradient of {what}")


def training_steps(
    ours: Callable[..., torch.Tensor], plain: Callable[..., torch.Tensor], inputs: list[list[torch.Tensor]], dy: torch.Tensor
) -> dict[str, Step]:  # fmt: skip
    functions = {"onelaunch": ours, "torch eager": plain, "torch.compile": torch.compile(plain)}
    return {name: training_step(function, inputs, dy) for name, function in functions.items()}
