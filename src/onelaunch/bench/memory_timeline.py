"""Memory over one training step, operation by operation: what PyTorch allocates and frees on the way."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onelaunch.bench.contenders import TorchLoop, make_optimizer, shortened
from onelaunch.engines.contract import Run
from onelaunch.engines.eager.session import EagerSession
from onelaunch.rng import permutation
from onelaunch.train.loop import StopSwitch
from onelaunch.train.progress import Progress


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that are alive after each operation; the same on every device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.operations: list[str] = []
        self.bytes: list[int] = []
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._foreign: set[int] = set()

    def know(self, tensor: torch.Tensor, *, count: bool) -> None:
        """A tensor from before the step: counted from the start, or never (the data set)."""
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
    """The third step of the plain PyTorch loop (its optimizer's state exists by then): operations and live bytes, which hold
    weights, gradients, optimizer state, the batch and activations, but not the data set."""
    loop = TorchLoop(run, compiled=False)
    loop.model.load_state_dict(run.model.state_dict())
    loop.model.train()
    optimizer = make_optimizer(run, loop.model)
    scaler = torch.amp.GradScaler(run.device.type, enabled=loop.precision == "fp16")
    rows = permutation(run.spec.rows, run.spec.seed, 0, device=run.device)[run.spec.batch_slice(0)]
    for _ in range(2):
        loop.step(run, rows, optimizer, scaler)
    live = LiveBytes(run.device)
    for data in (run.x, run.y, rows):
        live.know(data, count=False)
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    for tensor in (*loop.model.parameters(), *loop.model.buffers(), *state):
        live.know(tensor, count=True)
    for parameter in loop.model.parameters():
        if parameter.grad is not None:
            live.know(parameter.grad, count=True)
    with live:
        loop.step(run, rows, optimizer, scaler)
    return {"operations": live.operations, "bytes": live.bytes}


def engine_timeline(run: Run) -> dict[str, list[Any]]:
    """The same of our eager engine, where it runs operations one by one: from the forward of its third step to that of the
    fourth, which is a whole step."""
    model = copy.deepcopy(run.model)
    session = EagerSession(replace(shortened(run, 4), model=model, validation=None), {})
    live = LiveBytes(run.device)
    for data in (run.x, run.y, session.order, session.losses, session.correct, session.lr):
        live.know(data, count=False)
    for tensor in (*model.parameters(), *model.buffers()):
        live.know(tensor, count=True)
    forwards: list[int] = []  # operations before each
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
