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

from onelaunch.capture.changes import Changes
from onelaunch.capture.dependencies import Dependencies
from onelaunch.capture.graph import capturing
from onelaunch.capture.host_draws import DrawnOnHost, no_draws_on_host
from onelaunch.capture.model_state import ModelState
from onelaunch.step.capturable_optimizer import CapturableOptimizer, parameters_of
from onelaunch.step.failures import recording_failure
from onelaunch.step.inputs import CONSTANTS, Pending, signature
from onelaunch.step.plain_step import PlainStep

if TYPE_CHECKING:  # it imports Triton, which a machine without a GPU may lack
    from onelaunch.capture.recorded import Recorded

log = logging.getLogger("onelaunch")
WARM_UP_STEPS = 2  # per kind of inputs: the first compiles, the second finds all state in place
MAX_VARIANTS = 4  # recordings of one kind of inputs, for what may come back: a frozen layer, a mode, an attribute
DRAWN_RETRIES = 2  # of recordings in which the host drew random numbers: it may have been another thread
UNCOMPILED_RETRIES = 2  # of recordings for which Dynamo has no compiled code yet, as something has just changed
EXCHANGE_GRADIENTS = {"DistributedDataParallel", "FullyShardedDataParallel"}
MAX_PENDING = 32  # kinds of inputs that wait for a recording, each with a copy of its inputs


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
        self._recorded: dict[Any, list[Recorded]] = {}  # the latest first
        self._pending: dict[Any, Pending] = {}
        self._warm: dict[Any, torch.Tensor] = {}  # kinds of inputs that can be recorded again at once: a loss of each
        self._changes, self._replays = Changes(), 0  # replays of recordings that were dropped
        self._dropped = self._warned = False
        self._retries = DRAWN_RETRIES
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        if not reason:
            optimizer.prepare()
            self.state = ModelState((step.model, step.loss), partial(parameters_of, optimizer.optimizer))

    def __len__(self) -> int:
        return len(self.all())

    def all(self) -> list[Recorded]:
        return [one for variants in self._recorded.values() for one in variants]

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
        autocast = step.callers_autocast()
        kind = (update, autocast, structure, same, *map(signature, leaves))
        candidates = step.candidates
        if not step.window.batches:
            if candidates.is_due() and (candidates.current, *kind) in self._recorded:
                candidates.begin_turns()
                self._warm = {key: torch.empty_like(one.loss) for key, (one, *_) in self._recorded.items()}
                self._drop_recordings()  # the other form takes the same memory
            candidates.take_turn(kind)
        key = (candidates.current, *kind)
        recorded = self._find(key)
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
            recorded = self._record_or_run(pending, update)
            if recorded is None:
                return pending.loss
            if changed := recorded.dependencies.change():  # by forward itself, which a replay would not
                loss = recorded.replay(tensors)
                self._replays += 1
                if pending.changed_by_forward:  # again: the first time, Dynamo takes a number for a constant
                    self._stop(
                        f"forward changes {changed} in every call: keep it in a buffer, and change it in place, as by copy_"
                    )
                pending.changed_by_forward = True
                return loss
            self._pending.pop(key, None)
            self._recorded.setdefault(key, []).insert(0, recorded)
        if candidates.takes_turns:
            with candidates.timed(kind):
                loss = recorded.replay(tensors)
            if candidates.is_settled:
                self._keep_chosen()
            return loss
        positional = not kwargs and len(tensors) == len(args) == len(first)
        if positional and not accumulates and autocast is None and not candidates.is_due():
            self.latest = recorded
        return recorded.replay(tensors)

    def _keep_chosen(self) -> None:
        """Forget the recordings of the form that was not chosen."""
        chosen = self.step.candidates.current
        for key in [key for key in self._recorded if key[0] != chosen]:
            self._replays += sum(one.replays for one in self._recorded.pop(key))
        self._pending = {key: one for key, one in self._pending.items() if key[0] == chosen}
        if not self._recorded:
            self._drop_recordings()

    def _look_at_the_clock(self) -> None:
        """Where steps are so short that nothing else does."""
        if self.step.candidates.is_due():
            self.latest = None

    def _find(self, key: Any) -> Recorded | None:
        """A recording for this kind of inputs that depends on nothing that has changed."""
        variants = self._recorded.get(key, [])
        for one in variants:
            if one.dependencies.hold() or not one.dependencies.change():
                return one
        if variants and key not in self._pending:
            self._follow_change(key, f"{variants[0].dependencies.change()} (a tensor may change, by fill_ or copy_)")
        return None

    def _follow_change(self, key: Any, changed: str) -> None:
        """No recording fits: forget those that read what is gone, and the oldest of many."""
        self._warm.clear()
        kept = [one for one in self._recorded[key] if one.dependencies.has_its_tensors()][: MAX_VARIANTS - 1]
        for one in self._recorded.pop(key):
            self._replays += 0 if one in kept else one.replays
        if kept:
            self._recorded[key] = kept
        self.latest = None
        if not self._recorded:
            self._drop_recordings()
        self._count_change(changed)

    def _count_change(self, changed: str) -> None:
        if self._changes.are_too_many(self._replays + sum(one.replays for one in self.all())):
            self._stop(f"{changed} changes again and again")

    def _record_or_run(self, pending: Pending, update: bool) -> Recorded | None:
        """A recording, or None after an ordinary step."""
        recorded = None
        self.state.renew_gradient_nodes()
        try:
            recorded = self._record(pending, update) if pending.calls > WARM_UP_STEPS else None
            if recorded is None:
                if pending.calls > WARM_UP_STEPS:
                    self.state.renew_gradient_nodes()  # of the recording that failed, on another stream
                with self.operations(), self.state.carried():
                    pending.loss = self.step(pending.args, pending.kwargs, update)
        finally:
            self.state.renew_gradient_nodes()  # the next pass may be the caller's
        return recorded

    def _run_plainly(self, args: tuple[Any, ...], kwargs: dict[str, Any], update: bool) -> torch.Tensor:
        self.step.begin_window()
        return self.step(args, kwargs, update)

    def _pending_for(self, key: Any, leaves: list[Any], structure: Any) -> Pending:
        if key not in self._pending:
            self._pending[key] = Pending(leaves, structure, self.step.device)
            if key in self._warm:
                self._pending[key].calls, self._pending[key].loss = WARM_UP_STEPS, self._warm.pop(key)
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
        if self.optimizer.settings_changed():
            self._forget("what the optimizer has beside the learning rate")
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
        """The step for inputs like these, recorded but not run; None where that is impossible, or not possible yet."""
        step = self.step
        with torch.cuda.device(step.device):
            if not step.is_compiled(pending.args, pending.kwargs):
                if pending.calls > WARM_UP_STEPS + UNCOMPILED_RETRIES:
                    self._stop(
                        "torch.compile compiles them anew in every call, as something that they read always changes"
                    )
                return None
            dependencies = step.dependencies(pending.args, pending.kwargs)
        if dependencies is None:
            self._stop(f"what they depend on is not known: {step.unknown_reason}")
            return None
        gradients = [(parameter, parameter.grad) for parameter in parameters_of(step.optimizer)]
        undo, counters = self.state.undo(), self.state.constants()
        try:
            with no_draws_on_host(self.state.modules()):
                recorded = self._captured(pending, update, dependencies)
        except BaseException as error:  # whatever a model does that a recording forbids, or Ctrl-C
            torch.cuda.synchronize(step.device)
            if not isinstance(error, Exception):
                pass
            elif isinstance(error, DrawnOnHost) and self._retries:
                self._retries -= 1
            else:
                self._stop(recording_failure(error))
            undo()
            step.own_update = None
            step.forget_unscaling()
            for parameter, gradient in gradients:  # a recording runs nothing: what was accumulated is still there
                parameter.grad = gradient
            if not isinstance(error, Exception):
                raise
            return None
        if update:
            self.optimizer.follow_update(step.own_update is not None)
        if recorded.ring is not None:
            recorded.ring.on_half = self._look_at_the_clock
        recorded.memory = [step.own_update, *(dict(state) for state in step.optimizer.state.values())]
        step.own_update = None
        step.keep_gradients()
        self._warn_of_counter(counters)
        return recorded

    def _warn_of_counter(self, before: dict[str, Any]) -> None:
        """Recorded steps do not count. Nothing that they compute depends on it, but its owner may read it."""
        counting = [name for name, value in self.state.constants().items() if before.get(name, value) != value]
        if counting and not self._warned:
            self._warned = True
            log.warning(
                "train_step: forward changes %s in every call, but not in recorded steps: keep it in a buffer, and change it "
                "in place, to have it in them", counting[0],
            )  # fmt: skip

    def _captured(self, pending: Pending, update: bool, dependencies: Dependencies) -> Recorded:
        """The step in a CUDA graph, with its update in `step.own_update`."""
        from onelaunch.capture.recorded import Recorded
        from onelaunch.kernels.launch import compiling
        from onelaunch.step.optimizer_update import optimizer_update

        step = self.step
        with torch.cuda.device(step.device), self.optimizer.rates_on_device():
            recorded = Recorded(pending.inputs, step.device, dependencies)
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
            if step.own_update is not None:
                step.own_update.fill_tables()
        return recorded

    def _forget(self, changed: str) -> None:
        """Settings of the optimizer are part of all recordings."""
        had_any = bool(self._recorded or self._pending)
        self._pending.clear()
        self._warm.clear()
        self._drop_recordings()
        self.optimizer.prepare()
        if had_any:
            self._count_change(changed)

    def _drop_recordings(self) -> None:
        self._replays += sum(one.replays for one in self.all())
        self._recorded.clear()
        self.latest = None
        self._pool = None  # PyTorch takes no new graph into a pool without graphs, while a tensor still lives in it
        self.step.forget_gradients()

    def _stop(self, reason: str) -> None:
        if self.step.candidates.takes_turns and self.step.candidates.current:
            self.step.candidates.give_up(reason)
            self._keep_chosen()
            return
        self.reason, self.step.recorded = reason, False
        self._drop_recordings()
        _log_reason(reason)


def _log_reason(reason: str) -> None:
    log.warning("train_step: steps run operation by operation: %s", reason)
