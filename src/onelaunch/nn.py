"""The fused ops as modules. Each has the `state_dict` of the `torch.nn` module that it replaces."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from onelaunch.errors import ArgumentTypeError, OnelaunchError
from onelaunch.ops import cross_entropy, layer_norm, linear, relu_dropout, rms_norm
from onelaunch.ops.arguments import check_activation, check_number, check_probability
from onelaunch.ops.batch_norm import batch_norm_of
from onelaunch.ops.cross_entropy_arguments import check_loss_options

__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "CrossEntropyLoss",
    "LayerNorm",
    "Linear",
    "RMSNorm",
    "ReLUDropout",
]


class ReLUDropout(nn.Module):
    """Replaces `nn.Sequential(nn.ReLU(), nn.Dropout(p))`: one kernel that saves one bit per element for the backward pass.

    p: the probability to drop an element while training.
    inplace: whether to write over the input, under the rules of `F.relu(x, inplace=True)`.
    """

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        super().__init__()
        self.p = check_probability("p", p)
        self.inplace = inplace

    def forward(self, input: Tensor) -> Tensor:
        return relu_dropout(input, self.p, self.training, self.inplace)

    def extra_repr(self) -> str:
        return f"p={self.p}{', inplace=True' if self.inplace else ''}, fused: relu + dropout in one kernel"


def _fused_repr(operation: str, activation: str | None, dropout: float) -> str:
    """The end of a module's `extra_repr`: activation, dropout and the list of what is fused."""
    fused = " + ".join([operation, *([activation] if activation else []), *(["dropout"] if dropout else [])])
    return f"activation={activation!r}, dropout={dropout}, fused: {fused}"


class Linear(nn.Linear):
    """`nn.Linear` with the activation and the dropout that follow it, applied before the product is stored.

    in_features, out_features, bias, device, dtype: as in `nn.Linear`, whose `state_dict` it has.
    activation: a name such as "relu" or "gelu", or None.
    dropout: the probability to drop an element while training.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = None,
        dropout: float = 0.0,
    ) -> None:
        if isinstance(bias, str):
            raise ArgumentTypeError(f"bias={bias!r} is not a bool: pass activation={bias!r} by name")
        super().__init__(in_features, out_features, bias, device, dtype)
        check_activation(activation)
        self.activation = activation
        self.dropout = check_probability("dropout", dropout)

    def forward(self, input: Tensor) -> Tensor:
        return linear(
            input, self.weight, self.bias, activation=self.activation, dropout=self.dropout, training=self.training
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {_fused_repr('linear', self.activation, self.dropout)}"


class _BatchNorm(nn.modules.batchnorm._BatchNorm):
    """A batch norm with the activation and the dropout that follow it."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = None,
        dropout: float = 0.0,
    ) -> None:
        check_number("eps", eps, "a small number, such as 1e-5; activation is passed by name")
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        check_activation(activation)
        self.activation = activation
        self.dropout = check_probability("dropout", dropout)

    def forward(self, input: Tensor) -> Tensor:
        return batch_norm_of(self, input, self.activation, self.dropout if self.training else 0.0)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {_fused_repr('batch_norm', self.activation, self.dropout)}"


class BatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    """`nn.BatchNorm1d` with the activation and the dropout that follow it, applied while it normalises.

    num_features, eps, momentum, affine, track_running_stats, device, dtype: as in `nn.BatchNorm1d`.
    activation: a name such as "relu" or "gelu", or None.
    dropout: the probability to drop an element while training.
    """


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    """`nn.BatchNorm2d` with the activation and the dropout that follow it, applied while it normalises.

    num_features, eps, momentum, affine, track_running_stats, device, dtype: as in `nn.BatchNorm2d`.
    activation: a name such as "relu" or "gelu", or None.
    dropout: the probability to drop an element while training.
    """


class BatchNorm3d(_BatchNorm, nn.BatchNorm3d):
    """`nn.BatchNorm3d` with the activation and the dropout that follow it, applied while it normalises.

    num_features, eps, momentum, affine, track_running_stats, device, dtype: as in `nn.BatchNorm3d`.
    activation: a name such as "relu" or "gelu", or None.
    dropout: the probability to drop an element while training.
    """


def _check_last_dimension(module: nn.LayerNorm | nn.RMSNorm, replaced: str) -> None:
    if len(module.normalized_shape) != 1:
        raise OnelaunchError(
            f"normalized_shape={tuple(module.normalized_shape)} is not one dimension: pass the size of the last, or use"
            f" torch.nn.{replaced}"
        )


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` over the last dimension, with the dropout and the residual addition before it.

    normalized_shape, eps, elementwise_affine, bias, device, dtype: as in `nn.LayerNorm`, for one dimension.
    dropout: the probability to drop an element of the input while training.
    Its forward takes `(input, residual=None, return_sum=False)`, as `ol.layer_norm`.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        _check_last_dimension(self, "LayerNorm")
        self.dropout = check_probability("dropout", dropout)

    def forward(self, input: Tensor, residual: Tensor | None = None, return_sum: bool = False) -> Any:
        return layer_norm(
            input, self.weight, self.bias, residual=residual, dropout=self.dropout, training=self.training,
            eps=self.eps, return_sum=return_sum,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, dropout={self.dropout}, fused: dropout + residual + layer_norm"


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` over the last dimension, with the dropout and the residual addition before it.

    normalized_shape, eps, elementwise_affine, device, dtype: as in `nn.RMSNorm`, for one dimension.
    dropout: the probability to drop an element of the input while training.
    Its forward takes `(input, residual=None, return_sum=False)`, as `ol.rms_norm`.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        _check_last_dimension(self, "RMSNorm")
        self.dropout = check_probability("dropout", dropout)

    def forward(self, input: Tensor, residual: Tensor | None = None, return_sum: bool = False) -> Any:
        return rms_norm(
            input, self.weight, residual=residual, dropout=self.dropout, training=self.training, eps=self.eps,
            return_sum=return_sum,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, dropout={self.dropout}, fused: dropout + residual + rms_norm"


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """Replaces `nn.CrossEntropyLoss` without class weights: loss and gradient in one pass over the logits.

    weight: must be None; pass class weights to `torch.nn.CrossEntropyLoss`.
    ignore_index, reduction, label_smoothing: as in `nn.CrossEntropyLoss`.
    """

    def __init__(
        self, weight: None = None, *, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0
    ) -> None:
        if weight is not None:
            raise OnelaunchError(
                "weight is given, and class weights are not fused: use torch.nn.CrossEntropyLoss(weight)"
            )
        check_loss_options(label_smoothing, ignore_index, reduction)
        super().__init__(ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(
            input,
            target,
            label_smoothing=self.label_smoothing,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
        )

    def extra_repr(self) -> str:
        options = f"reduction={self.reduction!r}, label_smoothing={self.label_smoothing}"
        ignored = f", ignore_index={self.ignore_index}" if self.ignore_index != -100 else ""
        return f"{options}{ignored}, fused: loss + gradient in one pass"
