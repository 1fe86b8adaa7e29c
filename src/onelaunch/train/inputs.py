"""Turns the arguments of `fit` into a checked Run: tensors on the model's device, with shapes and labels that match it."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from onelaunch.engines.contract import Run
from onelaunch.errors import ArgumentTypeError, OnelaunchError
from onelaunch.run.network import BatchNorm, Network, NotAnMlpError
from onelaunch.run.objective import as_features
from onelaunch.run.parse import MisfitError, parse_network
from onelaunch.run.spec import Spec
from onelaunch.train.hold_out import hold_out
from onelaunch.train.labels import Names, encode, targets_of
from onelaunch.train.row_weights import row_weights_of

MAX_COPIED_BYTES = 2**26  # of x: from a smaller one, the rows that are not held out are copied
CHECKED_VALUES = 2**24  # values per piece of the check for NaN


def make_run(
    model: nn.Module, x: Any, y: Any, validation: Any, options: dict[str, Any], *, sample_weight: Any = None
) -> Run:
    """The Run of these arguments, with everything checked that can be checked before the first step.

    `options` are the fields of Spec except `rows`. Raises OnelaunchError for a mistake.
    """
    if torch.is_inference_mode_enabled():
        raise OnelaunchError("fit cannot train under torch.inference_mode(): call it outside")
    parameters = _trainable(model)
    device = parameters[0].device
    y, names = encode("y", y)
    x, y = to_tensor("x", x), to_tensor("y", y)
    _check_lengths("x", x, "y", y)
    spec = Spec(rows=len(x), **options)
    network, no_network_reason = _network(model, x, spec)
    dtype = torch.float32 if network else parameters[0].dtype
    x = _features("x", x, network, dtype)
    output = _output_shape(model, network, x[:2].to(device), spec, dtype)
    y = targets_of("y", y, spec, output, dtype, names)
    weight = None if sample_weight is None else to_tensor("sample_weight", sample_weight)
    train_rows: torch.Tensor | None = None
    if isinstance(validation, float | np.floating):
        if weight is not None and len(weight) != len(x):
            raise OnelaunchError(f"sample_weight has {len(weight)} entries, x {len(x)} rows: pass one weight per row")
        train, held = hold_out(len(x), float(validation), spec.seed, y if spec.loss == "cross_entropy" else None)
        validation = (x[held].to(device), y[held].to(device))
        spec = dataclasses.replace(spec, rows=len(train))
        if device.type == "cpu" and x.nbytes > MAX_COPIED_BYTES:
            train_rows = train  # x stays where it is
        else:
            x, y, weight = x[train], y[train], None if weight is None else weight[train]
    elif validation is not None:
        validation = _validation(validation, x, spec, network, output, dtype, names)
        validation = tuple(tensor.to(device) for tensor in validation)
    elif spec.metrics or spec.early_stopping:
        what = "early_stopping" if spec.early_stopping else "metrics"
        raise OnelaunchError(f"{what} needs validation rows: pass validation=0.1, or validation=(x, y)")
    x, y = x.to(device), y.to(device)
    outputs = int(np.prod(output))
    weights = row_weights_of(spec, y, outputs, names, weight, train_rows)
    _check_batch_norm(network, spec)
    return Run(spec, model, network, no_network_reason, x, y, validation, outputs, weights, train_rows, classes=names)


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


def to_tensor(argument: str, value: Any) -> torch.Tensor:
    """A dense tensor of real numbers from a tensor, an array or nested lists, without a copy if none is needed."""
    if not isinstance(value, torch.Tensor):
        if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
            raise OnelaunchError(f"{argument} is a masked array with masked values: fill in or drop such rows")
        try:
            array = np.asarray(value)
        except ValueError:
            raise ArgumentTypeError(f"{argument} has rows of different lengths: pass a rectangular array") from None
        except (RuntimeError, TypeError) as error:
            raise ArgumentTypeError(f"{argument} cannot become an array ({error}): pass an array or a tensor") from None
        if array.dtype.kind not in "buif":
            raise ArgumentTypeError(f"{argument} has dtype {array.dtype}: pass numbers (float, integer or uint8)")
        if array.dtype in (np.uint16, np.uint32, np.uint64):
            array = array.astype(np.int64)
        if array.dtype == np.longdouble:
            array = array.astype(np.float64)
        # PyTorch cannot take negative strides or a foreign byte order.
        if any(stride < 0 for stride in array.strides) or not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="), copy=True)
        with (
            warnings.catch_warnings()
        ):  # PyTorch warns about read-only memory, such as a memory-mapped file; we only read
            warnings.simplefilter("ignore", UserWarning)
            value = torch.from_numpy(array)
    if value.layout != torch.strided or value.is_complex() or value.is_nested or value.is_meta or value.is_quantized:
        kind = "nested" if value.is_nested else "quantized" if value.is_quantized else str(value.layout)
        what = f"{kind} {value.dtype} on {value.device}"
        raise ArgumentTypeError(f"{argument} must be a dense tensor of real numbers, not {what}")
    if value.ndim == 0:
        raise OnelaunchError(f"{argument} is a single number: pass one row per sample")
    return value.detach()


def first_row_not_finite(x: torch.Tensor) -> int | None:
    """The first row with NaN or an infinity, or None. Reads x once, in pieces, and allocates little."""
    values = max(1, x[0].numel()) if len(x) else 1
    for first in range(0, len(x), rows := max(1, CHECKED_VALUES // values)):
        part = x[first : first + rows]
        if math.isfinite(part.sum().item()):  # a sum of finite values may overflow: then each value is looked at
            continue
        finite = torch.isfinite(part)
        if not finite.all():
            return first + int((~finite).nonzero()[0, 0])
    return None


def _trainable(model: Any) -> list[nn.Parameter]:
    """The model's parameters that require a gradient; raises OnelaunchError if they cannot be trained."""
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model={model!r:.80} is not an nn.Module: pass for example nn.Sequential(...)")
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise OnelaunchError("model has no parameter to train (none has requires_grad=True)")
    if any(not is_lazy(p) and (p.is_inference() or p.is_meta) for p in parameters):
        raise OnelaunchError("model was made under torch.inference_mode() or on the meta device: make it outside")
    devices = {p.device for p in parameters}
    if len(devices) > 1:
        raise OnelaunchError(f"model is on several devices ({', '.join(map(str, devices))}): move it to one")
    return parameters


