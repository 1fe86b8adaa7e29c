"""Convolution, batch norm in evaluation, addition of a residual and ReLU: one call of cuDNN's fused convolution, forward only.

In evaluation batch norm is an affine map per channel, so it is folded into the convolution's weight and bias. Unfused, the
map, the addition and the ReLU read and write all activations again, with the residual five passes in place of two. Folding
reads and writes the weights alone, and `torch.compile` generates the kernels for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from onelaunch.errors import OnelaunchError
from onelaunch.ops.arguments import check_beside, check_float
from onelaunch.ops.call_context import inside_transform, wants_gradient

# Calls that cuDNN has refused, as shapes, strides and dtypes: it has no fused convolution for some sizes.
_refused: set[tuple[object, ...]] = set()


def folded(
    weight: Tensor, bias: Tensor | None, running_mean: Tensor, running_var: Tensor, bn_weight: Tensor | None,
    bn_bias: Tensor | None, eps: float, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Weight and bias, of type `dtype`, of a convolution that includes the batch norm behind it. Computed in fp32 or fp64."""
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    scale = torch.rsqrt(running_var.to(wide) + eps)
    if bn_weight is not None:
        scale = scale * bn_weight.to(wide)
    shift = -running_mean.to(wide) if bias is None else bias.to(wide) - running_mean.to(wide)
    shift = shift * scale if bn_bias is None else shift * scale + bn_bias.to(wide)
    return (weight.to(wide) * scale[:, None, None, None]).to(dtype), shift.to(dtype)


def conv_add_relu_reference(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int,
) -> Tensor:  # fmt: skip
    y = F.conv2d(x, weight, bias, list(stride), list(padding), list(dilation), groups)
    return torch.relu(y if residual is None else y + residual)


def _layout(x: Tensor, weight: Tensor) -> torch.memory_format:
    """Of the result: channels last if x or weight is, as for `F.conv2d` on CUDA."""
    last = any(one.is_contiguous(memory_format=torch.channels_last) and not one.is_contiguous() for one in (x, weight))
    return torch.channels_last if last else torch.contiguous_format


@torch.library.custom_op("onelaunch::conv_add_relu", mutates_args=(), device_types="cpu")
def conv_add_relu_op(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int,
) -> Tensor:  # fmt: skip
    y = conv_add_relu_reference(x, weight, bias, residual, stride, padding, dilation, groups)
    return y.contiguous(memory_format=_layout(x, weight))


@conv_add_relu_op.register_kernel("cuda")
def _(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int,
) -> Tensor:  # fmt: skip
    layout, sizes = _layout(x, weight), (list(stride), list(padding), list(dilation), groups)
    call = (
        x.shape,
        x.stride(),
        x.dtype,
        weight.shape,
        weight.stride(),
        residual is None,
        *map(tuple, sizes[:3]),
        groups,
    )
    if x.dtype != torch.float64 and torch.backends.cudnn.enabled and x.numel() and call not in _refused:
        x, weight = x.contiguous(memory_format=layout), weight.contiguous(memory_format=layout)
        try:
            if residual is None:
                return torch.ops.aten.cudnn_convolution_relu(x, weight, bias, *sizes)
            residual = residual.contiguous(memory_format=layout)
            return torch.ops.aten.cudnn_convolution_add_relu(x, weight, residual, 1.0, bias, *sizes)
        except RuntimeError:
            _refused.add(call)
    y = conv_add_relu_reference(x, weight, bias, residual, stride, padding, dilation, groups)
    return y.contiguous(memory_format=layout)


@conv_add_relu_op.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int,
) -> Tensor:  # fmt: skip
    y = F.conv2d(x, weight, bias, list(stride), list(padding), list(dilation), groups)
    return torch.empty_like(y, memory_format=_layout(x, weight))


def conv_batch_norm_relu(
    x: Tensor, weight: Tensor, bias: Tensor | None, running_mean: Tensor, running_var: Tensor,
    bn_weight: Tensor | None = None, bn_bias: Tensor | None = None, *, eps: float = 1e-5, residual: Tensor | None = None,
    stride: int | Sequence[int] = 1, padding: int | Sequence[int] = 0, dilation: int | Sequence[int] = 1, groups: int = 1,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """`F.relu(F.batch_norm(F.conv2d(x, weight, bias), running_mean, running_var, bn_weight, bn_bias) + residual)`.

    x: `[n, channels, height, width]`; residual: None or of the shape of the result. The result is of type `dtype`, by default
    that of x; the other tensors are converted. Raises OnelaunchError where gradients are needed: there is no backward pass.
    """
    check_float("x", x)
    for name, tensor in (("weight", weight), ("running_mean", running_mean), ("running_var", running_var)):
        check_beside(name, tensor, "x", x)
    if x.dim() != 4 or weight.dim() != 4:
        raise OnelaunchError(
            f"x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}: pass four dimensions each"
        )
    if wants_gradient(x, weight, bias, bn_weight, bn_bias, residual):
        raise OnelaunchError("conv_batch_norm_relu has no backward pass: call it inside torch.no_grad()")
    dtype = dtype or x.dtype
    conv_weight, conv_bias = folded(weight, bias, running_mean, running_var, bn_weight, bn_bias, eps, dtype)
    pairs = [[size, size] if isinstance(size, int) else list(size) for size in (stride, padding, dilation)]
    other = None if residual is None else residual.to(dtype)
    with torch.autocast(x.device.type, enabled=False):
        function = conv_add_relu_reference if inside_transform() else conv_add_relu_op
        result = function(x.to(dtype), conv_weight, conv_bias, other, pairs[0], pairs[1], pairs[2], groups)
    expected = result.shape if residual is None else residual.shape
    if result.shape != expected:
        raise OnelaunchError(
            f"residual has shape {tuple(expected)} and the result {tuple(result.shape)}: pass equal shapes"
        )
    return result
