"""Turns the arguments of `fit` into a checked Run: tensors on the model's device, with shapes and labels that match it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from onelaunch.engines.contract import Run
from onelaunch.errors import ArgumentTypeError, OnelaunchError, first_line
from onelaunch.run.generators import seeded
from onelaunch.run.named_loss import with_named_loss
from onelaunch.run.network import BatchNorm, Network, NotAnMlpError
from onelaunch.run.objective import own_features
from onelaunch.run.options import CUSTOM_LOSS, LOSSES
from onelaunch.run.parse import MisfitError, parse_network
from onelaunch.run.spec import Spec
from onelaunch.train.arrays import check_finite, check_lengths, to_tensor
from onelaunch.train.hold_out import hold_out
from onelaunch.train.labels import Names, encode, targets_of
from onelaunch.train.loaders import all_rows, open_loader
from onelaunch.train.memory import check_room_to_train
from onelaunch.train.row_weights import row_weights_of
from onelaunch.trial_runs import evaluation

MAX_COPIED_BYTES = 2**26  # of x: from a smaller one, the rows that are not held out are copied
MAX_DEVICE_FRACTION = 0.6  # of the device's free memory that x may take: engines make copies in other layouts


def make_run(
    model: nn.Module, x: Any, y: Any, validation: Any, options: dict[str, Any], *, sample_weight: Any = None,
    names: Names | None = None,
) -> Run:  # fmt: skip
    """The Run of these arguments, with everything checked that can be checked before the first step.

    `options` are the fields of Spec except `rows`. `names`: those of the classes, where y and the validation targets are
    their numbers already. Raises OnelaunchError for a mistake.
    """
    if torch.is_inference_mode_enabled():
        raise OnelaunchError("fit cannot train under torch.inference_mode(): call it outside")
    parameters = _trainable(model)
    device = parameters[0].device
    if options.get("loss") == CUSTOM_LOSS:
        raise OnelaunchError(
            f"loss={CUSTOM_LOSS!r} is not known: pass the function itself, or one of {', '.join(LOSSES)}"
        )
    loader, rows = x if isinstance(x, DataLoader) else None, None
    if loader is not None:
        x, y, options, rows = open_loader(loader, y, options)
    if y is None:
        raise ArgumentTypeError("y is missing: pass one target per row, or a DataLoader as x")
    several = x[1:] if isinstance(x, tuple) else ()
    y, found_names = encode("y", y)
    known = found_names  # the names that the validation targets must have too
    names = names or found_names
    x, y = to_tensor("x", x[0] if isinstance(x, tuple) and x else x), to_tensor("y", y)
    more_x = tuple(to_tensor(f"x[{number}]", part) for number, part in enumerate(several, 1))
    check_lengths("x", x, "y", y)
    for number, part in enumerate(more_x, 1):
        check_lengths(f"x[{number}]", part, "y", y)
    options = options if loader is not None else with_named_loss(options, y)
    loss_function = loss if callable(loss := options.get("loss")) else None
    spec = Spec(rows=rows or len(x), **{**options, "loss": CUSTOM_LOSS} if loss_function else options)
    if device.type == "cpu":
        check_room_to_train(sum(parameter.numel() for parameter in parameters if not is_lazy(parameter)), spec)
    if loader is not None or more_x or loss_function:
        what = "x is a DataLoader" if loader is not None else "x has several inputs" if more_x else "loss is a function"
        network, no_network_reason = None, what
    else:
        network, no_network_reason = _network(model, x, spec)
    dtype = torch.float32 if network else parameters[0].dtype
    x = _features("x", x, network, dtype)
    more_x = tuple(_features(f"x[{number}]", part, None, dtype) for number, part in enumerate(more_x, 1))
    output = _output_shape(model, network, [part[:2].to(device) for part in (x, *more_x)], spec, dtype)
    y = targets_of("y", y, spec, output, dtype, names)
    weight = None if sample_weight is None else to_tensor("sample_weight", sample_weight)
    if weight is not None and (loader is not None or loss_function):
        other = "a DataLoader" if loader is not None else "a loss function of your own"
        raise OnelaunchError(f"sample_weight does not go with {other}: weigh the rows in the loss function")
    if spec.class_weight is not None and loader is not None:
        raise OnelaunchError(
            "class_weight does not go with a DataLoader: pass arrays, or a loss function that has weights"
        )
    train_rows: torch.Tensor | None = None
    more_validation: tuple[torch.Tensor, ...] = ()
    if isinstance(validation, float | np.floating):
        if loader is not None:
            raise OnelaunchError(
                f"validation={validation} cannot hold rows out of a DataLoader: pass a pair (x, y) or a DataLoader"
            )
        if weight is not None and len(weight) != len(x):
            raise OnelaunchError(f"sample_weight has {len(weight)} entries, x {len(x)} rows: pass one weight per row")
        train, held = hold_out(len(x), float(validation), spec.seed, y if spec.loss == "cross_entropy" else None)
        validation = (x[held].to(device), y[held].to(device))
        more_validation = tuple(part[held].to(device) for part in more_x)
        spec = dataclasses.replace(spec, rows=len(train))
        if device.type == "cpu" and x.nbytes > MAX_COPIED_BYTES:
            train_rows = train  # x stays where it is
        else:
            x, y, weight = x[train], y[train], None if weight is None else weight[train]
            more_x = tuple(part[train] for part in more_x)
    elif validation is not None:
        validation, more_validation = _validation(validation, (x, *more_x), spec, network, output, dtype, known)
        validation = tuple(tensor.to(device) for tensor in validation)
        more_validation = tuple(tensor.to(device) for tensor in more_validation)
    elif spec.metrics or spec.early_stopping:
        what = "early_stopping" if spec.early_stopping else "metrics"
        raise OnelaunchError(f"{what} needs validation rows: pass validation=0.1, or validation=(x, y)")
    x, *others = (part if stays_on_host(part, device) else part.to(device) for part in (x, *more_x))
    y, more_x = y.to(device), tuple(others)
    outputs = int(np.prod(output))
    weights = row_weights_of(spec, y, outputs, names, weight, train_rows)
    check_batch_norm(network, spec)
    return Run(
        spec, model, network, no_network_reason, x, y, validation, outputs, weights, train_rows, more_x, more_validation,
        loss_function, loader, names,
    )  # fmt: skip


def network_of(run: Run) -> tuple[Network | None, str]:
    """The run's model as an MLP, read anew, or None and the reason."""
    if run.loader is not None or run.more_x or run.loss_function is not None:
        return None, run.no_network_reason
    return _network(run.model, run.x, run.spec)


