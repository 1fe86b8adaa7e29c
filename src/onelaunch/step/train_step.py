"""`ol.train_step`: forward, loss, backward, clipping, optimizer and zero_grad as one CUDA graph per input shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from onelaunch.argument_names import advise_by
from onelaunch.errors import OnelaunchError, require_integer
from onelaunch.fuse import backend
from onelaunch.step.arguments import ADVICE, MAX_AUTOTUNE, autocast_dtype, check_arguments, check_call
from onelaunch.step.capturable_optimizer import CapturableOptimizer, parameters_of
from onelaunch.step.inputs import mark_rows_dynamic
from onelaunch.step.plain_step import Loss, PlainStep
from onelaunch.step.recordings import Recordings, uncapturable_reason

OWNERS = {"model": nn.Module, "optimizer": torch.optim.Optimizer}
BUILT = ("_capturable", "_plain", "_recordings", "_window", "_started")  # the attributes that `TrainStep._build` makes


@advise_by(ADVICE)
def train_step(
    model: nn.Module, loss: Loss | None, optimizer: torch.optim.Optimizer, *, clip_norm: float | None = None,
    autocast: torch.dtype | str | None = None, scaler: torch.amp.GradScaler | None = None, accumulate: int = 1,
    capture: bool = True, compile: bool | str = True, tune: bool | None = None, verify: bool = False,
) -> TrainStep:  # fmt: skip
    """A function `step(x, …, target) -> loss` that trains `model` by one batch; the target is the last argument.

    loss: a function of (output, target), such as nn.CrossEntropyLoss(). None for a model that returns its own loss: a scalar,
    or an output with the attribute or key "loss"; then all arguments of `step` go to the model.
    clip_norm: the largest global norm of the gradients, as for `torch.nn.utils.clip_grad_norm_`.
    autocast: "bf16", "fp16" or a dtype for `torch.autocast`; None for that of a `torch.autocast` around the call, if any.
    scaler: a `torch.amp.GradScaler` for fp16.
    accumulate: the optimizer steps on every `accumulate`-th call, with the mean gradient of the batches since its last step;
    `step.flush()` lets it step on fewer, as at the end of an epoch.
    capture: whether the step is recorded as a CUDA graph; `step.reason` says why it is not.
    compile: whether `torch.compile` compiles the forward and backward pass, with our patterns where they match;
    "max-autotune": it also times several kernels for each product, which takes minutes.
    tune: whether a step without our patterns is compiled as well, and the faster of both kept: True for at once, None for when
    the run has lasted as long as compiling took, False for never: then no clock decides about the bits of a result. Whole steps
    are compared, all of which train; the decision is kept on disk. `step.choice` says what was chosen, and why.
    verify: the first call also computes loss and gradients with plain PyTorch in float32, without dropout, and raises
    OnelaunchError, which names the worst parameter, if compiled ones differ by more than rounding.

    The loss comes back as a 0-d tensor, without waiting for the device. Learning-rate schedulers work as usual. A dict as the
    only input is passed by name if forward has these names, or has `**kwargs` for some of them and all it needs is there. A
    step begins without gradients and leaves none; parameters that the optimizer does not have keep theirs.
    """
    return TrainStep(model, loss, optimizer, clip_norm, autocast, scaler, accumulate, capture, compile, tune, verify)


class TrainStep:
    """What `train_step` returns."""

    def __init__(
        self, model: nn.Module, loss: Loss | None, optimizer: torch.optim.Optimizer, clip_norm: float | None,
        autocast: torch.dtype | str | None, scaler: torch.amp.GradScaler | None, accumulate: int, capture: bool,
        compile: bool | str, tune: bool | None, verify: bool,
    ) -> None:  # fmt: skip
        check_arguments(model, loss, optimizer, clip_norm, scaler, capture, compile, tune, verify)
        if require_integer("accumulate", accumulate, "1 or more") < 1:
            raise OnelaunchError(f"accumulate={accumulate} must be 1 or more")
        self._arguments = (
            model, loss, optimizer, None if clip_norm is None else float(clip_norm), autocast_dtype(autocast), scaler,
            int(accumulate), capture, compile, tune, verify,
        )  # fmt: skip
        self._build()

    def _build(self) -> None:
        model, loss, optimizer, clip_norm, autocast, scaler, accumulate, capture, compile, tune, verify = (
            self._arguments
        )
        self._capturable = CapturableOptimizer(optimizer, parameters_of(optimizer)[0].device)
        reason = uncapturable_reason(model, self._capturable) if capture else "capture=False"
        self._plain = PlainStep(
            model, loss, optimizer, clip_norm=clip_norm, autocast=autocast, scaler=scaler, accumulate=accumulate,
            compile=bool(compile), recorded=not reason, verifies=verify, tune=tune,
            mode="max-autotune-no-cudagraphs" if compile == MAX_AUTOTUNE else None,  # the step's own graph replaces them
        )  # fmt: skip
        self._recordings = Recordings(self._plain, self._capturable, reason)
        self._window = self._plain.window
        self._started = False

    def __getstate__(self) -> dict[str, Any]:
        """A copy compiles and records anew, and begins without batches that wait for the optimizer."""
        return {"_arguments": self._arguments}

    def __getattr__(self, name: str) -> Any:
        """A copy is built when it is first used: while it is made, its model may still be empty, as one that has the step."""
        if name not in BUILT or "_arguments" not in vars(self):
            owners = [
                f"step.{owner}" for owner, kind in OWNERS.items() if not name.startswith("_") and hasattr(kind, name)
            ]
            hint = f": use that of {' and '.join(owners)}" if owners else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")
        self._build()
        return getattr(self, name)

    @property
    def model(self) -> nn.Module:
        return self._plain.model

    @property
    def loss(self) -> Loss | None:
        return self._plain.loss

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._plain.optimizer

    @property
    def accumulate(self) -> int:
        return self._window.size

    @property
    def reason(self) -> str:
        """Why steps are slower than they could be: not recorded, or not compiled; empty while they are both."""
        uncompiled = self._plain.uncompiled_reason
        return "; ".join(filter(None, (self._recordings.reason, uncompiled and f"not compiled: {uncompiled}")))

    @property
    def choice(self) -> str:
        """Which form of the compiled step was chosen, and why; empty until it is, and where there is none to choose from."""
        return self._plain.candidates.choice

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Train on one batch; its mean loss before the update, as a 0-d tensor on the model's device."""
        recordings = self._recordings
        latest = recordings.latest  # the host's time counts for small networks: every microsecond here does
        if latest is not None and not kwargs:
            ring = latest.ring
            if (
                ring is not None and ring.takes(args) and self._capturable.ready() and latest.dependencies.hold()
            ):  # fmt: skip
                return latest.replay_in_place(ring, args)
        check_call(args, kwargs, self.loss is not None)
        self._require_unbroken_window()
        if self._plain.compiles and self._plain.device_type == "cpu":
            if not self._started:
                backend.log_compiling("train_step", "the step", ": compile=False starts at once")
            mark_rows_dynamic(args, kwargs)
        self._started = True
        update = self._window.ends
        loss = recordings.run(args, kwargs, update)
        self._window.add_batch()
        return loss

    def flush(self) -> None:
        """Let the optimizer step now if batches wait for it (`accumulate`), with their mean gradient."""
        if not self._window.batches:
            return
        self._require_unbroken_window()
        if torch.is_inference_mode_enabled():
            raise OnelaunchError("step.flush() was called under torch.inference_mode(): call it outside")
        self._recordings.follow_settings()
        self._plain.restore_gradients()
        try:
            with torch.no_grad(), self._recordings.operations():
                for parameter in parameters_of(self.optimizer):
                    if parameter.grad is not None:
                        parameter.grad.mul_(self.accumulate / self._window.batches)
                self._plain.update()
        except BaseException:
            self._plain.abandon_window()
            raise
        self._window.batches = 0

    def __repr__(self) -> str:
        loss = getattr(self.loss, "__name__", None if self.loss is None else type(self.loss).__name__)
        recordings = self._recordings
        runs = f"not recorded: {recordings.reason}" if recordings.reason else f"{len(recordings)} recorded"
        if uncompiled := self._plain.uncompiled_reason:
            runs += f"; not compiled: {uncompiled}"
        return f"TrainStep({type(self.model).__name__}, {loss}, {type(self.optimizer).__name__}; {runs})"

    def _require_unbroken_window(self) -> None:
        if self._window.other_waits():
            raise OnelaunchError(
                f"another step of this {type(self.optimizer).__name__} has batches that wait for it (accumulate): call its "
                "flush() first"
            )
        if self._window.is_broken():
            self._plain.abandon_window()
            raise OnelaunchError(
                f"optimizer.step() was called between the {self.accumulate} batches of accumulate: call step.flush() instead"
            )