def _check_lengths(x_name: str, x: torch.Tensor, y_name: str, y: torch.Tensor) -> None:
    if len(x) != len(y):
        raise OnelaunchError(f"{x_name} has {len(x)} rows and {y_name} has {len(y)}: pass the same number of rows")
    if len(x) == 0:
        raise OnelaunchError(f"{x_name} is empty: pass at least one row")


def _features(argument: str, x: torch.Tensor, network: Network | None, dtype: torch.dtype) -> torch.Tensor:
    """x as the engines take it (see Run), checked for finite values and for the width of the first Linear."""
    if x.is_floating_point():
        x = x.to(dtype)
        row = first_row_not_finite(x)
        if row is not None:
            raise OnelaunchError(
                f"{argument} holds NaN or Inf (first in row {row}), or numbers too large for {dtype}: fill in or drop such rows"
            )
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
    model: nn.Module, network: Network | None, x: torch.Tensor, spec: Spec, dtype: torch.dtype
) -> tuple[int, ...]:
    """The shape of one row of the model's output, from its layers or from a trial of two rows in evaluation mode."""
    if network is not None:
        return (network.outputs,)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    devices = [x.device] if x.device.type == "cuda" else []
    try:
        # Lazy modules draw their weights here, from the run's seed; the state of the user's generator does not change.
        with torch.no_grad(), torch.random.fork_rng(devices), torch.autocast(x.device.type, enabled=False):
            torch.manual_seed(spec.seed)
            output = model(as_features(x[:2], dtype))
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        reason = str(error).strip().splitlines()[0]
        raise OnelaunchError(f"model cannot take x with rows of shape {tuple(x.shape[1:])}: {reason}") from error
    finally:
        for module, mode in modes.items():
            module.training = mode
    if not isinstance(output, torch.Tensor) or output.shape[:1] != x[:2].shape[:1]:
        what = list(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise OnelaunchError(f"model must return one tensor with one row per sample, not {what} for {len(x[:2])} rows")
    if spec.loss == "cross_entropy" and output.ndim != 2:
        raise OnelaunchError(f"loss='cross_entropy' needs outputs [rows, classes], the model has {list(output.shape)}")
    return tuple(output.shape[1:])


def _validation(
    validation: Any, x: torch.Tensor, spec: Spec, network: Network | None, output: tuple[int, ...], dtype: torch.dtype,
    known: Names | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    if not isinstance(validation, tuple | list) or len(validation) != 2:
        raise ArgumentTypeError(
            "validation must be a fraction of the rows, such as 0.1, or a pair (x, y), such as (test_x, test_y)"
        )
    if validation[0] is None or validation[1] is None:  # test_x and test_y of a data set without a test part
        raise ArgumentTypeError(
            "validation holds None: pass rows and their targets (onelaunch.data.split holds some out), or validation=None"
        )
    names = ("validation[0]", "validation[1]")
    labels, found = encode(names[1], validation[1], known)
    if (found is None) != (known is None):
        raise ArgumentTypeError(f"{names[1]} and y must both hold class names, or both numbers")
    validation_x, validation_y = to_tensor(names[0], validation[0]), to_tensor(names[1], labels)
    _check_lengths(names[0], validation_x, names[1], validation_y)
    validation_x = _features(names[0], validation_x, network, dtype)
    if network is None and validation_x.shape[1:] != x.shape[1:]:
        raise OnelaunchError(f"{names[0]} has rows of shape {tuple(validation_x.shape[1:])}, x of {tuple(x.shape[1:])}")
    if (validation_x.dtype == torch.uint8) != (x.dtype == torch.uint8):
        raise OnelaunchError(
            f"{names[0]} is {validation_x.dtype} and x is {x.dtype}: uint8 means value / 255, so pass the same type for both"
        )
    return validation_x, targets_of(names[1], validation_y, spec, output, dtype, known)


def _check_batch_norm(network: Network | None, spec: Spec) -> None:
    """Raise if a batch has one row, which BatchNorm1d cannot normalise: PyTorch would fail in the middle of the run."""
    last = min(spec.steps_per_epoch, spec.total_steps) - 1
    normalises = network is not None and any(isinstance(layer, BatchNorm) for layer in network.layers)
    if normalises and spec.rows_of(last) == 1:
        raise OnelaunchError(
            f"batch_size={spec.batch_size} leaves a batch of one row among {spec.rows}, which BatchNorm1d cannot "
            "normalise: pass drop_last=True or another batch_size"
        )
