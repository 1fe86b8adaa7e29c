"""A CUDA graph on a CPU: the operations of one step, and the very memory that they read and wrote.

Like a graph, a replay runs no Python of the model: it reads and writes that memory, whatever the model has now.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import onelaunch as ol
from onelaunch.step.capturable_optimizer import CapturableOptimizer
from onelaunch.step.plain_step import PlainStep
from onelaunch.step.recordings import Recordings
from tests.conftest import LOSS_TOLERANCE, WEIGHT_TOLERANCE
from tests.reference import assert_same_course, assert_same_weights


def alias(value: Any) -> Any:
    """The same memory: another tensor may take the place of this one in a module, or it in another memory."""
    return value.detach() if isinstance(value, Tensor) else value


def memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def tensors_in(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor | None]]] = []
        self._before: dict[int, tuple[Any, Any]] = {}  # memory that was there before the recording, and a copy of it

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, named = tree_map(alias, args), tree_map(alias, kwargs or {})
        inputs = {memory(one): one for one in tensors_in((args, kwargs))}
        for place, one in inputs.items():
            if place not in self._before and one.layout is torch.strided:
                self._before[place] = one.untyped_storage(), one.untyped_storage().clone()
        result = function(*args, **(kwargs or {}))
        made = [None if memory(one) in inputs else alias(one) for one in tensors_in(result)]
        self.calls.append((function, given, named, made))
        return result

    def undo(self) -> None:
        """As if nothing had run."""
        for storage, copied in self._before.values():
            storage.copy_(copied)
        self._before.clear()

    @torch.no_grad()
    def replay(self) -> None:
        for function, args, kwargs, made in self.calls:
            for place, value in zip(made, tensors_in(function(*args, **kwargs)), strict=True):
                if place is not None:
                    place.copy_(value)


_recording = False  # a variable, which Dynamo can read


def is_recording() -> bool:
    return _recording


class TapedGraph:
    """In the place of `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.tape, self.replays = Tape(), 0

    def replay(self) -> None:
        self.replays += 1
        self.tape.replay()


@contextlib.contextmanager
def capturing(graph: TapedGraph, **_: Any) -> Iterator[None]:
    global _recording
    generator = torch.get_rng_state()
    try:
        _recording = True
        with graph.tape:
            yield
    finally:
        _recording = False
        graph.tape.undo()
        torch.set_rng_state(generator)


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps made by `taped_step` are recorded on tapes."""
    from onelaunch.capture import recorded  # it imports Triton, which other tests have to interpret from the start

    monkeypatch.setattr(torch.cuda, "CUDAGraph", TapedGraph)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(sys.modules[Recordings.__module__], "capturing", capturing)
    monkeypatch.setattr(recorded, "MAX_RING_BYTES", 0)  # inputs are copied


def taped_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any = F.cross_entropy, accumulate: int = 1,
    compile: bool = False, tune: bool | None = False,
) -> tuple[Any, Any]:  # fmt: skip
    """A step that is recorded on tapes, and its recordings."""
    step = ol.train_step(model, loss, optimizer, accumulate=accumulate, compile=False)
    # Rates on "cpu" are elsewhere, as with CUDA.
    step._capturable = CapturableOptimizer(optimizer, torch.device("cpu:0"))
    step._plain = PlainStep(
        model, loss, optimizer, clip_norm=None, autocast=None, scaler=None, accumulate=accumulate, compile=compile, mode=None,
        recorded=True, tune=tune,
    )  # fmt: skip
    step._window = step._plain.window
    recordings: Any = Recordings(step._plain, step._capturable, "")
    recordings._own_stream = contextlib.nullcontext
    step._recordings = recordings
    return step, recordings


def assert_follows_a_plain_loop(
    model: nn.Module, data: list[tuple[Tensor, Tensor]], change: Callable[[Any, Any], Any] = lambda model, optimizer: None,
    *, at: int | None = 7, accumulate: int = 1, **options: Any,
) -> Any:  # fmt: skip
    """The course of losses and the weights at the end, with a change on the way: at this step, or at all if it is None."""
    other = copy.deepcopy(model)
    options = {"lr": 0.1, **options}
    mine, theirs = (torch.optim.SGD(one.parameters(), **options) for one in (model, other))
    step, recordings = taped_step(model, mine, accumulate=accumulate)
    losses, expected = [], []
    for number, (x, y) in enumerate(data):
        assert number != at or len(recordings) > 0 or step.reason
        if at in (None, number):
            change(model, mine)
            change(other, theirs)
        losses.append(float(step(x, y)))
        loss = F.cross_entropy(other(x), y)
        (loss / accumulate).backward()
        if (number + 1) % accumulate == 0:
            theirs.step()
            theirs.zero_grad()
        expected.append(loss.item())
    assert_same_course(losses, expected, LOSS_TOLERANCE * 10)
    assert_same_weights(model, other, WEIGHT_TOLERANCE)
    return step
