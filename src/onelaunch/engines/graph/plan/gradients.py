"""The parameters of a network by stage, and where their gradients are in the vector of a run that clips. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from onelaunch.engines.graph.plan.stages import Stage
from onelaunch.integers import round_up

ALIGNMENT = 64  # elements, so that every gradient starts as a buffer does (plan/memory.py)


def parameters_of(stages: list[Stage]) -> Iterator[tuple[int, str, tuple[int, ...]]]:
    """(stage, "weight", "bias", "scale" or "shift", shape) of every parameter of the Linears and LayerNorms."""
    for number, stage in enumerate(stages):
        linear, norm = stage.linear, stage.segment.norm if stage.segment else None
        yield number, "weight", (linear.outputs, linear.inputs)
        if linear.bias:
            yield number, "bias", (linear.outputs,)
        if norm and norm.scale:
            yield number, "scale", (linear.outputs,)
        if norm and norm.shift:
            yield number, "shift", (linear.outputs,)


def gradient_offsets(stages: list[Stage]) -> tuple[dict[tuple[int, str], tuple[int, tuple[int, ...]]], int]:
    """({(stage, part): (offset, shape)}, elements of the vector). Elements between the gradients are zero."""
    offsets, end = {}, 0
    for number, part, shape in parameters_of(stages):
        offsets[number, part] = end, shape
        end += round_up(prod(shape), ALIGNMENT)
    return offsets, end
