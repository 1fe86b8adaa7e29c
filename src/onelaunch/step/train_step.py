"""`ol.train_step`: forward, loss, backward, clipping, optimizer and zero_grad as one CUDA graph per input shape.

The first calls for a shape run the compiled operations one after another: they are ordinary steps, in which libraries allocate
their workspaces and the optimizer its state. Then the step is recorded once and replayed. Inputs are copied into the memory
that was recorded; random numbers come from PyTorch's generators, which advance with every replay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from onelaunch.argument_names import advise_by
from onelaunch.capture import capturing, clear_workspaces
from onelaunch.errors import OnelaunchError, first_line, require_integer
from onelaunch.fuse import backend
from onelaunch.fuse.captured import without_log_breaks
from onelaunch.fuse.decide import PROVEN, compiled
from onelaunch.step.accumulation import Window
from onelaunch.step.arguments import ADVICE, MAX_AUTOTUNE, autocast_dtype, check_arguments, check_call
from onelaunch.step.capturable_optimizer import CapturableOptimizer
from onelaunch.step.failures import compilers_failure, explain_failure, require_scalar
from onelaunch.step.inputs import (
    Pending,
    mark_rows_dynamic,
    other_gradients_kept,
    own_loss,
    parameter_names,
    passed_by_name,
    signature,
)
from onelaunch.trial_runs import Undo

if TYPE_CHECKING:  # they import Triton, which a machine without a GPU may lack
    from onelaunch.step.adam_update import AdamUpdate
    from onelaunch.step.recorded import Recorded

log = logging.getLogger("onelaunch")
WARM_UP_STEPS = 2  # per shape: the first compiles, the second finds all state in place
MAX_KINDS = 1024  # of inputs that are known to compile; more are undone and run again all the same if they fail
MAX_RECORDINGS = 3  # after settings of the optimizer have changed; then the step is no longer recorded

Loss = Callable[[Any, Any], torch.Tensor]


@advise_by(ADVICE)
def train_step(
    model: nn.Module, loss: Loss | None, optimizer: torch.optim.Optimizer, *, clip_norm: float | None = None,
    autocast: torch.dtype | str | None = None, scaler: torch.amp.GradScaler | None = None, accumulate: int = 1,
    capture: bool = True, compile: bool | str = True,
) -> TrainStep:  # fmt: skip
    """A function `step(*inputs, target) -> loss` that trains `model` by one batch.

    loss: a function of (output, target), such as nn.CrossEntropyLoss(). None for a model that returns its own loss: a scalar,
    or an output with the attribute or key "loss"; then all arguments of `step` go to the model.
    clip_norm: the largest global norm of the gradients, as for `torch.nn.utils.clip_grad_norm_`.
    autocast: "bf16", "fp16" or a dtype for `torch.autocast`; scaler: a `torch.amp.GradScaler` for fp16.
    accumulate: the optimizer steps on every `accumulate`-th call, with the mean gradient of the batches since its last step;
    `step.flush()` lets it step on fewer, as at the end of an epoch.
    capture: whether the step is recorded as a CUDA graph; `step.reason` says why it is not.
    compile: whether `torch.compile` compiles the forward and backward pass, with the patterns that won on every model measured;
    "max-autotune": it also times several kernels for each product, which takes minutes.

    The loss comes back as a 0-d tensor, without waiting for the device. Learning-rate schedulers work as usual. A dict as the
    only input is passed by name if forward has these names. A step begins without gradients and leaves none; parameters that
    the optimizer does not have keep theirs.
    """
    return TrainStep(model, loss, optimizer, clip_norm, autocast, scaler, accumulate, capture, compile)


class TrainStep:
    """What `train_step` returns. `reason` is empty while steps are recorded, else it says why they are not."""

    def __init__(
        self, model: nn.Module, loss: Loss | None, optimizer: torch.optim.Optimizer, clip_norm: float | None,
        autocast: torch.dtype | str | None, scaler: torch.amp.GradScaler | None, accumulate: int, capture: bool,
        compile: bool | str,
    ) -> None:  # fmt: skip
        check_arguments(model, loss, optimizer, clip_norm, scaler, capture, compile)
        self.model, self.loss, self.optimizer = model, loss, optimizer
        self.clip_norm, self.scaler = None if clip_norm is None else float(clip_norm), scaler
        self.accumulate = require_integer("accumulate", accumulate, "1 or more")
        if self.accumulate < 1:
            raise OnelaunchError(f"accumulate={accumulate} must be 1 or more")
        self.autocast = autocast_dtype(autocast)
        self.device = self.parameters[0].device
        self._compiles, self._started = bool(compile), False
        self._compiled: set[Any] = set()  # kinds of inputs with which a compiled step has succeeded
        self._names = parameter_names(model)
        self._capturable = CapturableOptimizer(optimizer, self.device)
        self._recorded: dict[Any, Recorded] = {}
        self._latest: Recorded | None = None
        self._pending: dict[Any, Pending] = {}
        self._adam: AdamUpdate | None = None
        self._recordings = 0
        self._micro_step = 0
        self._window = Window(optimizer) if self.accumulate > 1 else None
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self.reason = self._uncapturable_reason() if capture else "capture=False"
        if not self.reason:
            self._capturable.prepare()
        mode = "max-autotune-no-cudagraphs" if compile == MAX_AUTOTUNE else None  # the step's own graph replaces them
        self._forward: Callable[..., torch.Tensor] = compiled(
            self._forward_and_loss, PROVEN if compile else None, captured=not self.reason, mode=mode
        )

    @property
    def parameters(self) -> list[torch.Tensor]:
        """All parameters of the optimizer, also of groups that were added later."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Train on one batch; its mean loss before the update, as a 0-d tensor on the model's device."""
        latest = self._latest  # for a network this small that the host's time counts, every microsecond here does
        if latest is not None and latest.training is self.model.training and not kwargs:
            ring = latest.ring
            distinct = len({*map(id, args)}) == len(args)  # one tensor as two arguments has a recording of its own
            if ring is not None and distinct and ring.takes(args) and self._capturable.ready():
                return latest.replay(args)
        check_call(args, kwargs, self.loss is not None)
        self._require_unbroken_window()
        if not self._started:
            self._started = True
            if self._compiles and self.device.type == "cpu":
                backend.log_compiling("train_step", "the step", ": compile=False starts at once")
                mark_rows_dynamic(args)
        update = self._micro_step == self.accumulate - 1
        if self.reason:
            self._begin_window()
            loss = self._run(args, kwargs, update)
        else:
            loss = self._record_or_replay(args, kwargs, update)
        self._micro_step = 0 if update else self._micro_step + 1
        return loss

    def flush(self) -> None:
        """Let the optimizer step now if batches wait for it (`accumulate`), with their mean gradient."""
        self._require_unbroken_window()
        if torch.is_inference_mode_enabled():
            raise OnelaunchError("step.flush() was called under torch.inference_mode(): call it outside")
        if not self._micro_step:
            return
        if not self.reason:
            self._follow_optimizer()
        try:
            with torch.no_grad(), self._eager():
                for parameter in self.parameters:
                    if parameter.grad is not None:
                        parameter.grad.mul_(self.accumulate / self._micro_step)
                self._update()
        except BaseException:
            self._abandon_window()
            raise
        self._micro_step = 0

    def _require_unbroken_window(self) -> None:
        if self._micro_step and self._window is not None and self._window.is_broken():
            self._abandon_window()
            raise OnelaunchError(
                f"optimizer.step() was called between the {self.accumulate} batches of accumulate: call step.flush() instead"
            )

    def _abandon_window(self) -> None:
        """After an error: the gradients are those of a part of the model or of the batches."""
        self._micro_step = 0
        self._zero_gradients()
        if self.scaler is not None:  # it may have marked the gradients as unscaled
            self.scaler._per_optimizer_states.clear()

    def __repr__(self) -> str:
        loss = getattr(self.loss, "__name__", None if self.loss is None else type(self.loss).__name__)
        runs = f"not recorded: {self.reason}" if self.reason else f"{len(self._recorded)} recorded"
        return f"TrainStep({type(self.model).__name__}, {loss}, {type(self.optimizer).__name__}; {runs})"

    def _record_or_replay(self, args: tuple[Any, ...], kwargs: dict[str, Any], update: bool) -> torch.Tensor:
        leaves, structure = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        first = {id(leaf): index for index, leaf in reversed(list(enumerate(tensors)))}
        same = tuple(first[id(leaf)] for leaf in tensors)  # arguments that are one tensor are compiled as one
        key = (update, self.model.training, structure, same, *map(signature, leaves))
        self._follow_optimizer()
        recorded = self._recorded.get(key)
        if recorded is None or self.accumulate > 1:  # a recording of a whole step has gradients of its own
            self._begin_window()
        if recorded is None:
            if key not in self._pending:
                self._pending[key] = Pending(leaves, structure, self.device)
            pending = self._pending[key]
            pending.fill(tensors)
            pending.calls += 1
            recorded = self._record(pending, update) if pending.calls > WARM_UP_STEPS and not self.reason else None
            if recorded is None:
                with self._eager():
                    pending.loss = self._run(pending.args, pending.kwargs, update)
                return pending.loss
            self._recorded[key] = recorded
            del self._pending[key]
            if not kwargs and len(tensors) == len(args) == len(first) and self.accumulate == 1:
                self._latest = recorded
        return recorded.replay(tensors)

    # One step, operation by operation: what runs before a recording, instead of one, and inside it.

    def _forward_and_loss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        if self.loss is None:
            return own_loss(self._call_model(args, kwargs))
        return self.loss(self._call_model(args[:-1], kwargs), args[-1])

    def _call_model(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if passed_by_name(args, self._names):
            return self.model(**args[0], **kwargs)
        return self.model(*args, **kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], update: bool) -> torch.Tensor:
        """One step; where the compiler fails in it, it is undone, and this one and all others are not compiled."""
        if not self._compiles or self._is_recording():
            return self._run_operations(args, kwargs, update)
        leaves, structure = tree_flatten((args, kwargs))
        kinds = (one if isinstance(one, Hashable) else type(one) for one in map(signature, leaves))
        key = (self.model.training, structure, *kinds)
        if key in self._compiled:
            return self._run_operations(args, kwargs, update)
        undo, micro_step = Undo(self.model, self.parameters), self._micro_step
        try:
            loss = self._run_operations(args, kwargs, update)
        except Exception as error:
            failure = compilers_failure(error)
            if not failure:
                raise
            log.warning("train_step: steps are not compiled, as the compiler failed: %s", failure)
        else:
            if len(self._compiled) < MAX_KINDS:  # an argument may be another number in every call
                self._compiled.add(key)
            return loss
        undo()
        self._micro_step, self._compiles, self._forward = micro_step, False, self._forward_and_loss
        return self._run_operations(args, kwargs, update)

    def _run_operations(self, args: tuple[Any, ...], kwargs: dict[str, Any], update: bool) -> torch.Tensor:
        autocast = torch.autocast(
            self.device.type, dtype=self.autocast, enabled=self.autocast is not None, cache_enabled=False
        )
        self._release_workspaces()
        with without_log_breaks(), autocast:
            try:
                loss = self._forward(args, kwargs)
            except Exception as error:
                if not self._is_recording():
                    explain_failure(error, self.model, self.loss, self._call_model, args, kwargs)
                raise
        require_scalar(loss, self.loss is not None)
        scaled = loss / self.accumulate if self.accumulate > 1 else loss
        self._release_workspaces()
        try:
            with other_gradients_kept(loss, self.parameters):
                (scaled if self.scaler is None else self.scaler.scale(scaled)).backward()
            if update:
                self._update()
        except BaseException:
            if not self._is_recording():
                self._abandon_window()
            raise
        return loss.detach()

    def _release_workspaces(self) -> None:
        """Before each pass: autograd's thread has a cuBLAS workspace of its own, and a recording would hold both of 32 MiB."""
        if not self.reason:
            clear_workspaces()

    def _is_recording(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _update(self) -> None:
        if self.clip_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
        if self._adam is not None and torch.cuda.is_current_stream_capturing():
            self._adam.launch()
        elif self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self._zero_gradients()

    def _begin_window(self) -> None:
        """Before the first call of those that the optimizer steps for: a backward pass elsewhere may have left gradients."""
        if self._micro_step == 0:
            self._zero_gradients()
            if self._window is not None:
                self._window.begin()

    def _zero_gradients(self) -> None:
        """With accumulation every recording adds to the same memory, so it is zeroed instead of released."""
        self.optimizer.zero_grad(set_to_none=self.accumulate == 1 or bool(self.reason))

    # Recording.

    @contextmanager
    def _eager(self) -> Iterator[None]:
        """What runs operation by operation between recorded steps: the rate on the device, and our own stream."""
        if self.reason:
            yield
        else:
            with self._capturable.rates_on_device(), self._own_stream():
                yield

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        """Inside, a stream of our own is current: autograd ties gradients to the stream of a warm-up step, and a recording
        on another stream would wait for it, which CUDA forbids. It begins and ends in order with the caller's stream.
        """
        with torch.cuda.device(self.device):
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
        gradients = [(parameter, parameter.grad) for parameter in self.parameters]
        try:
            from onelaunch.kernels.launch import compiling
            from onelaunch.step.adam_update import adam_update
            from onelaunch.step.recorded import Recorded

            with torch.cuda.device(self.device), self._capturable.rates_on_device():
                recorded = Recorded(pending.inputs, self.device, self.model.training)
                self._adam = adam_update(self.optimizer, self._capturable.rates, self.scaler)
                with compiling():
                    recorded.begin()
                    recorded.end(pending.loss)
                self._pool = self._pool or torch.cuda.graph_pool_handle()
                with capturing(recorded.graph, pool=self._pool, stream=self._stream):
                    recorded.begin()
                    recorded.end(self._run(pending.args, pending.kwargs, update))
                if self._adam is not None:
                    self._adam.fill_tables()
        except Exception as error:  # whatever a model does that a recording forbids
            torch.cuda.synchronize(self.device)
            self._stop_recording(first_line(error))
            if self.scaler is not None:  # it has marked the gradients as unscaled, but a recording runs nothing
                self.scaler._per_optimizer_states.clear()
            for parameter, gradient in gradients:  # a recording runs nothing: what was accumulated is still there
                parameter.grad = gradient
            return None
        recorded.update, self._adam = self._adam, None
        return recorded

    def _follow_optimizer(self) -> None:
        """Before work on the device: other settings need other recordings, and the rates are read there."""
        if self._capturable.settings_changed():
            self._forget_recordings()
        self._capturable.upload_rates()

    def _forget_recordings(self) -> None:
        """The optimizer's settings are part of a recording: record anew, but not for a schedule that changes them always."""
        self._recordings += bool(self._recorded)
        self._recorded.clear()
        self._pending.clear()
        self._latest = None
        self._capturable.prepare()
        if self._recordings >= MAX_RECORDINGS:
            self._stop_recording("settings of the optimizer beside the learning rate change from step to step")

    def _stop_recording(self, reason: str) -> None:
        self.reason = reason
        self._recorded.clear()
        self._latest = None
        log.warning("train_step: steps run operation by operation: %s", reason)

    def _uncapturable_reason(self) -> str:
        if self.device.type != "cuda":
            return f"the model is on {self.device}, and only CUDA devices record graphs"
        reason = self._capturable.unsupported_reason()
        if any(tensor.device != self.device for tensor in (*self.parameters, *self.model.parameters())):
            reason = "the parameters are on several devices"
        elif isinstance(self.model, nn.parallel.DistributedDataParallel):
            reason = "DistributedDataParallel exchanges gradients in hooks"
        if reason:
            log.warning("train_step: steps run operation by operation: %s", reason)
        return reason