def read_again(run: Run) -> Run:
    """The run of a model that callbacks have changed. Raises OnelaunchError if the model does not fit the run any more."""
    parameters = _trainable(run.model)
    if parameters[0].device != run.device:
        raise OnelaunchError(f"the model is on {parameters[0].device} now, its rows on {run.device}: leave it there")
    network, reason = network_of(run)
    if network is not None:
        _features("x", run.x[:2], network, torch.float32)
        if network.outputs != run.outputs:
            outputs = f"{network.outputs} outputs now, and had {run.outputs}"
            raise OnelaunchError(f"the model has {outputs}: leave their number")
        check_batch_norm(network, run.spec)
        others = {tensor.dtype for tensor in (run.x, run.y, *(run.validation or ()))}
        if others - {torch.float32, torch.uint8, torch.int64} or run.x.dtype == torch.int64:
            network, reason = None, "x or y has another type than for an MLP, which the model was not at first"
    return dataclasses.replace(run, network=network, no_network_reason=reason)


def _network(model: nn.Module, x: torch.Tensor, spec: Spec) -> tuple[Network | None, str]:
    """The model as an MLP, or None and the reason.

    Rows of a shape that does not fit an MLP are a mistake, which `_features` names: the network then is the MLP.
    """
    shape = tuple(x.shape[1:])
    last = min(spec.steps_per_epoch, spec.total_steps) - 1
    try:
        network = parse_network(model, shape, sorted({spec.rows_of(0), spec.rows_of(last), 2}))
    except MisfitError as misfit:
        try:
            network = parse_network(model)
        except NotAnMlpError as reason:
            return None, str(reason)
        if shape and int(np.prod(shape)) == network.inputs and (network.flattens or len(shape) == 1):
            return None, str(misfit)
    except NotAnMlpError as reason:
        return None, str(reason)
    vectors = not network.flattens and x.ndim > 2 and x.shape[-1] == network.inputs
    if vectors and spec.loss != "cross_entropy":
        return None, f"x has rows of shape {tuple(x.shape[1:])}, and the model takes each of their vectors"
    return network, ""


def stays_on_host(x: torch.Tensor, device: torch.device) -> bool:
    """Whether rows on the host are too large for what is free of a CUDA device's memory, and are streamed from the host."""
    if device.type != "cuda" or x.device.type != "cpu":
        return False
    return x.nbytes > MAX_DEVICE_FRACTION * torch.cuda.mem_get_info(device)[0]


def _trainable(model: Any) -> list[nn.Parameter]:
    """The model's parameters that require a gradient; raises OnelaunchError if they cannot be trained."""
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model={model!r:.80} is not an nn.Module: pass for example nn.Sequential(...)")
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise OnelaunchError("model has no parameter to train (none has requires_grad=True)")
    if any(not is_lazy(p) and (p.is_inference() or p.is_meta) for p in parameters):
        raise OnelaunchError("model was made under torch.inference_mode() or on the meta device: make it outside")
    for name, parameter in model.named_parameters():
        if not is_lazy(parameter) and any(
            n > 1 and not step for n, step in zip(parameter.shape, parameter.stride(), strict=True)
        ):
            raise OnelaunchError(
                f"model: {name} is an expanded tensor, whose values share memory: pass its .contiguous()"
            )
    devices = {p.device for p in parameters}
    if len(devices) > 1:
        raise OnelaunchError(f"model is on several devices ({', '.join(map(str, devices))}): move it to one")
    return parameters


