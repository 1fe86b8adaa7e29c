"""Runs a planned step: each operation is one launch, whose buffers are taken before it and released after their last use."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onelaunch.engines.graph.buffers import Buffers
from onelaunch.engines.graph.kernels.clip import clip_factor, clipped_update
from onelaunch.engines.graph.kernels.first_and_last_update import first_and_last_update
from onelaunch.engines.graph.kernels.fused_backward_small_batch import fused_backward
from onelaunch.engines.graph.kernels.hidden_layer import gather, hidden_forward, input_gradient
from onelaunch.engines.graph.kernels.narrow_step import narrow_step
from onelaunch.engines.graph.kernels.output_layer import output_layer
from onelaunch.engines.graph.kernels.output_layer_small_batch import output_layer_small_batch
from onelaunch.engines.graph.kernels.row_segment import Segment as SegmentKernel
from onelaunch.engines.graph.kernels.row_segment import segment_backward, segment_forward
from onelaunch.engines.graph.kernels.run_arguments import Clock, Epilogue, Rows, Targets, Weights
from onelaunch.engines.graph.kernels.run_state import sum_losses
from onelaunch.engines.graph.kernels.split_k_update import split_k_update
from onelaunch.engines.graph.kernels.weight_update import partial_products, weight_update
from onelaunch.engines.graph.parameters import Gradients
from onelaunch.engines.graph.plan.operations import Operation, StepPlan
from onelaunch.engines.graph.plan.stages import MIDDLE, OUTPUT, Source, Stage, product_name, source_name
from onelaunch.kernels.dependent_launch import overlaps
from onelaunch.kernels.dropout_key import NO_KEY
from onelaunch.kernels.linear import can_use_tma, linear_forward


@dataclass
class Data:
    """The rows to train or evaluate on, the order in which they are visited, and the run's position (kernels/run_state.py)."""

    x: torch.Tensor
    y: torch.Tensor
    order: torch.Tensor
    control: torch.Tensor
    table: torch.Tensor
    prefix: str  # of the names of its buffers: empty, or VALIDATION
    weights: torch.Tensor | None = None  # of the rows

    @property
    def targets(self) -> Targets:
        return Targets(self.y, self.weights)


def _segment(stage: Stage, norm: Weights | None, seed: int) -> SegmentKernel:
    segment = stage.segment
    if segment is None:
        return SegmentKernel(Epilogue(), False, 0.0, None)
    eps = segment.norm.eps if segment.norm else 0.0
    return SegmentKernel(
        Epilogue(segment.activation, segment.p, segment.layer, seed), segment.norm is not None, eps, norm
    )


