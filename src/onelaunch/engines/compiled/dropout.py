"""Dropout with the masks of `onelaunch.rng` as one operation that `torch.compile` does not look into.

The mask of an element is a function of (seed, layer, step, row, unit), so the backward pass computes it again and nothing is
saved. The step is read from the device: a captured graph draws anew in every replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from onelaunch.engines.eager.dropout import RunDropout, before_dropout
from onelaunch.rng import dropout_bits, keep_scale, keep_threshold, signed_seed


@torch.library.custom_op("onelaunch::run_dropout", mutates_args=(), device_types="cpu")
def run_dropout(x: Tensor, step: Tensor, seed: int, layer: int, p: float) -> Tensor:
    """x with dropout of probability p. `step`: an int64 scalar; `seed`: as `signed_seed` gives it; rows: x's first axis."""
    units = x[0].numel() if len(x) else 0
    bits = dropout_bits(seed % 2**64, layer, step.view(1), len(x), units, device=x.device)[0]
    keep = (bits < keep_threshold(p)).view(x.shape)
    return x * (keep.to(x.dtype) * keep_scale(p))


@run_dropout.register_kernel("cuda")
def _(x: Tensor, step: Tensor, seed: int, layer: int, p: float) -> Tensor:
    from onelaunch.engines.compiled.dropout_kernel import dropout

    x = x.contiguous()
    y = torch.empty_like(x)
    dropout(x, y, step, seed, layer, p)
    return y


@run_dropout.register_fake
def _(x: Tensor, step: Tensor, seed: int, layer: int, p: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, step, *ctx.options = inputs
    ctx.save_for_backward(step)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return run_dropout(dy, *ctx.saved_tensors, *ctx.options), None, None, None, None


run_dropout.register_autograd(_backward, setup_context=_setup)


class CompiledDropout(RunDropout):
    """Replaces the forward of the model's dropout modules by functions that `torch.compile` can capture.

    Every module must be called at most once per forward pass.
    """

    def __init__(self, model: nn.Module, seed: int, batch_size: int, device: torch.device) -> None:
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        super().__init__(model, seed, batch_size, device)

    def begin_step(self, step: int | Tensor) -> None:
        super().begin_step(step)
        self.step.copy_(step if isinstance(step, Tensor) else torch.tensor(step))

    def _masked(self, module: nn.Module, number: int) -> Callable[[Tensor], Tensor]:
        seed = signed_seed(self.seed)

        def forward(x: Tensor) -> Tensor:
            x, p = before_dropout(module, x)
            return run_dropout(x, self.step, seed, number, p) if module.training and p else x

        return forward