def _features(argument: str, x: torch.Tensor, network: Network | None, dtype: torch.dtype) -> torch.Tensor:
    """x as the engines take it (see Run), checked for finite values and for the width of the first Linear."""
    if x.is_floating_point():
        x = x.to(dtype)
        check_finite(argument, x)
    if network is None:
        return x
    if x.dtype != torch.uint8 and not x.is_floating_point():
        x = x.to(dtype)
    shape = tuple(x.shape[1:])
    if not shape:
        raise OnelaunchError(f"{argument} has one number per row: pass {argument}.reshape(-1, 1)")
    if not network.flattens and len(shape) != 1:
        raise OnelaunchError(f"{argument} has rows of shape {shape}: put nn.Flatten() first, or flatten the rows")
    if (values := int(np.prod(shape))) != network.inputs:
        difference = f"has {values} values per row, the model's first Linear takes {network.inputs}"
        raise OnelaunchError(f"{argument} {difference}: make the two equal")
    return x.contiguous()


def _output_shape(
    model: nn.Module, network: Network | None, inputs: list[torch.Tensor], spec: Spec, dtype: torch.dtype
) -> tuple[int, ...]:
    """The shape of one row of the model's output, from its layers or from a trial of two rows in evaluation mode.

    With a loss function of the user's, the model may return anything, and the shape is empty.
    """
    if network is not None:
        return (network.outputs,)
    x = inputs[0]
    devices = [x.device] if x.device.type == "cuda" else []
    try:
        # Lazy modules draw their weights here, from the run's seed; the state of the user's generator does not change.
        with evaluation(model), seeded(spec.seed, devices), torch.autocast(x.device.type, enabled=False):
            output = model(*(own_features(part, dtype) for part in inputs))
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        shapes = ", ".join(str(tuple(part.shape[1:])) for part in inputs)
        raise OnelaunchError(f"model cannot take x with rows of shape {shapes}: {first_line(error)}") from error
    if spec.loss == CUSTOM_LOSS:
        return ()
    if not isinstance(output, torch.Tensor) or output.shape[:1] != x[:2].shape[:1]:
        what = list(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise OnelaunchError(f"model must return one tensor with one row per sample, not {what} for {len(x[:2])} rows")
    if spec.loss == "cross_entropy" and output.ndim != 2:
        raise OnelaunchError(f"loss='cross_entropy' needs outputs [rows, classes], the model has {list(output.shape)}")
    return tuple(output.shape[1:])


def _validation(
    validation: Any, inputs: tuple[torch.Tensor, ...], spec: Spec, network: Network | None, output: tuple[int, ...],
    dtype: torch.dtype, known: Names | None,
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]:  # fmt: skip
    """((x, y), further inputs) of the validation rows."""
    if isinstance(validation, DataLoader):
        validation = all_rows(validation, spec.seed)
    if not isinstance(validation, tuple | list) or len(validation) != 2:
        raise ArgumentTypeError(
            "validation must be a fraction of the rows, such as 0.1, or a pair (x, y), such as (test_x, test_y)"
        )
    if validation[0] is None or validation[1] is None:  # test_x and test_y of a data set without a test part
        raise ArgumentTypeError(
            "validation holds None: pass rows and their targets (onelaunch.data.split holds some out), or validation=None"
        )
    parts = validation[0] if isinstance(validation[0], tuple) else (validation[0],)
    if len(parts) != len(inputs):
        raise OnelaunchError(f"validation[0] has {len(parts)} inputs, x has {len(inputs)}: pass the same number")
    names = ("validation[0]", "validation[1]")
    labels, found = encode(names[1], validation[1], known)
    if (found is None) != (known is None):
        raise ArgumentTypeError(f"{names[1]} and y must both hold class names, or both numbers")
    y = to_tensor(names[1], labels)
    checked = []
    for given, x in zip(parts, inputs, strict=True):
        part = to_tensor(names[0], given)
        check_lengths(names[0], part, names[1], y)
        part = _features(names[0], part, network, dtype)
        if network is None and part.shape[1:] != x.shape[1:]:
            raise OnelaunchError(f"{names[0]} has rows of shape {tuple(part.shape[1:])}, x of {tuple(x.shape[1:])}")
        if (part.dtype == torch.uint8) != (x.dtype == torch.uint8):
            raise OnelaunchError(
                f"{names[0]} is {part.dtype} and x is {x.dtype}: uint8 means value / 255, so pass the same type for both"
            )
        checked.append(part)
    return (checked[0], targets_of(names[1], y, spec, output, dtype, known)), tuple(checked[1:])


def check_batch_norm(network: Network | None, spec: Spec) -> None:
    """Raise if a batch has one row, which BatchNorm1d cannot normalise: PyTorch would fail in the middle of the run."""
    last = min(spec.steps_per_epoch, spec.total_steps) - 1
    normalises = network is not None and any(isinstance(layer, BatchNorm) for layer in network.layers)
    if normalises and spec.rows_of(last) == 1:
        raise OnelaunchError(
            f"batch_size={spec.batch_size} leaves a batch of one row among {spec.rows}, which BatchNorm1d cannot "
            "normalise: pass drop_last=True or another batch_size"
        )
