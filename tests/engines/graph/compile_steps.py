"""Compiles the kernels of whole steps for a GPU that need not be there: `python compile_steps.py 90`. Prints what it compiled.

Steps are run on tensors without memory; in the place of a launch the kernel is compiled for exactly these arguments.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from onelaunch.device import A100, H200, Chip
from onelaunch.engines.graph.buffers import TYPES
from onelaunch.engines.graph.kernels import (
    first_and_last_update,
    fused_backward_small_batch,
    hidden_layer,
    narrow_step,
    output_layer,
    output_layer_small_batch,
    run_state,
    split_k_update,
    split_weights,
    weight_update,
)
from onelaunch.engines.graph.kernels.run_arguments import Clock, Weights
from onelaunch.engines.graph.plan.operations import StepPlan
from onelaunch.engines.graph.plan.plan import plan_step
from onelaunch.engines.graph.plan.stages import Stage
from onelaunch.engines.graph.step import Data, StepRunner
from onelaunch.run.network import Linear
from tests.kernels.compile_all import Compiler

MODULES = (
    first_and_last_update,
    fused_backward_small_batch,
    hidden_layer,
    narrow_step,
    output_layer,
    output_layer_small_batch,
    run_state,
    split_k_update,
    split_weights,
    weight_update,
)


class NoMemory:
    """Buffers that are only shapes."""

    calls = peak_bytes = 0

    def __init__(self, step: StepPlan) -> None:
        self.step = step

    def take(self, name: str) -> torch.Tensor:
        space = self.step.spaces[name]
        return torch.empty(space.shape, dtype=TYPES[space.kind], device="meta")

    def release(self, names: Any) -> None:
        pass

    def close(self) -> None:
        pass


def network(widths: list[int], activation: str, p: float) -> list[Stage]:
    stages = [Stage(Linear(str(n), *pair, True), activation, p) for n, pair in enumerate(pairwise(widths))]
    stages[-1] = Stage(stages[-1].linear)
    return stages


def run_step(chip: Chip, widths: list[int], batch: int, activation: str, p: float, optimizer: str, loss: str) -> None:
    stages = network(widths, activation, p)
    states = 0 if optimizer == "sgd" else 2
    step = plan_step(
        stages,
        batch=batch,
        rows=batch * 4,
        steps_per_epoch=4,
        precision="bf16",
        check_rows=0,
        states=states,
        images=True,
        chip=chip,
    )
    # Level 1's GEMM makes its descriptors on a device.
    operations = (
        one if one.kind == "strip" else replace(one, tile=one.tile._replace(tma=False)) for one in step.operations
    )
    step = replace(step, operations=tuple(operations))
    buffers, weights = NoMemory(step), []
    for number, one in enumerate(stages):
        weight = torch.empty(one.linear.outputs, one.linear.inputs, device="meta")
        bias = torch.empty(one.linear.outputs, device="meta")
        copy = buffers.take(f"copy.{number}") if f"copy.{number}" in step.spaces else None
        kept = Weights(weight, bias, copy=copy)
        if f"high.{number}" in step.spaces:
            kept = kept._replace(weight=buffers.take(f"high.{number}"), low=buffers.take(f"low.{number}"))
        if states:
            kept = kept._replace(weight_first=weight, weight_second=weight, bias_first=bias, bias_second=bias)
        weights.append(kept)
    runner = StepRunner(step, stages, weights, buffers, optimizer=optimizer, loss=loss, batch=batch, tf32=False, seed=3)
    x = torch.empty(batch * 4, widths[0], dtype=torch.uint8, device="meta")
    classes = torch.empty(batch * 4, dtype=torch.int64, device="meta")
    y = classes if loss == "cross_entropy" else torch.empty(batch * 4, widths[-1], device="meta")
    runner.train(Data(x, y, buffers.take("order"), buffers.take("control"), buffers.take("table"), ""), 2)


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
    run_step(chip, [784, 640, 640, 10], 32, "gelu", 0.1, "sgd", "cross_entropy")  # halves
    run_step(chip, [784, 8192, 8192, 10], 32, "relu", 0.0, "adam", "cross_entropy")  # whole weights in tiles
    run_step(chip, [784, 640, 640, 10], 32, "gelu", 0.1, "adam", "cross_entropy")
    run_step(chip, [784, 256, 256, 10], 512, "relu", 0.1, "sgd", "cross_entropy")
    run_step(chip, [64, 64, 48, 16], 4096, "tanh", 0.0, "sgd", "mse")
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
