"""One training step, operation by operation: what runs before a recording, instead of one, and inside it."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from onelaunch.capture.dependencies import Contexts, Dependencies, Trace, dependencies_of, forms_of, inside, is_compiled
from onelaunch.capture.dynamo import without_log_breaks
from onelaunch.capture.graph import clear_workspaces
from onelaunch.errors import is_out_of_memory
from onelaunch.fuse.verify import verify
from onelaunch.step.accumulation import Window
from onelaunch.step.candidates import Candidates
from onelaunch.step.capturable_optimizer import parameters_of
from onelaunch.step.failures import compilers_failure, explain_failure, require_scalar
from onelaunch.step.inputs import forward_arguments, other_gradients_kept, own_loss, passed_by_name, signature
from onelaunch.step.layerdrop import leaves_out_layers, no_needless_draws
from onelaunch.trial_runs import Undo

if TYPE_CHECKING:  # it imports Triton, which a machine without a GPU may lack
    from onelaunch.step.optimizer_update import OptimizerUpdate

log = logging.getLogger("onelaunch")
MAX_KINDS = 1024  # of inputs that are known to compile; more are undone and run again all the same if they fail

# A program that reads so few tensors is read once more in a fraction of a second, for guards that take half of the time.
MAX_TRACED = 64

Loss = Callable[[Any, Any], torch.Tensor]


class PlainStep:
    """Forward, loss, backward, clipping, optimizer and zero_grad, with the model and the loss compiled.

    compile: whether they are, in this `mode` of `torch.compile`. recorded: whether steps will be recorded as CUDA graphs.
    verifies: whether the first compiled step of each form is compared with plain PyTorch. tune: see `Candidates`.
    """

    def __init__(
        self, model: nn.Module, loss: Loss | None, optimizer: torch.optim.Optimizer, *, clip_norm: float | None,
        autocast: torch.dtype | None, scaler: torch.amp.GradScaler | None, accumulate: int, compile: bool,
        mode: str | None, recorded: bool, verifies: bool = False, tune: bool | None = False,
    ) -> None:  # fmt: skip
        self.model, self.loss, self.optimizer = model, loss, optimizer
        self.clip_norm, self.autocast, self.scaler = clip_norm, autocast, scaler
        self.device = parameters_of(optimizer)[0].device
        self.device_type = self.device.type
        self.window = Window(optimizer, accumulate)
        self.compiles, self.recorded, self.verifies = compile, recorded, verifies
        self.compilers_failure = ""  # why steps are not compiled, where they should be
        self.own_update: OptimizerUpdate | None = None  # in a recording it replaces the optimizer's own step
        self._gradients: dict[torch.Tensor, torch.Tensor] = {}  # which recordings with accumulation add to
        self._verified: set[int] = set()  # forms
        self._compiled: set[Any] = set()  # kinds of inputs with which a compiled step has succeeded
        self._forward_arguments = forward_arguments(model)
        self._draws_needlessly = leaves_out_layers(model)
        self._forward_and_loss = _forward_and_loss(model, loss)
        self.candidates = Candidates(self._forward_and_loss, self.device, mode, tune, recorded and compile)
        self._trace: Trace | None = None

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], update: bool) -> torch.Tensor:
        """Train on one batch. Where the compiler fails, the step is undone, and this one and all others are not compiled."""
        if not self.compiles or self._is_recording():
            return self._run(args, kwargs, update)
        leaves, structure = tree_flatten((args, kwargs))
        candidates = self.candidates
        key = (candidates.current, self.model.training, structure, *map(signature, leaves))
        if key in self._compiled:
            return self._run(args, kwargs, update)
        modules = nn.ModuleList([one for one in (self.model, self.loss) if isinstance(one, nn.Module)])
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        undo, batches = Undo(modules, parameters_of(self.optimizer), inputs), self.window.batches
        begin = time.monotonic()
        try:
            if self.verifies and candidates.current not in self._verified:
                self._verify(args, kwargs)
                self._verified.add(candidates.current)
            loss = self._run(args, kwargs, update)
        except Exception as error:
            failure = compilers_failure(error)
            if candidates.takes_turns and (failure or is_out_of_memory(error)):
                candidates.give_up(failure or "it needs more memory")
            elif failure:
                self.compilers_failure, self.compiles = failure, False
                log.warning("train_step: steps are not compiled, as the compiler failed: %s", failure)
            else:
                raise
        else:
            if len(self._compiled) < MAX_KINDS:  # an argument may be another number in every call
                self._compiled.add(key)
            candidates.has_compiled(time.monotonic() - begin)
            return loss
        undo()
        self.window.batches = batches
        return self._run(args, kwargs, update)

    @property
    def _forward(self) -> Callable[..., torch.Tensor]:
        return self.candidates.function if self.compiles else self._forward_and_loss

    def callers_autocast(self) -> torch.dtype | None:
        """The dtype of a `torch.autocast` around the call, which counts where the step has none of its own."""
        if self.autocast is not None or not torch.is_autocast_enabled(self.device_type):
            return None
        return torch.get_autocast_dtype(self.device_type)

    def begin_window(self) -> None:
        """Before the first batch of those that the optimizer steps for: a backward pass elsewhere may have left gradients."""
        if self.window.batches == 0:
            self._zero_gradients()
            self.window.begin()

    def keep_gradients(self) -> None:
        """After a recording: with accumulation all of them add to the same memory, and the last one reads it."""
        if self.window.size > 1:
            self._gradients.update({one: one.grad for one in parameters_of(self.optimizer) if one.grad is not None})

    def forget_gradients(self) -> None:
        self._gradients.clear()

    def restore_gradients(self) -> None:
        """The caller may have run `optimizer.zero_grad()`, which releases them."""
        for parameter, gradient in self._gradients.items():
            if parameter.grad is not gradient:
                gradient.zero_() if parameter.grad is None else gradient.copy_(parameter.grad)
                parameter.grad = gradient

    def release_frozen_gradients(self) -> bool:
        """Whether there were any: a gradient of zeros would still be an update, with momentum or weight decay."""
        frozen = [one for one in parameters_of(self.optimizer) if one.grad is not None and not one.requires_grad]
        for parameter in frozen:
            parameter.grad = None
        return bool(frozen)

    def abandon_window(self) -> None:
        """After an error: the gradients are those of a part of the model or of the batches."""
        self.window.batches = 0
        self._zero_gradients()
        self.forget_unscaling()

    def forget_unscaling(self) -> None:
        """The scaler has marked gradients as unscaled that no optimizer's step follows."""
        if self.scaler is not None and self.scaler.is_enabled():
            self.scaler._per_optimizer_states.clear()

    def update(self) -> None:
        if self.clip_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(parameters_of(self.optimizer), self.clip_norm)
        if self.own_update is not None and self._is_recording():
            self.own_update.launch()
        elif self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self._zero_gradients()

    def _verify(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare the compiled forward and backward pass with plain PyTorch."""
        has_tensors = isinstance(self.loss, nn.Module) and any(
            True for _ in (*self.loss.parameters(), *self.loss.buffers())
        )
        modules = nn.ModuleDict({"model": self.model, "loss": self.loss}) if has_tensors else self.model  # type: ignore[dict-item]

        def compiled(*args: Any, **kwargs: Any) -> torch.Tensor:
            return self._forward(*self._by_name(args, kwargs))

        def plain(*args: Any, **kwargs: Any) -> torch.Tensor:
            return self._forward_and_loss(*self._by_name(args, kwargs))

        verify("train_step", modules, compiled, plain, args, kwargs, self._inside)

    def dependencies(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Dependencies | None:
        """What forward and loss read beside these arguments; None where Dynamo does not know it, or not yet."""
        scope = self._scope(args, kwargs)
        with self._inside() as contexts:
            found = dependencies_of(self._forward, scope, self.device, contexts) if self.compiles else None
            if found is None or len(found.tensors) <= MAX_TRACED:
                self._trace = self._trace or Trace(self._forward_and_loss)
                found = self._trace.dependencies(scope, self.device, contexts) or found
        return found

    def is_compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a step compiles nothing; true where it should not."""
        with self._inside():
            return not self.compiles or is_compiled(self._forward, self._scope(args, kwargs))

    @property
    def uncompiled_reason(self) -> str:
        """Why steps, or some of them, are not compiled, where they should be."""
        if self.compilers_failure or not self.compiles:
            return self.compilers_failure
        limit = torch._dynamo.config.recompile_limit
        if forms_of(self._forward) < limit:
            return ""
        return f"torch.compile has made {limit} forms, its limit, as what they read or take changes; others are not compiled"

    @property
    def unknown_reason(self) -> str:
        """Why there are no `dependencies`."""
        return "" if self._trace is None else self._trace.reason

    @contextlib.contextmanager
    def _inside(self) -> Iterator[Contexts]:
        """What forward and loss run in."""
        dtype = self.autocast or self.callers_autocast()
        contexts: list[Any] = []
        if dtype is not None:
            contexts.append(functools.partial(torch.autocast, self.device_type, dtype=dtype, cache_enabled=False))
        if self._draws_needlessly and self.compiles:
            contexts.append(no_needless_draws)
        with inside(contexts):
            yield contexts

    def _scope(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        args, kwargs = self._by_name(args, kwargs)
        return {"args": args, "kwargs": kwargs}

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], update: bool) -> torch.Tensor:
        self._release_workspaces()
        with without_log_breaks(), self._inside():
            try:
                loss = self._forward(*self._by_name(args, kwargs))
            except Exception as error:
                if not self._is_recording():
                    explain_failure(error, self.model, self.loss, self._call_model, args, kwargs)
                raise
        require_scalar(loss, self.loss is not None)
        scaled = loss / self.window.size if self.window.size > 1 else loss
        self._release_workspaces()
        try:
            with other_gradients_kept(loss, parameters_of(self.optimizer)):
                (scaled if self.scaler is None else self.scaler.scale(scaled)).backward()
            if update:
                self.update()
        except BaseException:
            if not self._is_recording():
                self.abandon_window()
            raise
        return loss.detach()

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as forward takes them: the values of a dict that is the only input by their names."""
        inputs, target = (args, ()) if self.loss is None else (args[:-1], args[-1:])
        if passed_by_name(inputs, self._forward_arguments, kwargs):
            return target, dict(**inputs[0], **kwargs)
        return args, kwargs

    def _call_model(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if passed_by_name(args, self._forward_arguments, kwargs):
            return self.model(**args[0], **kwargs)
        return self.model(*args, **kwargs)

    def _zero_gradients(self) -> None:
        """With accumulation every recording adds to the same memory, so it is zeroed instead of released."""
        self.optimizer.zero_grad(set_to_none=self.window.size == 1 or not self.recorded)

    def _release_workspaces(self) -> None:
        """Before each pass: autograd's thread has a cuBLAS workspace of its own, and a recording would hold both of 32 MiB."""
        if self.recorded:
            clear_workspaces()

    def _is_recording(self) -> bool:
        return self.device_type == "cuda" and torch.cuda.is_current_stream_capturing()


def _forward_and_loss(model: nn.Module, loss: Loss | None) -> Callable[..., torch.Tensor]:
    """The part of a step that is compiled, as a function of its arguments alone."""

    def forward_and_loss(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        if loss is None:
            return own_loss(model(*args, **kwargs))
        return loss(model(*args[:-1], **kwargs), args[-1])

    return forward_and_loss
