"""Whether the optimizer steps between the batches whose gradients are accumulated for it."""

from __future__ import annotations

import weakref
from typing import Any

import torch


class Window:
    """The batches between two updates. It notices steps of the optimizer that are not ours, while Python runs them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._steps = self._at_begin = 0
        own = weakref.ref(self)  # the optimizer keeps its hooks, and must not keep the step alive

        def count(*_: Any) -> None:
            window = own()
            if window is not None:
                window._steps += 1

        if hasattr(optimizer, "_optimizer_step_post_hooks"):  # not a wrapper that lacks what `Optimizer.__init__` makes
            weakref.finalize(self, optimizer.register_step_post_hook(count).remove)

    def begin(self) -> None:
        self._at_begin = self._steps

    def is_broken(self) -> bool:
        """Whether the optimizer has stepped since the window began. Our own update ends it."""
        return self._steps > self._at_begin
