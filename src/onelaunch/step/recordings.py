"""The CUDA graphs of a training step, one per kind of inputs.

The first calls for a kind run operation by operation: they are ordinary steps, in which libraries allocate their workspaces
and the optimizer its state. Then the step is recorded once and replayed. Inputs are copied into the memory that was recorded;
random numbers come from PyTorch's generators, which advance with every replay.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from onelaunch.capture import capturing
from onelaunch.errors import OnelaunchError
from onelaunch.step.capturable_optimizer import CapturableOptimizer, parameters_of
from onelaunch.step.failures import recording_failure
from onelaunch.step.inputs import CONSTANTS, Pending, signature
from onelaunch.step.model_state import ModelState
from onelaunch.step.plain_step import PlainStep
from onelaunch.trial_runs import Generators

if TYPE_CHECKING:  # it imports Triton, which a machine without a GPU may lack
    from onelaunch.step.recorded import Recorded

log = logging.getLogger("onelaunch")
WARM_UP_STEPS = 2  # per kind of inputs: the first compiles, the second finds all state in place
MAX_RECORDINGS = 3  # after settings of the optimizer or the model have changed; then the step is no longer recorded
MANY_REPLAYS = 100  # after which a change does not count: recording anew costs little beside them
MAX_REPLACED = 16  # the same where forward replaces what recordings read, as a cache that grows with the longest input
DRAWN_RETRIES = 2  # of recordings in which the host drew random numbers: it may have been another thread
EXCHANGE_GRADIENTS = {"DistributedDataParallel", "FullyShardedDataParallel"}
MAX_PENDING = 32  # kinds of inputs that wait for a recording, each with a copy of its inputs


class DrawnOnHost(OnelaunchError):
    """A recording would repeat the same random numbers for ever."""


def uncapturable_reason(model: nn.Module, optimizer: CapturableOptimizer) -> str:
    """Why steps cannot be recorded, also logged; empty when they can."""
    device = optimizer.device
    if device.type != "cuda":
        return f"the model is on {device}, and only CUDA devices record graphs"
    reason = optimizer.unsupported_reason()
    if any(isinstance(one, (nn.Embedding, nn.EmbeddingBag)) and one.sparse for one in model.modules()):
        reason = "embeddings with sparse=True have gradients of a size that only the run knows"
    elif any(tensor.device != device for tensor in (*parameters_of(optimizer.optimizer), *model.parameters())):
        reason = "the parameters are on several devices"
    elif names := EXCHANGE_GRADIENTS & {type(one).__name__ for one in model.modules()}:
        reason = f"{min(names)} exchanges gradients in hooks"
    if reason:
        _log_reason(reason)
    return reason


class Recordings:
    """Records `step` for every kind of inputs, and replays it. `reason` is empty while it does, else it says why not."""

    def __init__(self, step: PlainStep, optimizer: CapturableOptimizer, reason: str) -> None:
        self.step, self.optimizer, self.reason = step, optimizer, reason
        self.latest: Recorded | None = None  # where a call needs no key to find it
        self._recorded: dict[Any, Recorded] = {}
        self._pending: dict[Any, Pending] = {}
        self._forgotten = self._replaced = 0
        self._dropped = self._warned = False
        self._retries = DRAWN_RETRIES
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        if not reason:
            optimizer.prepare()
            self.state = ModelState((step.model, step.loss), partial(parameters_of, optimizer.optimizer))

    def __len__(self) -> int:
        return len(self._recorded)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], update: bool) -> torch.Tensor:
        """Train on one batch, operation by operation where steps are not recorded."""
        if self.reason:
            return self._run_plainly(args, kwargs, update)
        step, accumulates = self.step, self.step.window.size > 1
        leaves, structure = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        first = {id(leaf): index for index, leaf in reversed(list(enumerate(tensors)))}
        same = tuple(first[id(leaf)] for leaf in tensors)  # arguments that are one tensor are compiled as one
        opaque = next(
            (one for one in leaves if not isinstance(one, torch.Tensor) and not isinstance(one, CONSTANTS)), None
        )
        if opaque is not None:
            self._stop(
                f"an argument is a {type(opaque).__name__}: pass its tensors, as in step(**batch) or step(batch.x, batch.y)"
            )
        self.follow_settings()
        if self.reason:
            return self._run_plainly(args, kwargs, update)
        autocast = step.callers_autocast()
        key = (update, autocast, *self.state.flags(), structure, same, *map(signature, leaves))
        recorded = self._recorded.get(key)
        step.restore_gradients()
        if accumulates and step.window.batches == 0 and step.release_frozen_gradients():
            self._forget("which parameters are frozen (with accumulate)")
            recorded = None
            if self.reason:
                return self._run_plainly(args, kwargs, update)
        if recorded is None or accumulates:  # a recording of a whole step has gradients of its own
            step.begin_window()
        if recorded is None:
            pending = self._pending_for(key, leaves, structure)
            pending.fill(tensors)
            pending.calls += 1
            recorded, replaced = self._record_or_run(pending, update)
            if recorded is None:
                return pending.loss
            if replaced:  # in every call, as it seems: this one recording has it where the model has it now
                loss = recorded.replay(tensors)
                self._stop(f"forward replaces {replaced}: change it in place, as by copy_")
                return loss
            self._recorded[key] = recorded
            del self._pending[key]
            positional = not kwargs and len(tensors) == len(args) == len(first)
            if positional and not accumulates and autocast is None:
                self.latest = recorded
        return recorded.replay(tensors)

    def _record_or_run(self, pending: Pending, update: bool) -> tuple[Recorded | None, str]:
        """A recording, or None after an ordinary step; and what forward replaced meanwhile, in words."""
        recorded = None
        self.state.renew_gradient_nodes()
        try:
            recorded = self._record(pending, update) if pending.calls > WARM_UP_STEPS else None
            if recorded is None:
                with self.operations(), self.state.carried():
                    pending.loss = self.step(pending.args, pending.kwargs, update)
        finally:
            self.state.renew_gradient_nodes()  # the next pass may be the caller's
            replaced = self.state.follow_forward(recorded is not None)
            if replaced and self._recorded:
                self._drop_recordings()
                self._replaced += 1
                if self._replaced >= MAX_REPLACED:
                    self._stop(f"{replaced}, which forward replaces, changes again and again")
        if recorded is None:
            self._warn_of_counters(pending)
        return recorded, replaced

    def _warn_of_counters(self, pending: Pending) -> None:
        """Recorded steps do not count, and what depends on a counter stays as it is."""
        before, pending.counters = pending.counters, self.state.counters()
        counting = [name for name, value in pending.counters.items() if before.get(name, value) != value]
        if counting and not self._warned:
            self._warned = True
            log.warning(
                "train_step: forward changes %s in every call, but not in recorded steps: keep it in a buffer, and change it "
                "in place, if a step depends on it", counting[0],
            )  # fmt: skip

    def _run_plainly(self, args: tuple[Any, ...], kwargs: dict[str, Any], update: bool) -> torch.Tensor:
        self.step.begin_window()
        return self.step(args, kwargs, update)

    def _pending_for(self, key: Any, leaves: list[Any], structure: Any) -> Pending:
        if key not in self._pending:
            self._pending[key] = Pending(leaves, structure, self.step.device)
        if len(self._pending) > MAX_PENDING:
            del self._pending[next(iter(self._pending))]
            if not self._dropped:
                log.warning(
                    "train_step: %d kinds of inputs came once or twice, and such steps are not recorded: pass a number that "
                    "changes from step to step as a tensor, and pad to fewer shapes", MAX_PENDING,
                )  # fmt: skip
            self._dropped = True
        return self._pending[key]

    @contextmanager
    def operations(self) -> Iterator[None]:
        """What runs operation by operation between recorded steps: the rate on the device, and our own stream."""
        if self.reason:
            yield
        else:
            with self.optimizer.rates_on_device(), self._own_stream():
                yield

    def follow_settings(self) -> None:
        """Before work on the device: other settings need other recordings, and the rates are read there."""
        if self.reason:
            return
        changed = self.state.change(bool(self._recorded))
        if self.optimizer.settings_changed():
            self._forget("what the optimizer has beside the learning rate")
        elif changed:
            self._forget(f"{changed} (a tensor may change, by fill_ or copy_)")
        self.optimizer.upload()

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        """Inside, a stream of our own is current: autograd ties gradients to the stream of a warm-up step, and a recording
        on another stream would wait for it, which CUDA forbids. It begins and ends in order with the caller's stream.
        """
        with torch.cuda.device(self.step.device):
            self._stream = self._stream or torch.cuda.Stream()
            callers = torch.cuda.current_stream()
            self._stream.wait_stream(callers)
            try:
                with torch.cuda.stream(self._stream):
                    yield
            finally:
                callers.wait_stream(self._stream)

    def _record(self, pending: Pending, update: bool) -> Recorded | None:
        """The step for inputs like these, recorded but not run; None, with `reason` set, where that is impossible."""
        step = self.step
        gradients = [(parameter, parameter.grad) for parameter in parameters_of(step.optimizer)]
        undo, host = self.state.undo(), Generators(self.state.generators())
        try:
            from onelaunch.kernels.launch import compiling
            from onelaunch.step.optimizer_update import optimizer_update
            from onelaunch.step.recorded import Recorded

            memory = self.state.memory()
            with torch.cuda.device(step.device), self.optimizer.rates_on_device():
                recorded = Recorded(pending.inputs, step.device, self.state.flags())
                if update:
                    step.own_update = optimizer_update(
                        step.optimizer, self.optimizer.rates, self.optimizer.settings, step.scaler
                    )
                with compiling():
                    recorded.begin()
                    recorded.end(pending.loss)
                self._pool = self._pool or torch.cuda.graph_pool_handle()
                with capturing(recorded.graph, pool=self._pool, stream=self._stream):
                    recorded.begin()
                    with self.state.carried():
                        loss = step(pending.args, pending.kwargs, update)
                    recorded.end(loss)
                if host.others_have_drawn() or (host.torch_has_drawn() and self.state.leaves_out_layers() is not False):
                    raise DrawnOnHost(
                        "forward, the loss or another thread draws random numbers on the host, as by random.random(): draw "
                        "them on the model's device, as by torch.rand(1, device=x.device)"
                    )
                if step.own_update is not None:
                    step.own_update.fill_tables()
        except Exception as error:  # whatever a model does that a recording forbids
            torch.cuda.synchronize(step.device)
            if isinstance(error, DrawnOnHost) and self._retries:
                self._retries -= 1
            else:
                self._stop(recording_failure(error))
            undo()
            host.restore()
            step.forget_unscaling()
            for parameter, gradient in gradients:  # a recording runs nothing: what was accumulated is still there
                parameter.grad = gradient
            return None
        finally:
            own_update, step.own_update = step.own_update, None
        if update:
            self.optimizer.follow_update(own_update is not None)
        recorded.memory = [own_update, memory, *(dict(state) for state in step.optimizer.state.values())]
        step.keep_gradients()
        return recorded

    def _forget(self, changed: str) -> None:
        """Settings are part of a recording: record anew, but not for a schedule that changes them always."""
        few_replays = sum(one.replays for one in self._recorded.values()) < MANY_REPLAYS
        self._forgotten += few_replays and bool(self._recorded or self._pending)
        self._pending.clear()
        self._drop_recordings()
        self.optimizer.prepare()
        if self._forgotten >= MAX_RECORDINGS:
            self._stop(f"{changed} changes again and again")

    def _drop_recordings(self) -> None:
        self._recorded.clear()
        self.latest = None
        self._pool = None  # PyTorch takes no new graph into a pool without graphs, while a tensor still lives in it
        self.step.forget_gradients()

    def _stop(self, reason: str) -> None:
        self.reason, self.step.recorded = reason, False
        self._drop_recordings()
        _log_reason(reason)


def _log_reason(reason: str) -> None:
    log.warning("train_step: steps run operation by operation: %s", reason)
