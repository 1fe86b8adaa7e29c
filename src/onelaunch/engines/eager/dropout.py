"""Dropout with the masks of `onelaunch.rng` inside any nn.Module, for the duration of an eager run.

The mask of a dropout is a function of (seed, layer, step, row, unit). `layer` is the module's number among the model's
dropout modules (`nn.Dropout`, and the modules of `ol.nn` that drop) in `model.modules()` order. The calls of `F.dropout`
in the forward of an MLP are numbered after the modules. The k-th further call of one module within a step counts as layer
`number + k * (number of modules and calls)`, so that a shared module does not repeat its mask. `row` is the index along the
first dimension, `unit` the index within the rest of the row. `F.dropout` in other models and other kinds of dropout draw
from PyTorch's generator, which the run seeds.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from onelaunch import nn as fused
from onelaunch.ops.batch_norm import batch_norm_of
from onelaunch.ops.linear import linear
from onelaunch.rng import dropout_bits, keep_scale, keep_threshold
from onelaunch.run.dropouts import dropout_arguments, dropout_modules

CHUNK_ELEMENTS = 2**20  # masks are drawn for many steps at once, since a draw takes about 150 small tensor operations


class RunDropout:
    """Replaces the forward of the model's dropout modules until `release`. Call `begin_step` before each forward.

    `functional` is the number of `F.dropout` calls per forward that `functions()` masks; zero leaves them to PyTorch.
    `first_row` is the index in the whole batch of the first row passed in: not zero where processes share a batch.
    """

    def __init__(self, model: nn.Module, seed: int, batch_size: int, device: torch.device, functional: int = 0) -> None:
        self.modules = dropout_modules(model)  # a module whose forward the user has replaced keeps it
        self._sites, self._functional = len(self.modules) + functional, functional
        self.seed, self.batch_size, self.device = seed, batch_size, device
        self._chunks: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}
        self._calls: dict[int, int] = {}
        self._step: int | torch.Tensor = 0
        self.first_row = 0
        self._is_left_out = False
        if "torch._dynamo" in sys.modules:  # true where a model is compiled; importing it takes seconds
            # `apply` has state that a trace would freeze, and inductor (2.13, CPU) computes its integers wrongly.
            self.apply = torch.compiler.disable(self.apply)  # type: ignore[method-assign]
        for number, module in enumerate(self.modules):
            module.forward = self._masked(module, number)

    def _masked(self, module: nn.Module, number: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """The forward of one dropout module during the run."""

        def forward(x: torch.Tensor) -> torch.Tensor:
            x, p = before_dropout(module, x)
            return self.apply(x, p, number) if module.training and p and not self._is_left_out else x

        return forward

    @contextlib.contextmanager
    def leaving_out(self) -> Iterator[None]:
        """Inside, nothing drops: for Dynamo, to which masks are a secret, and for its guards, which it then asks."""
        self._is_left_out = True
        try:
            yield
        finally:
            self._is_left_out = False

    def begin_step(self, step: int | torch.Tensor) -> None:
        """Set the step of the masks. It may be an int64 scalar on the device, which a captured graph reads at each replay."""
        self._step = step
        self._calls.clear()

    def functions(self) -> contextlib.AbstractContextManager[object]:
        """A context for one forward in training, in which calls of `F.dropout` draw their masks here."""
        return _MaskedFunctions(self) if self._functional else contextlib.nullcontext()

    def release(self) -> None:
        for module in self.modules:
            vars(module).pop("forward", None)

    def apply(self, x: torch.Tensor, p: float, number: int) -> torch.Tensor:
        """Dropout of x by the next mask of dropout module `number` in this step."""
        call = self._calls.get(number, 0)
        self._calls[number] = call + 1
        units = x[0].numel() if len(x) else 0
        bits = self._bits(number + call * self._sites, len(x), units)
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


def before_dropout(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, float]:
    """What a dropout module computes of x before it drops, and its probability."""
    if isinstance(module, fused.Linear):
        return linear(x, module.weight, module.bias, activation=module.activation), module.dropout
    if isinstance(module, fused.BatchNorm1d | fused.BatchNorm2d | fused.BatchNorm3d):
        return batch_norm_of(module, x, module.activation, 0.0), module.dropout
    if isinstance(module, fused.ReLUDropout):
        return torch.relu(x), module.p
    assert isinstance(module, nn.Dropout)
    return x, module.p


class _MaskedFunctions(TorchFunctionMode):
    """Draws the masks of one forward's `F.dropout` calls, numbered in their order after the modules."""

    def __init__(self, owner: RunDropout) -> None:
        super().__init__()
        self.owner, self.next = owner, len(owner.modules)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.dropout or func is torch.dropout:
            x, p, active = dropout_arguments(*args, **(kwargs or {}))
            if not active:
                return x
            number, self.next = self.next, self.next + 1
            return x if p == 0 else self.owner.apply(x, p, number)
        return func(*args, **(kwargs or {}))
