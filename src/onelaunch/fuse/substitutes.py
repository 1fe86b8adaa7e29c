"""Functions of PyTorch at which Dynamo ends a graph, in a form that it can capture; what a model computes is the same.

`nn.TransformerEncoder` and `nn.TransformerDecoder` compare a given mask with the causal one on the host, to choose a kernel.
That ends the graph, leaves the layers uncompiled and cannot be recorded. Inside a captured graph the mask is used as it is.
"""

from __future__ import annotations

import functools
import inspect

import torch
from torch.nn.modules import transformer

NAME = "_detect_is_causal_mask"  # private: where a version of PyTorch lacks it or changes it, nothing is substituted


def _is_said_to_be_causal(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    return is_causal is True


@functools.cache
def substitute() -> None:
    """Tell Dynamo, which this imports, once per process and before it captures."""
    original = getattr(transformer, NAME, None)
    expected = [*inspect.signature(_is_said_to_be_causal).parameters]
    if original is not None and [*inspect.signature(original).parameters] == expected:
        torch.compiler.substitute_in_graph(original, skip_signature_check=True)(_is_said_to_be_causal)
