"""`ol.fuse(model)`: the same module, compiled with our kernels where they win."""

from __future__ import annotations

import contextlib
import copyreg
import sys
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from onelaunch.errors import ArgumentTypeError, OnelaunchError, abbreviate
from onelaunch.fuse import backend
from onelaunch.fuse import verify as verification
from onelaunch.fuse.captured import uncompiled_call
from onelaunch.fuse.decide import UNMEASURED, Choice, compiled, decide
from onelaunch.trial_runs import device_of, kept_attributes
from onelaunch.wrong_inputs import require_known_names, require_possible

Model = TypeVar("Model", bound=nn.Module)


class FusedCall:
    """Calls a module through `torch.compile`. Stored as the module's own `_call_impl`, where `nn.Module.__call__` looks.

    A deep copy or an unpickled module has its own FusedCall, which compiles anew: compiled code is neither copied nor stored.
    """

    _called = False

    def __init__(self, module: nn.Module, choice: Choice = UNMEASURED, verifies: bool = False) -> None:
        self.module, self.choice, self.verifies = module, choice, verifies
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # an outer compiler has the whole program
            return type(self.module)._call_impl(self.module, *args, **kwargs)
        # A shallow copy of the module, or a replica of DataParallel, has the module's FusedCall: it gets its own.
        caller = sys._getframe(1).f_locals.get("self")
        if caller is not self.module and isinstance(caller, nn.Module) and vars(caller).get("_call_impl") is self:
            own = caller.__dict__["_call_impl"] = FusedCall(caller, self.choice, self.verifies)
            return own(*args, **kwargs)
        if self.choice.patterns is None:
            return type(self.module)._call_impl(self.module, *args, **kwargs)
        if self.module._backward_hooks and self.module._is_full_backward_hook is None:  # the model's is set
            self.module._is_full_backward_hook = True
        if self._compiled is None:
            self._compiled = compiled(uncompiled_call(self.module), *self.choice)
        if not self._called:
            self._called = True
            if device_of(args, kwargs) == torch.device("cpu"):
                backend.log_compiling("fuse", type(self.module).__name__)
        if self.verifies:
            verification.verify("fuse", self.module, self._compiled, uncompiled_call(self.module), args, kwargs)
            self.verifies = False
        return self._compiled(*args, **kwargs)

    def decide(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run in the way that is fastest for these inputs."""
        call = uncompiled_call(self.module)
        self.choice, self._compiled = decide(call, self.module, args, kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_compiled": None, "_called": False}


def fuse(model: Model, *inputs: Any, verify: bool = False, **named_inputs: Any) -> Model:
    """`model` as a new module of the same class that runs compiled, over the same parameters, buffers, children and hooks.

    With example inputs on a CUDA device the whole model is timed as it will run: uncompiled, compiled, and compiled with our
    patterns; in evaluation without gradients, and also as a CUDA graph. The fastest is kept, and remembered on disk.
    Without example inputs nothing is measured. Raises OnelaunchError for example inputs that the model cannot take.

    verify: the first call also computes outputs and gradients with plain PyTorch in float32, without dropout, and raises
    OnelaunchError if what was compiled computes something else.
    """
    if not isinstance(verify, bool):
        raise ArgumentTypeError(f"verify={abbreviate(verify)} must be True or False")
    check_model(model)
    if is_fused(model):
        return model
    # Not copy.copy, which leaves out what a model's __getstate__ leaves out, nor its own __new__: that of an fx.GraphModule
    # makes another class.
    fused = object.__new__(type(model))
    # So the dicts of parameters, buffers, children and hooks are the model's.
    fused.__dict__.update({name: _rebound(value, model, fused) for name, value in model.__dict__.items()})
    for name in copyreg._slotnames(type(model)):  # type: ignore[attr-defined]  # of `__slots__` in all its base classes
        with contextlib.suppress(AttributeError):  # one without a value
            object.__setattr__(fused, name, _rebound(object.__getattribute__(model, name), model, fused))
    call = FusedCall(fused, verifies=verify)
    fused.__dict__["_call_impl"] = call
    if inputs or named_inputs:
        require_known_names("fuse", model, named_inputs)
        with kept_attributes(model):  # a closure of forward may change them, instead of those of `fused`
            require_possible("fuse", uncompiled_call(fused), fused, inputs, named_inputs)
            call.decide(inputs, named_inputs)
    return fused


def _rebound(value: Any, model: nn.Module, fused: nn.Module) -> Any:
    """`value`; if it is a method bound to the model, as of `self.forward = self.run`, the same one bound to the fused model."""
    if isinstance(value, types.MethodType) and value.__self__ is model:
        return types.MethodType(value.__func__, fused)
    return value


def is_fused(model: nn.Module) -> bool:
    return isinstance(vars(model).get("_call_impl"), FusedCall)


def check_model(model: Any) -> None:
    """Raise OnelaunchError for what torch.compile cannot read."""
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model is a {type(model).__name__}: pass a torch.nn.Module")
    name = type(model).__name__
    if not hasattr(model, "_modules"):
        raise ArgumentTypeError(f"model is a {name} without modules: call super().__init__() in __init__")
    if isinstance(model, torch.jit.ScriptModule):
        raise OnelaunchError("model is a TorchScript module, which torch.compile cannot read: pass the nn.Module")
    if getattr(model.forward, "__func__", None) is nn.Module.forward:
        called = type(model).__call__ is not nn.Module.__call__
        remedy = "rename its __call__ to forward" if called else "pass a module that has, such as nn.Sequential"
        raise ArgumentTypeError(f"model is a {name}, which has no forward: {remedy}")
    if any(nn.parameter.is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        raise OnelaunchError(f"model is a {name} with parameters that are not initialised: call it on a batch first")
