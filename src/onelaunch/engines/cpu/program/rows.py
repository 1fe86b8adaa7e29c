"""Commands that take a partition's rows of the batch through several stages, without a barrier in between."""

from __future__ import annotations

from onelaunch.engines.cpu.code.kernel import Address, Command, Unit
from onelaunch.engines.cpu.code.summed_update import COPY, SUMMED_UPDATE
from onelaunch.engines.cpu.program import backward, backward_products, clip, forward
from onelaunch.engines.cpu.program.work import Work


def forward_and_loss(work: Work) -> list[Command]:
    """The last stage, whose forward is split by rows, and the loss of the same rows."""
    return forward.forward(work, work.plan.last) + backward.loss_and_gradient(work)


def forward_and_backward(work: Work) -> list[Command]:
    """A step of a plan by rows up to the gradients of this partition's rows, and the same rows of the next batch."""
    plan = work.plan
    commands = [] if plan.stages[0].is_plain else forward.prepare_input(work)
    for stage in plan.stages[1:-1]:
        commands += forward.forward(work, stage)
    commands += forward_and_loss(work)
    for stage in reversed(plan.stages[1:]):
        commands += backward_products.weight_update(work, stage)
        if plan.needs_input_gradient(stage):
            commands += backward_products.input_gradient(work, stage)
            commands += backward.reduce_gradient(work, plan.stages[stage.index - 1])
    return commands + forward.gather(work, ahead=True)


def begin(work: Work) -> list[Command]:
    """Before the first step: this partition's rows of the first batch, and its copy of the parameters."""
    copied = []
    if work.private and work.partition:
        count = work.plan.copy_stride // 4
        copied.append(COPY.command(
            Unit("summed_update", (work.rule,)), source=Address("parameters"), target=work.parameter("parameters"), count=count
        ))  # fmt: skip
    return forward.gather(work) + copied


def update(work: Work) -> list[Command]:
    """Update this partition's part of all parameters, or its copy of them, with the sum of all partitions' gradients."""
    plan = work.plan
    shifts = [plan.gradient_shift(partition) // 4 for partition in range(plan.partitions)]
    commands = [
        SUMMED_UPDATE.command(
            Unit("summed_update", (work.rule,)), sums=tuple(start + shift for shift in shifts), sources=len(shifts),
            parameters=work.parameter(start.buffer) + start.offset // 4, panels=len(run), panel=stride,
            count=rows * run[0].width, state_stride=plan.state_stride, hyper=work.hyper,
        )
        for start, run, stride, rows, _ in clip.parts(work) if start.buffer.startswith(("weight", "bias"))
    ]  # fmt: skip
    return commands + [
        command for stage in plan.stages for command in backward_products.update_layer_norms(work, stage)
    ]
