"""The arguments of `ol.train_step` and of its steps, checked: a mistake gets one line."""

from __future__ import annotations

import inspect
import numbers
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from onelaunch.device import AUTOCAST_DTYPES
from onelaunch.errors import ArgumentTypeError, OnelaunchError, abbreviate
from onelaunch.fuse.fuse import check_model
from onelaunch.step.capturable_optimizer import parameters_of
from onelaunch.wrong_inputs import describe_input, require_no_class

ADVICE = {  # arguments of other libraries: how to say it here
    **dict.fromkeys(("criterion", "loss_fn"), "loss="),
    **dict.fromkeys(("max_norm", "max_grad_norm", "grad_clip", "gradient_clip_val", "clipnorm"), "clip_norm="),
    **dict.fromkeys(("precision", "amp", "dtype"), "autocast='bf16'"),
    **dict.fromkeys(("accumulation_steps", "accumulate_grad_batches"), "accumulate="),
    "mode": "compile='max-autotune', or no argument: every step is recorded as a CUDA graph",
    "lr": "the optimizer's: torch.optim.Adam(model.parameters(), lr=…)",
}
MAX_AUTOTUNE = "max-autotune"  # a mode of torch.compile
# By the names of the precisions and of PyTorch's types.
AUTOCAST_NAMES = {**AUTOCAST_DTYPES, **{str(dtype).removeprefix("torch."): dtype for dtype in AUTOCAST_DTYPES.values()}}


def check_arguments(
    model: Any,
    loss: Any,
    optimizer: Any,
    clip_norm: Any,
    scaler: Any,
    capture: Any,
    compile: Any,
    tune: Any,
    verify: Any,
) -> None:
    check_model(model)
    require_no_class(loss)
    if isinstance(loss, torch.optim.Optimizer):
        raise ArgumentTypeError("loss is an optimizer: the order is train_step(model, loss, optimizer)")
    if loss is not None and not callable(loss):
        raise ArgumentTypeError(f"loss={abbreviate(loss)} is not a function of (output, target): pass one, or None")
    if not isinstance(optimizer, torch.optim.Optimizer):
        remedy = "pass one, such as torch.optim.Adam(model.parameters())"
        raise ArgumentTypeError(f"optimizer={abbreviate(optimizer)} is not a torch.optim.Optimizer: {remedy}")
    if _needs_closure(optimizer):
        why = "needs a closure, to compute the loss several times per step"
        raise OnelaunchError(f"optimizer={type(optimizer).__name__} {why}: pass another, such as torch.optim.Adam(…)")
    parameters = parameters_of(optimizer)
    if not parameters:
        raise OnelaunchError("optimizer has no parameters: pass model.parameters() to it")
    if any(parameter.is_meta for parameter in parameters):
        raise OnelaunchError(f"model={type(model).__name__} is on meta, without values: create it on another device")
    owned = {id(parameter) for parameter in model.parameters()}
    if not owned:
        raise OnelaunchError(f"model={type(model).__name__} has no parameters: there is nothing to train")
    if not any(id(parameter) in owned for parameter in parameters):
        raise OnelaunchError("optimizer holds no parameter of model: pass model.parameters() to it")
    if clip_norm is not None and (
        isinstance(clip_norm, bool) or not isinstance(clip_norm, numbers.Real) or not float(clip_norm) > 0
    ):
        raise OnelaunchError(f"clip_norm={abbreviate(clip_norm)} must be a number above 0, or None")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ArgumentTypeError(f"scaler={abbreviate(scaler)} is not a torch.amp.GradScaler: pass one, or None")
    if not isinstance(capture, bool):
        raise ArgumentTypeError(f"capture={abbreviate(capture)} must be True or False")
    if not isinstance(compile, bool) and (not isinstance(compile, str) or compile != MAX_AUTOTUNE):
        raise ArgumentTypeError(f"compile={abbreviate(compile)} must be True, False or {MAX_AUTOTUNE!r}")
    if tune is not None and not isinstance(tune, bool):
        raise ArgumentTypeError(f"tune={abbreviate(tune)} must be True, False or None")
    if not isinstance(verify, bool):
        raise ArgumentTypeError(f"verify={abbreviate(verify)} must be True or False")
    if verify and not compile:
        raise OnelaunchError("verify=True compares compiled steps with plain PyTorch: leave out compile=False")


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its `step` has an argument without a default, as LBFGS's has."""
    _, *others = inspect.signature(type(optimizer).step).parameters.values()  # without self
    return any(each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD for each in others)


def check_call(args: tuple[Any, ...], kwargs: dict[str, Any], has_loss: bool) -> None:
    """Raise for a call of a step without inputs, target or tensors, or where gradients are switched off."""
    if (not args and (has_loss or not kwargs)) or (has_loss and len(args) + len(kwargs) < 2):
        if len(args) == 1 and isinstance(args[0], tuple | list) and len(args[0]) > 1:
            raise OnelaunchError("step has no target: pass the parts of a batch one by one, as in step(*batch)")
        if len(args) == 1 and isinstance(args[0], torch.utils.data.DataLoader):
            raise OnelaunchError("step takes one batch, not a DataLoader: for x, y in loader: step(x, y)")
        if kwargs and not args:
            names = ", ".join(kwargs)
            raise OnelaunchError(
                f"step({names}) has no target, which is the last argument, without a name: pass it so, as in step(x, y), or "
                "loss=None to train_step for a model that computes its own loss"
            )
        what = "target" if args else "inputs"
        raise OnelaunchError(f"step has no {what}: pass the model's inputs and then the target, as in step(x, y)")
    if not any(isinstance(leaf, torch.Tensor) for leaf in args) and has_loss:
        require_tensors(args, kwargs)
    if not torch.is_grad_enabled():
        raise OnelaunchError(
            "step needs gradients, but was called under torch.no_grad() or inference_mode(): call it outside"
        )


def require_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ArgumentTypeError for lists of numbers and NumPy arrays where none of the arguments holds a tensor."""
    leaves = tree_flatten((args, kwargs))[0]
    if not any(map(_holds_tensors, leaves)):
        given = ", ".join(map(describe_input, [*args, *kwargs.values()]))
        raise ArgumentTypeError(
            f"step({given}) has no tensors: pass tensors, as in step(torch.tensor(x), torch.tensor(y))"
        )


def _holds_tensors(leaf: Any) -> bool:
    """Whether it is a tensor, or an object such as a batch of graphs."""
    inside = getattr(leaf, "__dict__", {}).values()
    return isinstance(leaf, torch.Tensor) or callable(getattr(leaf, "to", None)) or any(map(torch.is_tensor, inside))


def autocast_dtype(autocast: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype for `torch.autocast`; raises OnelaunchError for one in which it does not compute."""
    if autocast is None or (isinstance(autocast, torch.dtype) and autocast in AUTOCAST_DTYPES.values()):
        return autocast
    if not isinstance(autocast, str) or autocast not in AUTOCAST_NAMES:
        raise OnelaunchError(
            f"autocast={abbreviate(autocast)} is not known: pass 'bf16', 'fp16', torch.bfloat16, torch.float16 or None"
        )
    return AUTOCAST_NAMES[autocast]
