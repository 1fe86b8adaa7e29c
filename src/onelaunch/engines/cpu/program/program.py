"""The program of a plan: lists of commands, for one thread or for one thread per partition.

    train.alone          all partitions of every phase in turn, on the calling thread
    train.<t>            partition t only, with a barrier after each phase
    validate...          the same for validation

Both ways give the same bits: a phase never reads what another partition writes in the same phase. `Table` turns the lists
into memory that native code reads (table.py). Nothing here is compiled: a new network needs a new table only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from onelaunch.engines.cpu.code import driver
from onelaunch.engines.cpu.code.kernel import Address, Command, Unit
from onelaunch.engines.cpu.code.units import ROW_ORDER
from onelaunch.engines.cpu.plan.plan import Plan
from onelaunch.engines.cpu.plan.settings import Settings
from onelaunch.engines.cpu.plan.target import Target
from onelaunch.engines.cpu.program import backward, backward_products, clip, forward, rows
from onelaunch.engines.cpu.program.table import Template
from onelaunch.engines.cpu.program.work import Work

MAX_PROGRAMS = 64  # kept for further runs of equal settings
Build = Callable[[Work], list[Command]]


def training_phases(plan: Plan) -> list[tuple[str, Build]]:
    """The phases of a step. A barrier separates them; each comment names what the phase writes for later ones."""
    if plan.by_rows:
        return [("rows", rows.forward_and_backward), ("update", rows.update)]  # gradients of the rows; the parameters
    phases: list[tuple[str, Build]] = []
    stages, last = plan.stages, plan.last
    if not stages[0].is_plain:
        phases.append(("input", forward.prepare_input))  # columns of the prepared input
    for stage in stages[1:-1]:
        phases.append((f"forward {stage.index}", partial(forward.forward, stage=stage)))  # activations
    if last.batch_norms:
        phases.append((f"forward {last.index}", partial(forward.forward, stage=last)))  # columns of the outputs
        phases.append(("loss", backward.loss_and_gradient))  # rows of the gradient
        through = partial(backward.through_groups, stage=last)
        phases.append((f"groups {last.index}", through))  # columns of the gradient
    else:
        phases.append((f"forward {last.index}, loss", rows.forward_and_loss))  # rows of the gradient
    backward_phases: list[list[Build]] = [[]]
    for stage in reversed(stages[1:]):
        if plan.needs_input_gradient(stage):
            backward_phases[-1].append(partial(backward_products.input_gradient, stage=stage))
        backward_phases[-1].append(partial(backward_products.weight_update, stage=stage))
        backward_phases[-1].append(partial(backward_products.update_layer_norms, stage=stage))
        if plan.needs_input_gradient(stage):
            before = stages[stage.index - 1]
            # Partial sums of dX. Those of the last stage are complete and stay in their partition, unless it reads rows.
            if stage is not last or before.layer_norms:
                backward_phases.append([])
            backward_phases[-1].append(partial(backward.reduce_gradient, stage=before))
            if before.layer_norms:  # rows of the gradient, and sums for scale and shift
                backward_phases.append([])
    backward_phases[-1].append(partial(backward_products.update_layer_norms, stage=stages[0]))
    backward_phases[-1].append(partial(forward.gather, ahead=True))  # the next batch
    phases += [(f"backward {number}", partial(_in_turn, phase)) for number, phase in enumerate(backward_phases)]
    if plan.settings.clips:
        phases += [("norm", clip.norm), ("update", clip.update)]  # sums of squares; a part of the parameters
    return phases


def _in_turn(builds: list[Build], work: Work) -> list[Command]:
    return [command for build in builds for command in build(work)]


def validation_phases(plan: Plan) -> list[tuple[str, Build]]:
    """The phases of a validation batch."""
    phases: list[tuple[str, Build]] = [("gather", forward.gather)]
    if not plan.stages[0].is_plain:
        phases.append(("input", forward.prepare_input))
    for stage in plan.stages[1:-1]:
        phases.append((f"forward {stage.index}", partial(forward.forward, stage=stage)))
    if any(group.batch_norm and not group.batch_norm.tracks for group in plan.last.groups):
        phases.append((f"forward {plan.last.index}", partial(forward.forward, stage=plan.last)))
        phases.append(("loss", backward.loss_and_gradient))
    else:
        phases.append((f"forward {plan.last.index}, loss", rows.forward_and_loss))
    return phases


@dataclass
class Program:
    """`lists` has the commands of each entry point, before the first step and per step. `ticks` names the counters of a plan
    with `Settings.profile`."""

    lists: dict[str, tuple[list[Command], list[Command]]]
    ticks: dict[str, int]
    plan: Plan

    @functools.cached_property
    def description(self) -> str:
        """The plan, for people."""
        return str(self.plan)

    @functools.cached_property
    def template(self) -> Template:
        """What the tables of all sessions are made from."""
        return Template(self.lists, self.plan)

    @functools.cached_property
    def units(self) -> list[Unit]:
        """What the program needs compiled."""
        found = {command.unit: None for lists in self.lists.values() for commands in lists for command in commands}
        return [driver.UNIT, ROW_ORDER, *(unit for unit in found if unit != driver.UNIT)]


def program_of(plan: Plan) -> Program:
    program = Program({}, {}, plan)
    _add_entry_points(program, "train", training_phases(plan), training=True)
    if plan.settings.validates:
        _add_entry_points(program, "validate", validation_phases(plan), training=False)
    return program


@functools.lru_cache(MAX_PROGRAMS)
def program_for(settings: Settings, target: Target) -> Program:
    """The program of a run with these settings. It is pure data: runs of equal settings share it."""
    return program_of(Plan(settings, target))


def _add_entry_points(program: Program, kind: str, phases: list[tuple[str, Build]], *, training: bool) -> None:
    plan = program.plan
    first: list[tuple[str, Build]] = [("gather first", rows.begin)] if training else []

    def build_all(*, alone: bool) -> dict[str, list[list[Command]]]:
        works = [Work(plan, number, training=training, alone=alone) for number in range(plan.partitions)]
        return {name: [build(work) for work in works] for name, build in [*first, *phases]}

    built = build_all(alone=False)
    built_alone = build_all(alone=True) if plan.private_weights and training else built

    def tick(partition: int, name: str) -> list[Command]:
        if not plan.settings.profile:
            return []
        counter = 1 + program.ticks.setdefault(name, len(program.ticks))
        return [driver.TICK.command(driver.UNIT, ticks=Address(f"ticks.{partition}"), counter=counter)]

    def alone(names: list[str]) -> list[Command]:
        return [c for name in names for part in [*built_alone[name], tick(0, name)] for c in part]

    def together(names: list[str], partition: int) -> list[Command]:
        commands = []
        for name in names:
            commands += built[name][partition] + tick(partition, name)
            ends_step = name == phases[-1][0] or name == "gather first"
            if not (training and plan.steps_overlap and ends_step):
                commands += _barrier(plan, partition) + tick(partition, f"wait after {name}")
        return commands

    before, names = [name for name, _ in first], [name for name, _ in phases]
    program.lists[f"{kind}.alone"] = alone(before), alone(names)
    if plan.partitions > 1:
        for number in range(plan.partitions):
            program.lists[f"{kind}.{number}"] = together(before, number), together(names, number)


def _barrier(plan: Plan, partition: int) -> list[Command]:
    others = tuple(Address(f"flag.{other}") for other in range(plan.partitions) if other != partition)
    return [driver.BARRIER.command(
        driver.UNIT, own=Address(f"flag.{partition}"), flags=others, partitions=len(others), control=Address("control")
    )]  # fmt: skip
