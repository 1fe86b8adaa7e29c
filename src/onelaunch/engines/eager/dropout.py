"""Dropout with the masks of `onelaunch.rng` inside any nn.Module, for the duration of an eager run.

The mask of an `nn.Dropout` is a function of (seed, layer, step, row, unit). `layer` is the module's number among the model's
dropout modules in `model.modules()` order; the k-th further call of one module within a step counts as layer
`number + k * (number of dropout modules)`, so that a shared module does not repeat its mask. `row` is the index along the
first dimension, `unit` the index within the rest of the row. `F.dropout` and other kinds of dropout draw from PyTorch's
generator, which the run seeds.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

from onelaunch.rng import dropout_bits, keep_scale, keep_threshold

CHUNK_ELEMENTS = 2**20  # masks are drawn for many steps at once, since a draw takes about 150 small tensor operations


class RunDropout:
    """Replaces the forward of the model's nn.Dropout modules until `release`. Call `begin_step` before each forward.

    `first_row` is the index in the whole batch of the first row passed in: not zero where processes share a batch.
    """

    def __init__(self, model: nn.Module, seed: int, batch_size: int, device: torch.device) -> None:
        # A module whose forward the user has replaced keeps it.
        self.modules = [m for m in model.modules() if type(m) is nn.Dropout and "forward" not in vars(m)]
        self.seed, self.batch_size, self.device = seed, batch_size, device
        self._chunks: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}
        self._calls: dict[int, int] = {}
        self._step: int | torch.Tensor = 0
        self.first_row = 0
        if "torch._dynamo" in sys.modules:  # true where a model is compiled; importing it takes seconds
            # `apply` has state that a trace would freeze, and inductor (2.13, CPU) computes its integers wrongly.
            self.apply = torch.compiler.disable(self.apply)  # type: ignore[method-assign]
        for number, module in enumerate(self.modules):
            module.forward = _Masked(self, module, number)  # type: ignore[method-assign, assignment]

    def begin_step(self, step: int | torch.Tensor) -> None:
        """Set the step of the masks. It may be an int64 scalar on the device, which a captured graph reads at each replay."""
        self._step = step
        self._calls.clear()

    def release(self) -> None:
        for module in self.modules:
            vars(module).pop("forward", None)

    def apply(self, x: torch.Tensor, p: float, number: int) -> torch.Tensor:
        """Dropout of x by the next mask of dropout module `number` in this step."""
        call = self._calls.get(number, 0)
        self._calls[number] = call + 1
        units = x[0].numel() if len(x) else 0
        bits = self._bits(number + call * len(self.modules), len(x), units)
        keep = (bits < keep_threshold(p)).view(x.shape)
        return x * (keep.to(x.dtype) * keep_scale(p))

    def _bits(self, layer: int, rows: int, units: int) -> torch.Tensor:
        """The random bits `[rows, units]` of this step, from `first_row` on."""
        if isinstance(self._step, torch.Tensor):
            return dropout_bits(self.seed, layer, self._step.view(1), rows, units, device=self.device)[0]
        end = self.first_row + rows
        first, chunk = self._chunks.get((layer, units), (0, None))
        if chunk is None or not first <= self._step < first + len(chunk) or chunk.shape[1] < end:
            height = max(end, self.batch_size)
            steps = max(1, CHUNK_ELEMENTS // max(1, height * units))
            first = self._step
            chunk = dropout_bits(self.seed, layer, range(first, first + steps), height, units, device=self.device)
            self._chunks[layer, units] = (first, chunk)
        return chunk[self._step - first, self.first_row : end]


class _Masked:
    """The forward of one nn.Dropout during the run."""

    def __init__(self, owner: RunDropout, module: nn.Dropout, number: int) -> None:
        self.owner, self.module, self.number = owner, module, number

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self.module.training or self.module.p == 0:
            return x
        return self.owner.apply(x, self.module.p, self.number)
