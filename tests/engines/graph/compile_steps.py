"""Compiles the kernels of whole steps for a GPU that need not exist: `python compile_steps.py 90`. Prints what it compiled.

Steps run on tensors without memory; instead of each launch, the kernel is compiled for exactly these arguments.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch

from onelaunch.device import A100, H200, Chip
from onelaunch.engines.graph.buffers import TYPES
from onelaunch.engines.graph.kernels import (
    clip,
    first_and_last_update,
    fused_backward_small_batch,
    hidden_layer,
    narrow_step,
    output_layer,
    output_layer_small_batch,
    row_segment,
    run_state,
    split_k_update,
    split_weights,
    weight_update,
)
from onelaunch.engines.graph.kernels.run_arguments import Clock, Weights
from onelaunch.engines.graph.parameters import Gradients
from onelaunch.engines.graph.plan.operations import StepPlan
from onelaunch.engines.graph.plan.plan import plan_step
from onelaunch.engines.graph.plan.stages import OUTPUT, Segment, Source, Stage
from onelaunch.engines.graph.step import Data, StepRunner
from onelaunch.run.network import LayerNorm
from tests.engines.graph.plan.planning import stages as make_stages
from tests.kernels.compile_all import Compiler

MODULES = (
    clip,
    first_and_last_update,
    fused_backward_small_batch,
    hidden_layer,
    narrow_step,
    output_layer,
    output_layer_small_batch,
    row_segment,
    run_state,
    split_k_update,
    split_weights,
    weight_update,
)


STATES = {"sgd": 0, "adam": 2, "adamw": 2, "rmsprop": 2, "lion": 1}  # rmsprop with momentum
STEPS: list[tuple[list[int], int, str, float, str, str]] = [
    ([784, 640, 640, 10], 32, "gelu", 0.1, "sgd", "cross_entropy"),  # split weights
    ([784, 8192, 8192, 10], 32, "relu", 0.0, "adam", "cross_entropy"),  # whole weights through TMA
    ([784, 640, 640, 10], 32, "mish", 0.1, "rmsprop", "cross_entropy"),
    ([784, 256, 256, 10], 512, "elu", 0.1, "adamw", "cross_entropy"),
    ([64, 64, 48, 16], 4096, "tanh", 0.0, "lion", "mse"),  # narrow
]
SEGMENTED = (STEPS[0], STEPS[2], STEPS[3])  # also with a LayerNorm and an addition


def add_segments(stages: list[Stage]) -> None:
    """A LayerNorm after the first Linear, and the sum with its output and a LayerNorm after the second."""
    width = stages[0].linear.outputs
    norm = LayerNorm("norm", width, 1e-5, True, True)
    stages[0].segment, stages[0].taps = Segment(norm=norm, activation="gelu", p=0.1, layer=3), {OUTPUT}
    stages[1].segment = Segment(before=Source(0, OUTPUT), norm=norm, activation="relu")


class NoMemory:
    """Buffers with a shape and no memory."""

    calls = peak_bytes = 0

    def __init__(self, step: StepPlan) -> None:
        self.step = step

    def take(self, name: str) -> torch.Tensor:
        buffer = self.step.buffers[name]
        return torch.empty(buffer.shape, dtype=TYPES[buffer.dtype], device="meta")

    def release(self, names: Any) -> None:
        pass

    def close(self) -> None:
        pass


def run_step(
    chip: Chip, widths: list[int], batch: int, activation: str, p: float, optimizer: str, loss: str, *,
    segments: bool = False, clips: bool = False,
) -> None:  # fmt: skip
    stages = make_stages(widths, activation, p)
    if segments:
        add_segments(stages)
    states = STATES[optimizer]
    step = plan_step(
        stages,
        batch=batch,
        rows=batch * 4,
        steps_per_epoch=4,
        precision="bf16",
        validation_rows=0,
        states=states,
        uint8_rows=True,
        clips=clips,
        chip=chip,
    )
    # The launcher of the level-1 GEMM needs a device to make its descriptors.
    operations = (
        one if one.kind == "fused_backward" else replace(one, tile=one.tile._replace(tma=False))
        for one in step.operations
    )
    step = replace(step, operations=tuple(operations))
    buffers, weights = NoMemory(step), []
    norms: list[Weights | None] = []
    for number, one in enumerate(stages):
        weight = torch.empty(one.linear.outputs, one.linear.inputs, device="meta")
        bias = torch.empty(one.linear.outputs, device="meta")
        copy = buffers.take(f"copy.{number}") if f"copy.{number}" in step.buffers else None
        kept = Weights(weight, bias, copy=copy)
        if f"high.{number}" in step.buffers:
            kept = kept._replace(weight=buffers.take(f"high.{number}"), low=buffers.take(f"low.{number}"))
        if states:
            kept = kept._replace(weight_first=weight, bias_first=bias)
        if states > 1:
            kept = kept._replace(weight_second=weight, bias_second=bias)
        weights.append(kept)
        states_of_bias = dict(zip(("weight_first", "weight_second"), [bias] * states, strict=False))
        states_of_bias |= dict(zip(("bias_first", "bias_second"), [bias] * states, strict=False))
        norms.append(Weights(bias, bias, **states_of_bias) if one.segment else None)
    gradients = None
    if clips:
        stored: list[Weights | None] = [
            kept and kept._replace(weight_first=kept.weight, bias_first=kept.bias, weight_second=None, bias_second=None)
            for kept in (*weights, *norms)
        ]
        gradients = Gradients(buffers.take("gradients"), stored[: len(stages)], stored[len(stages) :])  # type: ignore[arg-type]
    runner = StepRunner(
        step, stages, weights, buffers, optimizer=optimizer, loss=loss, batch=batch, tf32=False, seed=3, norms=norms,
        gradients=gradients,
    )  # fmt: skip
    x = torch.empty(batch * 4, widths[0], dtype=torch.uint8, device="meta")
    classes = torch.empty(batch * 4, dtype=torch.int64, device="meta")
    y = classes if loss == "cross_entropy" else torch.empty(batch * 4, widths[-1], device="meta")
    row_weights = torch.empty(batch * 4, device="meta") if optimizer in ("adamw", "lion", "rmsprop") else None
    runner.train(Data(x, y, buffers.take("order"), buffers.take("control"), buffers.take("table"), "", row_weights), 2)


def main() -> None:
    capability = int(sys.argv[1])
    compiler = Compiler(capability)
    chip = H200 if capability >= 90 else A100

    def launch_step(clock: Clock, *arguments: Any, **options: Any) -> None:
        *rest, constants = arguments
        compiler(*rest, (*constants, capability >= 90), **options)

    for module in MODULES:
        module.launch_step = launch_step  # type: ignore[attr-defined]
        if hasattr(module, "launch"):
            module.launch = compiler  # type: ignore[attr-defined]
    for configuration in STEPS if capability >= 90 else STEPS[2:]:  # the first two only differ from the third with TMA
        run_step(chip, *configuration)
        run_step(chip, *configuration, clips=True)
    for configuration in SEGMENTED if capability >= 90 else SEGMENTED[1:]:
        run_step(chip, *configuration, segments=True)
        run_step(chip, *configuration, segments=True, clips=True)
    split_weights.split_weights(
        torch.empty(99), torch.empty(99, dtype=torch.bfloat16), torch.empty(99, dtype=torch.int16)
    )
    split_weights.join_weights(
        torch.empty(99), torch.empty(99, dtype=torch.bfloat16), torch.empty(99, dtype=torch.int16)
    )
    run_state.advance(torch.empty(4, dtype=torch.int64), 8)
    run_state.fill_row_order(torch.empty(1000, dtype=torch.int32), torch.empty(8, dtype=torch.int64), 3, 4)
    print("\n".join(compiler.done))


if __name__ == "__main__":
    main()
