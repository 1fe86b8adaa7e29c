"""The batches whose gradients are accumulated for one step of the optimizer."""

from __future__ import annotations

import gc
import threading
import weakref

import torch

_windows: weakref.WeakSet[Window] = weakref.WeakSet()  # of all steps that accumulate
_windows_lock = threading.Lock()  # a thread may make a step while another calls one


class StepCounter:
    """A hook that counts an optimizer's steps, as far as Python runs them."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, *_: object) -> None:
        self.steps += 1


class Window:
    """`size` batches between two updates. It notices steps of the optimizer that are not ours, while Python runs them, and
    windows of other steps with the same optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, size: int) -> None:
        self.size = size
        self.batches = 0  # that wait for the optimizer
        self._counter, self._at_begin = StepCounter(), 0
        self._optimizer = weakref.ref(optimizer)
        if size > 1:
            with _windows_lock:
                _windows.add(self)
        if size > 1 and hasattr(optimizer, "_optimizer_step_post_hooks"):  # a wrapper may lack what `Optimizer` makes
            weakref.finalize(self, optimizer.register_step_post_hook(self._counter).remove)

    @property
    def ends(self) -> bool:
        """Whether the optimizer steps after the next batch."""
        return self.batches == self.size - 1

    def begin(self) -> None:
        self._at_begin = self._counter.steps

    def add_batch(self) -> None:
        self.batches = (self.batches + 1) % self.size

    def is_broken(self) -> bool:
        """Whether the optimizer has stepped since the window began. Our own update ends it."""
        return self.batches > 0 and self._counter.steps > self._at_begin

    def other_waits(self) -> bool:
        """Whether another step has gradients that wait for this optimizer. A new window would zero them."""

        def found() -> bool:
            mine = self._optimizer()
            with _windows_lock:
                windows = list(_windows)
            return any(other.batches and other is not self and other._optimizer() is mine for other in windows)

        if not found():
            return False
        gc.collect()  # a step that nobody has any more waits for the collector
        return found()
