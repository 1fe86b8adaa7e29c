"""A training step of any nn.Module as a CUDA graph: the work of the eager engine in one launch.

PyTorch runs the step once while a graph records it. A replay then does the same work in the memory of the capture, without
Python and without allocation. It reads from the device what changes from step to step: row indices, learning rate, dropout
step. It may be replayed for as long as what the model and the loss have read of Python, and their tensors, are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from onelaunch.capture.changes import Changes
from onelaunch.capture.dependencies import Contexts, Dependencies, Trace, inside
from onelaunch.capture.graph import capturing
from onelaunch.capture.host_draws import no_draws_on_host
from onelaunch.capture.model_state import ModelState
from onelaunch.errors import first_line

Loss = Callable[[Any, torch.Tensor], torch.Tensor]


class CapturedStep:
    """The graph of a step and of the increment of the run's clock, and what it depends on.

    The clock is the position of the run, on the device: the index of the next step in its epoch, and its number in the run.
    `reason` says why the step is not captured (any more).
    """

    def __init__(
        self, model: nn.Module, loss: Loss | None, parameters: Callable[[], Iterable[torch.Tensor]], clock: torch.Tensor,
        contexts: Contexts,
    ) -> None:  # fmt: skip
        self.reason = ""
        self.replays = 0
        self._state = ModelState((model, loss), parameters)
        self._trace = Trace(_forward_and_loss(model, loss))
        self._clock, self._contexts = clock, contexts
        self._graph: torch.cuda.CUDAGraph | None = None
        self._dependencies: Dependencies | None = None
        self._changes = Changes()
        self._changed_by_forward = False  # while it was captured

    @property
    def is_ready(self) -> bool:
        return self._graph is not None

    def carried(self) -> AbstractContextManager[None]:
        """Around a step: what forward puts in the place of a buffer is written into its memory."""
        return self._state.carried()

    def replay(self) -> None:
        assert self._graph is not None
        self._graph.replay()
        self.replays += 1

    def capture(self, body: Callable[[torch.Tensor], None], inputs: tuple[Any, ...], target: torch.Tensor) -> None:
        """Capture `body(clock)`, or set `reason`. `inputs` and `target` are examples of what model and loss get."""
        undo = self._state.undo()
        try:
            dependencies = self._dependencies_for(inputs, target)
            if dependencies is None:
                self.reason = f"what the step depends on is not known: {self._trace.reason}"
                return
            graph = torch.cuda.CUDAGraph()
            with no_draws_on_host(self._state.modules()), capturing(graph):
                with self.carried():
                    body(self._clock)
                self._clock.add_(1)
            if changed := dependencies.change():
                # The first time, Dynamo takes a number that changes for a constant: the next step tries again.
                self.reason = f"forward changes {changed} in every step" if self._changed_by_forward else ""
                self._changed_by_forward = True
            else:
                self._graph, self._dependencies = graph, dependencies
        except Exception as error:  # a user's module may do anything that a capture forbids
            torch.cuda.synchronize(self._clock.device)
            self.reason = f"not captured: {first_line(error)}"
        if not self.is_ready:
            undo()

    def follow_changes(self) -> bool:
        """Between steps: whether the graph was dropped, as what it depends on has changed."""
        if self._dependencies is None or self._dependencies.hold():
            return False
        changed = self._dependencies.change()
        if not changed:
            return False
        self._graph = self._dependencies = None
        if self._changes.are_too_many(self.replays):
            self.reason = f"{changed} changes again and again"
        return True

    def release(self) -> None:
        self._graph = self._dependencies = None

    def _dependencies_for(self, inputs: tuple[Any, ...], target: torch.Tensor) -> Dependencies | None:
        with inside(self._contexts):
            scope = {"args": inputs, "kwargs": {"target": target}}
            return self._trace.dependencies(scope, self._clock.device, self._contexts)


def _forward_and_loss(model: nn.Module, loss: Loss | None) -> Callable[..., Any]:
    """The part of a step that is the user's own."""

    def forward_and_loss(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = model(*args)
        return output if loss is None else loss(output, kwargs["target"])

    return forward_and_loss
