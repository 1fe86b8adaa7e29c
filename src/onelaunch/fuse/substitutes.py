"""Functions of PyTorch at which Dynamo ends a graph, in a form that it can capture; what a model computes is the same.

`nn.TransformerEncoder` and `nn.TransformerDecoder` compare a given mask with the causal one on the host, to choose a kernel.
That ends the graph, leaves the layers uncompiled and cannot be recorded. Inside a captured graph the mask is used as it is,
in the model's type: where it is causal, the layers would have ignored its type.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import transformer


def _detect_is_causal_mask(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    if is_causal is None and mask is not None and mask.requires_grad:  # a causal one has no gradients
        length = mask.size(-2) if size is None else size
        causal = nn.Transformer.generate_square_subsequent_mask(length, device=mask.device, dtype=mask.dtype)
        return mask.shape == causal.shape and bool((mask == causal).all())
    return is_causal is True


def _canonical_mask(
    mask: torch.Tensor | None, mask_name: str, other_type: torch.dtype | None, other_name: str,
    target_type: torch.dtype, check_other: bool = True,
) -> torch.Tensor | None:  # fmt: skip
    if mask is None or torch.is_floating_point(mask):
        return None if mask is None else mask.to(target_type)
    if mask.dtype != torch.bool:
        raise AssertionError(f"only bool and floating types of {mask_name} are supported")
    return torch.zeros_like(mask, dtype=target_type).masked_fill(mask, float("-inf"))


# (module, function): private ones, and where a version of PyTorch lacks or changes one, none is substituted.
SUBSTITUTES: tuple[tuple[Any, Any], ...] = ((transformer, _detect_is_causal_mask), (F, _canonical_mask))


@functools.cache
def substitute() -> None:
    """Tell Dynamo, which this imports, once per process and before it captures."""
    originals: list[Any] = [getattr(module, function.__name__, None) for module, function in SUBSTITUTES]
    pairs = [(one, function) for one, (_, function) in zip(originals, SUBSTITUTES, strict=True)]
    if all(one is not None and _parameters(one) == _parameters(function) for one, function in pairs):
        for one, function in pairs:
            torch.compiler.substitute_in_graph(one, skip_signature_check=True)(function)


def _parameters(function: Any) -> list[str]:
    return [*inspect.signature(function).parameters]
