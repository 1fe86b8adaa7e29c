"""`ol.train_step`: forward, loss, backward, clipping, optimizer and zero_grad as one CUDA graph per input shape.

The first calls for a shape run the compiled operations one after another: they are ordinary steps, in which libraries allocate
their workspaces and the optimizer its state. Then the step is recorded once and replayed. Inputs are copied into the memory
that was recorded; random numbers come from PyTorch's generators, which advance with every replay.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from onelaunch.capture import capturing
from onelaunch.errors import ArgumentTypeError, OnelaunchError, abbreviate, require_integer
from onelaunch.fuse.capturable_optimizer import CapturableOptimizer
from onelaunch.fuse.captured import first_line, without_log_breaks
from onelaunch.fuse.decide import PROVEN, compiled
from onelaunch.fuse.fuse import check_model

log = logging.getLogger("onelaunch")
WARM_UP_STEPS = 2  # per shape: the first compiles, the second finds all state in place
MAX_RECORDINGS = 3  # after settings of the optimizer have changed; then the step is no longer recorded
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}

Loss = Callable[[Any, Any], torch.Tensor]


class Recorded(NamedTuple):
    """A recorded step: its graph, the tensors it reads, and the loss it writes."""

    graph: torch.cuda.CUDAGraph
    inputs: list[torch.Tensor]
    loss: torch.Tensor
    training: bool

    def takes(self, args: tuple[Any, ...]) -> bool:
        """Whether these arguments differ from the recorded ones in their values alone."""
        if len(args) != len(self.inputs):
            return False
        for given, static in zip(args, self.inputs, strict=True):
            if type(given) is not torch.Tensor or given.shape != static.shape or given.dtype != static.dtype:
                return False
        return True


def train_step(
    model: nn.Module, loss: Loss | None, optimizer: torch.optim.Optimizer, *, clip_norm: float | None = None,
    autocast: torch.dtype | str | None = None, scaler: torch.amp.GradScaler | None = None, accumulate: int = 1,
    capture: bool = True, compile: bool = True,
) -> TrainStep:  # fmt: skip
    """A function `step(*inputs, target) -> loss` that trains `model` by one batch.

    loss: a function of (output, target), such as nn.CrossEntropyLoss(). None for a model that returns its own loss: a scalar,
    or an output with the attribute or key "loss"; then all arguments of `step` go to the model.
    clip_norm: the largest global norm of the gradients, as for `torch.nn.utils.clip_grad_norm_`.
    autocast: "bf16", "fp16" or a dtype for `torch.autocast`; scaler: a `torch.amp.GradScaler` for fp16.
    accumulate: the optimizer steps on every `accumulate`-th call, with the mean gradient of the batches since its last step.
    capture: whether the step is recorded as a CUDA graph; `step.reason` says why it is not.
    compile: whether `torch.compile` compiles the forward and backward pass, with the patterns that won on every model measured.

    The loss comes back as a 0-d tensor, without waiting for the device. Learning-rate schedulers work as usual. A dict as the
    only input is passed by name if forward has these names. Gradients are None after a step.
    """
    return TrainStep(model, loss, optimizer, clip_norm, autocast, scaler, accumulate, capture, compile)


class TrainStep:
    """What `train_step` returns. `reason` is empty while steps are recorded, else it says why they are not."""

    def __init__(
        self, model: nn.Module, loss: Loss | None, optimizer: torch.optim.Optimizer, clip_norm: float | None,
        autocast: torch.dtype | str | None, scaler: torch.amp.GradScaler | None, accumulate: int, capture: bool,
        compile: bool,
    ) -> None:  # fmt: skip
        _check(model, loss, optimizer, clip_norm, scaler)
        self.model, self.loss, self.optimizer = model, loss, optimizer
        self.clip_norm, self.scaler = clip_norm, scaler
        self.accumulate = require_integer("accumulate", accumulate, "1 or more")
        if self.accumulate < 1:
            raise OnelaunchError(f"accumulate={accumulate} must be 1 or more")
        self.autocast = _autocast_dtype(autocast)
        self.device = self.parameters[0].device
        self._forward: Callable[..., torch.Tensor] = compiled(self._forward_and_loss, PROVEN if compile else None)
        self._names = _parameter_names(model)
        self._capturable = CapturableOptimizer(optimizer, self.device)
        self._recorded: dict[Any, Recorded] = {}
        self._latest: Recorded | None = None
        self._calls: dict[Any, int] = {}
        self._recordings = 0
        self._micro_step = 0
        self._pool: Any = None
        self.reason = self._uncapturable_reason(capture)
        if not self.reason:
            self._capturable.prepare()

    @property
    def parameters(self) -> list[torch.Tensor]:
        """All parameters of the optimizer, also of groups that were added later."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Train on one batch; its mean loss before the update, as a 0-d tensor on the model's device."""
        latest = self._latest  # for a network this small that the host's time counts, every microsecond here does
        if latest is not None and not kwargs and self._still_fits(latest, args):
            return self._replay(latest, args)
        if (not args and (self.loss is not None or not kwargs)) or (
            self.loss is not None and len(args) + len(kwargs) < 2
        ):
            what = "target" if args else "inputs"
            raise OnelaunchError(f"step has no {what}: pass the model's inputs and then the target, as in step(x, y)")
        update = self._micro_step == self.accumulate - 1
        if self.reason:
            loss = self._run(args, kwargs, update)
        else:
            loss = self._record_or_replay(args, kwargs, update)
        self._micro_step = 0 if update else self._micro_step + 1
        return loss

    def _still_fits(self, recorded: Recorded, args: tuple[Any, ...]) -> bool:
        unchanged = recorded.training is self.model.training and not self._capturable.settings_changed()
        return unchanged and recorded.takes(args)

    def _record_or_replay(self, args: tuple[Any, ...], kwargs: dict[str, Any], update: bool) -> torch.Tensor:
        leaves, structure = tree_flatten((args, kwargs))
        key = (update, self.model.training, structure, *map(_signature, leaves))
        if self._capturable.settings_changed():
            self._forget_recordings()
        recorded = self._recorded.get(key)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if recorded is None:
            calls = self._calls[key] = self._calls.get(key, 0) + 1
            if self.reason or calls <= WARM_UP_STEPS:
                self._capturable.upload_rates()
                with self._capturable.rates_on_device():
                    return self._run(args, kwargs, update)
            recorded = self._record(leaves, structure, update)
            if recorded is None:
                return self._run(args, kwargs, update)
            self._recorded[key] = recorded
            if not kwargs and len(tensors) == len(args) and self.accumulate == 1:
                self._latest = recorded
        return self._replay(recorded, tensors)

    def _replay(self, recorded: Recorded, tensors: Any) -> torch.Tensor:
        for static, given in zip(recorded.inputs, tensors, strict=True):
            static.copy_(given, non_blocking=True)
        self._capturable.upload_rates()
        recorded.graph.replay()
        return recorded.loss.clone()

    # One step, operation by operation: what runs before a recording, instead of one, and inside it.

    def _forward_and_loss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        if self.loss is None:
            return _own_loss(self._call_model(args, kwargs))
        return self.loss(self._call_model(args[:-1], kwargs), args[-1])

    def _call_model(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) == 1 and isinstance(args[0], Mapping) and self._names.issuperset(args[0]):
            return self.model(**args[0], **kwargs)
        return self.model(*args, **kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], update: bool) -> torch.Tensor:
        autocast = torch.autocast(
            self.device.type, dtype=self.autocast, enabled=self.autocast is not None, cache_enabled=False
        )
        with without_log_breaks(), autocast:
            loss = self._forward(args, kwargs)
        if not isinstance(loss, torch.Tensor) or loss.dim():
            what = f"has shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"is a {type(loss).__name__}"
            raise OnelaunchError(f"loss {what}: return a 0-d tensor, as with reduction='mean'")
        scaled = loss / self.accumulate if self.accumulate > 1 else loss
        try:
            (scaled if self.scaler is None else self.scaler.scale(scaled)).backward()
            if update:
                self._update()
        except BaseException:
            recording = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            if not recording:  # the gradients are those of a part of the model
                self._micro_step = 0
                self._zero_gradients()
            raise
        return loss.detach()

    def _update(self) -> None:
        if self.clip_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self._zero_gradients()

    def _zero_gradients(self) -> None:
        """With accumulation every recording adds to the same memory, so it is zeroed instead of released."""
        self.optimizer.zero_grad(set_to_none=self.accumulate == 1 or bool(self.reason))

    # Recording.

    def _record(self, leaves: list[Any], structure: Any, update: bool) -> Recorded | None:
        """The step for inputs like `leaves`, recorded but not run; None, with `reason` set, where that is impossible."""
        inputs = [leaf.to(self.device, copy=True) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        remaining = iter(inputs)
        static = [next(remaining) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(static, structure)
        graph = torch.cuda.CUDAGraph()
        gradients = [(parameter, parameter.grad) for parameter in self.parameters]
        try:
            with torch.cuda.device(self.device), self._capturable.rates_on_device():
                self._pool = self._pool or torch.cuda.graph_pool_handle()
                with capturing(graph, pool=self._pool):
                    loss = self._run(args, kwargs, update)
        except Exception as error:  # whatever a model does that a recording forbids
            torch.cuda.synchronize(self.device)
            self._stop_recording(first_line(error))
            if self.scaler is not None:  # it has marked the gradients as unscaled, but a recording runs nothing
                self.scaler._per_optimizer_states.clear()
            for parameter, gradient in gradients:  # a recording runs nothing: what was accumulated is still there
                parameter.grad = gradient
            return None
        return Recorded(graph, inputs, loss, self.model.training)

    def _forget_recordings(self) -> None:
        """The optimizer's settings are part of a recording: record anew, but not for a schedule that changes them always."""
        self._recordings += bool(self._recorded)
        self._recorded.clear()
        self._calls.clear()
        self._latest = None
        self._capturable.prepare()
        if self._recordings >= MAX_RECORDINGS:
            self._stop_recording("settings of the optimizer beside the learning rate change from step to step")

    def _stop_recording(self, reason: str) -> None:
        self.reason = reason
        self._recorded.clear()
        self._latest = None
        log.warning("train_step: steps run operation by operation: %s", reason)

    def _uncapturable_reason(self, capture: bool) -> str:
        if not capture:
            return "capture=False"
        if self.device.type != "cuda":
            return f"the model is on {self.device}, and only CUDA devices record graphs"
        if any(tensor.device != self.device for tensor in (*self.parameters, *self.model.parameters())):
            reason = "the parameters are on several devices"
        elif isinstance(self.model, nn.parallel.DistributedDataParallel):
            reason = "DistributedDataParallel exchanges gradients in hooks"
        else:
            reason = self._capturable.unsupported_reason()
        if reason:
            log.warning("train_step: steps run operation by operation: %s", reason)
        return reason


def _check(model: Any, loss: Any, optimizer: Any, clip_norm: Any, scaler: Any) -> None:
    check_model(model)
    if loss is not None and not callable(loss):
        raise ArgumentTypeError(f"loss={abbreviate(loss)} is not a function of (output, target): pass one, or None")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentTypeError(f"optimizer={abbreviate(optimizer)} is not a torch.optim.Optimizer")
    if not any(group["params"] for group in optimizer.param_groups):
        raise OnelaunchError("optimizer has no parameters: pass model.parameters() to it")
    owned = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in owned for group in optimizer.param_groups for parameter in group["params"]):
        raise OnelaunchError("optimizer holds no parameter of model: pass model.parameters() to it")
    if clip_norm is not None and (
        isinstance(clip_norm, bool) or not isinstance(clip_norm, int | float) or not clip_norm > 0
    ):
        raise OnelaunchError(f"clip_norm={abbreviate(clip_norm)} must be a number above 0, or None")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ArgumentTypeError(f"scaler={abbreviate(scaler)} is not a torch.amp.GradScaler: pass one, or None")


def _autocast_dtype(autocast: torch.dtype | str | None) -> torch.dtype | None:
    if autocast is None or isinstance(autocast, torch.dtype):
        return autocast
    if not isinstance(autocast, str) or autocast not in AUTOCAST:
        raise OnelaunchError(
            f"autocast={abbreviate(autocast)} is not known: pass 'bf16', 'fp16', a torch.dtype or None"
        )
    return AUTOCAST[autocast]


def _parameter_names(model: nn.Module) -> set[str]:
    try:
        inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        return set(inspect.signature(inner.forward).parameters)
    except ValueError:  # a scripted forward has no signature
        return set()


def _own_loss(output: Any) -> torch.Tensor:
    """The loss within what a model returned."""
    if isinstance(output, torch.Tensor):
        return output
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        raise OnelaunchError(f"loss=None, but the model returned a {type(output).__name__} without a loss: pass loss=")
    return loss


def _signature(leaf: Any) -> Any:
    """What a recording depends on: shape and type of a tensor, the value of anything else."""
    return (leaf.shape, leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
