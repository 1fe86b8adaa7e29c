"""Memory over one training step, operation by operation: what PyTorch allocates and frees."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onelaunch.bench.contenders import shortened
from onelaunch.bench.torch_step import TorchStep
from onelaunch.engines.contract import Run
from onelaunch.engines.eager.session import EagerSession
from onelaunch.rng import permutation
from onelaunch.train.loop import StopSwitch
from onelaunch.train.progress import Progress


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that are alive after each operation, on any device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.operations: list[str] = []
        self.bytes: list[int] = []
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._foreign: set[int] = set()

    def know(self, tensor: torch.Tensor, *, count: bool) -> None:
        """A tensor that exists before the step: counted from the start, or never (the data set)."""
        storage = tensor.untyped_storage()
        if count:
            self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        else:
            self._foreign.add(storage._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == self.device.type:
                storage = leaf.untyped_storage()
                if storage._cdata not in self._foreign:
                    self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self.operations.append(str(func.__name__).split(".")[0])
        self.bytes.append(sum(size for _, size in self._alive.values()))
        return result


def step_timeline(run: Run) -> dict[str, list[Any]]:
    """Operations and live bytes of the third step of the plain PyTorch loop, by which the optimizer has its state.

    The bytes hold weights, gradients, optimizer state, the batch and activations, but not the data set.
    """
    step = TorchStep(run)
    rows = permutation(run.spec.rows, run.spec.seed, 0, device=run.device)[run.spec.batch_slice(0)]
    for _ in range(2):
        step(run.x[rows], run.y[rows])
    live = LiveBytes(run.device)
    for data in (run.x, run.y, rows):
        live.know(data, count=False)
    states = [value for entry in step.optimizer.state.values() for value in entry.values()]
    gradients = [parameter.grad for parameter in step.model.parameters()]
    for tensor in (*step.model.parameters(), *step.model.buffers(), *states, *gradients):
        if isinstance(tensor, torch.Tensor):
            live.know(tensor, count=True)
    with live:
        step(run.x[rows], run.y[rows])
    return {"operations": live.operations, "bytes": live.bytes}


def engine_timeline(run: Run) -> dict[str, list[Any]]:
    """The same for our eager engine where it runs operations one by one: from the third step's forward to the fourth's, which
    is a whole step."""
    model = copy.deepcopy(run.model)
    session = EagerSession(replace(shortened(run, 4), model=model, validation=None), {})
    live = LiveBytes(run.device)
    for data in (run.x, run.y, session.order, session.losses, session.correct, session.lr):
        live.know(data, count=False)
    for tensor in (*model.parameters(), *model.buffers()):
        live.know(tensor, count=True)
    forwards: list[int] = []  # how many operations ran before each
    hook = model.register_forward_pre_hook(lambda *_: forwards.append(len(live.operations)))
    try:
        with live:
            for _ in session.segments(0, StopSwitch(Progress())):
                pass
    finally:
        hook.remove()
        session.close()
    whole = slice(forwards[2], forwards[3])
    return {"operations": live.operations[whole], "bytes": live.bytes[whole]}