class StepRunner:
    def __init__(
        self, step: StepPlan, stages: list[Stage], weights: list[Weights], buffers: Buffers, *, optimizer: str, loss: str,
        batch: int, tf32: bool, seed: int, norms: list[Weights | None] | None = None, gradients: Gradients | None = None,
    ) -> None:  # fmt: skip
        """`norms` are the parameters of the stages' LayerNorms, and `gradients` those of a run that clips (see Parameters)."""
        self.step, self.stages, self.buffers = step, stages, buffers
        self.loss, self.batch, self.tf32 = loss, batch, tf32
        self.epilogues = [Epilogue(stage.activation, stage.p, stage.layer, seed) for stage in stages]
        norms = norms or [None] * len(stages)
        self._updated, self._updated_norms, self._update = weights, norms, optimizer
        if gradients is not None:
            weights, norms, optimizer = gradients.weights, gradients.norms, "store_gradient"
        self.weights, self._norms, self.optimizer, self.gradients = weights, norms, optimizer, gradients
        self.segments = [_segment(stage, norm, seed) for stage, norm in zip(stages, norms, strict=True)]
        # Overlap helps short kernels: it saves 4 of 75 µs at 784-2048-2048-2048-10, batch 32. It cost large GEMMs 10 %.
        self.overlap = overlaps(weights[0].weight) and (step.small or step.narrow is not None)
        self._evaluation_epilogues = [Epilogue(stage.activation) for stage in stages]  # without dropout
        self._last_uses = {operations: step.last_uses(operations) for operations in (step.operations, step.evaluation)}

    def train(self, data: Data, number: int) -> None:
        """Launches the `number`-th step after the position in `data.control`."""
        self._run(self.step.operations, data, number, self.epilogues)

    def evaluate(self, data: Data, number: int) -> None:
        self._run(self.step.evaluation, data, number, self._evaluation_epilogues)

    def _run(self, operations: tuple[Operation, ...], data: Data, number: int, epilogues: list[Epilogue]) -> None:
        clock = Clock(data.control, data.table, number, self.overlap)
        for operation, done in zip(operations, self._last_uses[operations], strict=True):
            self._launch(operation, data, clock, epilogues)
            self.buffers.release(done)

    def _launch(self, operation: Operation, data: Data, clock: Clock, epilogues: list[Epilogue]) -> None:
        stage = operation.stage
        weights, tile = self.weights[stage], operation.tile
        product = weights.weight if weights.copy is None else weights.copy
        match operation.kind:
            case "gather":
                gather(Rows(data.x, data.order), self._take(data, "x"), clock)
            case "segment":
                self._segment(operation, data, clock)
            case "segment_backward":
                self._segment_backward(operation, data, clock)
            case "forward":
                self._forward(operation, data, clock, epilogues[stage], product)
            case "output":
                self._output(operation, data, clock, epilogues, product)
            case "fused_backward":
                fused_backward(
                    self._take(data, f"dz{stage}"), self._take(data, f"h{stage - 1}"),
                    self._maybe(operation, data, f"z{stage - 1}"), self._gradient_into(operation, data),
                    self._maybe(operation, data, "partial_dx"), self._maybe(operation, data, f"tickets.{stage}"), weights,
                    self._before(stage, epilogues), clock, optimizer=self.optimizer, tile=tile, tf32=self.tf32,
                )  # fmt: skip
            case "input_gradient":
                input_gradient(
                    self._take(data, f"dz{stage}"), product, self._take(data, f"h{stage - 1}"),
                    self._maybe(operation, data, f"z{stage - 1}"), self._gradient_into(operation, data),
                    self._maybe(operation, data, f"sums{stage - 1}"), self._before(stage, epilogues), clock, tile=tile,
                    tf32=self.tf32,
                )  # fmt: skip
            case "narrow_step" | "narrow_update":
                self._narrow(operation, data, clock)
            case "clip_factor" | "clipped_update" | "clipped_norm_update":
                self._clip(operation, clock)
            case "first_and_last_update":
                last = len(self.stages) - 1
                first_and_last_update(
                    self._dz(data, 0), self._take(data, "gathered"), weights, self._dz(data, last),
                    self._take(data, f"h{last - 1}"), self.weights[last], self._take(data, "loss_parts"),
                    self._take(data, "losses"), clock, optimizer=self.optimizer, tile=tile, tf32=self.tf32,
                )  # fmt: skip
            case "output_small_batch":
                before = self._before(stage, epilogues)
                gathered = self._maybe(operation, data, "gathered")
                output_layer_small_batch(
                    self._input(data, stage), data.order, product, weights.bias, data.targets,
                    self._maybe(operation, data, f"z{stage - 1}"), self._take(data, "gradient"),
                    self._into(operation, data), self._take(data, "loss_parts"), before, clock,
                    loss=self.loss, data=None if gathered is None else data.x, gathered=gathered,
                )  # fmt: skip
            case "partial_products":
                partial_products(
                    self._dz(data, stage), self._input(data, stage), self._take(data, f"parts{stage}"), clock, tile=tile,
                    tf32=self.tf32,
                )  # fmt: skip
            case "split_k_update":
                split_k_update(
                    self._take(data, f"parts{stage}"), self._maybe(operation, data, f"sums{stage}"), weights, clock,
                    optimizer=self.optimizer, loss_parts=self._maybe(operation, data, "loss_parts"),
                    losses=self._maybe(operation, data, "losses"),
                )  # fmt: skip
            case "update":
                weight_update(
                    self._dz(data, stage), self._input(data, stage), weights,
                    self._maybe(operation, data, f"sums{stage}"), clock, optimizer=self.optimizer, tile=tile,
                    tf32=self.tf32, loss_parts=self._maybe(operation, data, "loss_parts"),
                    losses=self._maybe(operation, data, "losses"),
                )  # fmt: skip

    def _forward(
        self, operation: Operation, data: Data, clock: Clock, epilogue: Epilogue, weight: torch.Tensor
    ) -> None:
        stage, tile = operation.stage, operation.tile
        x, h = self._input(data, stage), self._take(data, product_name(self.stages, stage))
        z, bias = self._maybe(operation, data, f"z{stage}"), self.weights[stage].bias
        if tile.tma and can_use_tma(x.values, weight, h):
            linear_forward(
                x.values, weight, bias, h, z, None, activation=epilogue.activation, p=0.0, key=NO_KEY, tile=tile,
                tf32=self.tf32, overlap=clock.overlap,
            )  # fmt: skip
        else:
            hidden_forward(x, weight, bias, h, z, epilogue, clock, tile=tile, tf32=self.tf32)

    def _output(
        self, operation: Operation, data: Data, clock: Clock, epilogues: list[Epilogue], weight: torch.Tensor
    ) -> None:
        stage = operation.stage
        parts = self._take(data, "loss_parts")
        output_layer(
            self._input(data, stage), data.order, weight, self.weights[stage].bias, data.targets,
            self._maybe(operation, data, f"z{stage - 1}"), self._take(data, "gradient"),
            self._into(operation, data), self._maybe(operation, data, f"sums{stage}"),
            self._maybe(operation, data, f"sums{stage - 1}"), parts, self._before(stage, epilogues), clock,
            loss=self.loss, tile=operation.tile, tf32=self.tf32,
        )  # fmt: skip
        if data.prefix:
            sum_losses(parts, self._take(data, "losses"), clock)

    def _before(self, stage: int, epilogues: list[Epilogue]) -> Epilogue:
        """The epilogue that made a stage's input; a segment, which comes after it, has a backward pass of its own."""
        return Epilogue() if not stage or self.stages[stage - 1].segment else epilogues[stage - 1]

    def _into(self, operation: Operation, data: Data) -> torch.Tensor | None:
        """Where an operation stores the gradient of its stage's input."""
        before = operation.stage - 1
        found = self._maybe(operation, data, f"dz{before}")
        return self._maybe(operation, data, f"dh{before}") if found is None else found

    def _gradient_into(self, operation: Operation, data: Data) -> torch.Tensor:
        into = self._into(operation, data)
        assert into is not None
        return into

    def _segment(self, operation: Operation, data: Data, clock: Clock) -> None:
        stage = operation.stage
        segment = self.stages[stage].segment
        assert segment is not None
        kernel = self.segments[stage]
        if data.prefix:
            kernel = kernel._replace(epilogue=Epilogue(segment.activation))
        segment_forward(
            self._take(data, f"p{stage}"), self._added(data, segment.before), self._maybe(operation, data, f"middle{stage}"),
            self._added(data, segment.after), self._take(data, f"h{stage}"), kernel, clock,
        )  # fmt: skip

    def _added(self, data: Data, source: Source | None) -> torch.Tensor | None:
        return None if source is None else self._take(data, source_name(self.stages, source))

    def _segment_backward(self, operation: Operation, data: Data, clock: Clock) -> None:
        stage = operation.stage
        segment = self.stages[stage].segment
        assert segment is not None

        def skip(source: Source | None) -> torch.Tensor | None:
            return None if source is None else self._take(data, f"skip.{source.point}{source.stage}")

        segment_backward(
            self._take(data, f"dh{stage}"), self._maybe(operation, data, f"skip.{OUTPUT}{stage}"),
            self._take(data, product_name(self.stages, stage)), self._maybe(operation, data, f"z{stage}"),
            self._added(data, segment.before),
            self._maybe(operation, data, f"skip.{MIDDLE}{stage}"), skip(segment.after), skip(segment.before),
            self._take(data, f"dz{stage}"), self._maybe(operation, data, f"norm_parts{stage}"),
            self._maybe(operation, data, f"tickets.norm{stage}"), self.segments[stage], self.epilogues[stage], clock,
            optimizer=self.optimizer,
        )  # fmt: skip

    def _narrow(self, operation: Operation, data: Data, clock: Clock) -> None:
        narrow, take = self.step.narrow, self.buffers.take
        assert narrow is not None
        masters = take("packed")
        if operation.kind == "narrow_step":
            first, copy = self.stages[0], self._packed().copy
            narrow_step(
                Rows(data.x, data.order), data.targets, masters if copy is None else copy, masters, take("parts"),
                take("loss_parts"), clock, batch=self.batch, units=narrow.units, widths=narrow.widths, loss=self.loss,
                activation=first.activation, saves_input=first.saves_input, bias=first.linear.bias, rows=narrow.rows,
                warps=narrow.warps, tf32=self.tf32,
            )  # fmt: skip
        else:
            packed = self._packed() if self.gradients is None else Weights(masters, None, self.gradients.vector)
            split_k_update(
                take("parts"), None, packed, clock, optimizer=self.optimizer, loss_parts=take("loss_parts"),
                losses=take("losses"),
            )  # fmt: skip

    def _packed(self) -> Weights:
        """A narrow network's parameters, all in one vector, with their states."""

        def vector(name: str) -> torch.Tensor | None:
            return self.buffers.take(name) if name in self.step.buffers else None

        return Weights(
            self.buffers.take("packed"), None, vector("state0.packed"), vector("state1.packed"),
            copy=vector("packed_copy"),
        )  # fmt: skip

    def _clip(self, operation: Operation, clock: Clock) -> None:
        take, stage = self.buffers.take, operation.stage
        assert self.gradients is not None
        factor = take("clip_factor")
        if operation.kind == "clip_factor":
            clip_factor(self.gradients.vector, take("squares"), take("tickets.clip"), factor, clock)
            return
        stored: Weights | None = self.weights[stage]
        weights: Weights | None = self._updated[stage]
        if operation.kind == "clipped_norm_update":
            stored, weights = self._norms[stage], self._updated_norms[stage]
        elif self.step.narrow:
            stored, weights = Weights(self.gradients.vector, None, self.gradients.vector), self._packed()
        assert stored is not None
        assert weights is not None
        clipped_update(factor, stored, weights, clock, optimizer=self._update)

    def _input(self, data: Data, stage: int) -> Rows:
        """The input of a stage: the output of the previous stage, the gathered rows, or the data set itself."""
        if stage:
            return Rows(self._take(data, f"h{stage - 1}"))
        if f"{data.prefix}x" in self.step.buffers:
            return Rows(self._take(data, "x"))
        return Rows(data.x, data.order)

    def _dz(self, data: Data, stage: int) -> torch.Tensor:
        """The gradient of a Linear's output."""
        return self._take(data, "gradient" if stage == len(self.stages) - 1 else f"dz{stage}")

    def _take(self, data: Data, name: str) -> torch.Tensor:
        return self.buffers.take(data.prefix + name)

    def _maybe(self, operation: Operation, data: Data, name: str) -> torch.Tensor | None:
        """The buffer of this name if the operation uses it."""
        return self._take(data, name) if data.prefix + name in operation.uses else None
