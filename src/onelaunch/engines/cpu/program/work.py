"""What a phase is about: one partition of a plan, in training or in validation, and where its operands are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from onelaunch.engines.cpu.code.kernel import Address, FieldValue
from onelaunch.engines.cpu.code.optimizer import UpdateRule
from onelaunch.engines.cpu.plan.division import Panel
from onelaunch.engines.cpu.plan.plan import Plan
from onelaunch.engines.cpu.plan.stages import Stage
from onelaunch.engines.cpu.plan.target import CACHE_LINE
from onelaunch.integers import ceil_div


class Work:
    """`training` is False for a batch of validation rows. `alone`: one thread executes all partitions."""

    def __init__(self, plan: Plan, partition: int, *, training: bool, alone: bool) -> None:
        self.plan, self.partition, self.training = plan, partition, training
        self.private = plan.private_weights and training and not alone  # it has its own copy of the parameters
        self.batch = plan.batch if training else plan.settings.validation_batch
        self.hyper = Address("hyperparameters")

    def parameter(self, name: str) -> Address:
        """A parameter, or this partition's copy of it."""
        return Address(name, self.partition * self.plan.copy_stride if self.private else 0)

    @property
    def rule(self) -> UpdateRule:
        settings = self.plan.settings
        return UpdateRule(
            settings.optimizer, settings.momentum, settings.nesterov, settings.weight_decay, settings.clips
        )

    @property
    def epilogue(self) -> tuple[UpdateRule, int]:
        """What dW's epilogue does with a gradient, and the bytes between the copies of a parameter that it reads or writes."""
        if self.plan.by_rows:
            return UpdateRule("sgd", stores=True), self.plan.gradient_shift(self.partition)
        return self.rule, self.plan.state_stride

    @property
    def summed_rows(self) -> tuple[int, int]:
        """The rows of the batch that this partition's dW sums: [first, last)."""
        return self.plan.owned_rows(self.partition, self.batch) if self.plan.by_rows else (0, self.batch)

    def input_buffers(self) -> tuple[Address, Address]:
        """The input buffers of even and odd steps: while one is read, the next batch is gathered into the other."""
        copy = self.partition if self.plan.private_input else 0
        return Address(f"input.0.{copy}"), Address(f"input.1.{copy}")

    def output(self, stage: Stage) -> tuple[Address, Address]:
        """The buffers of a stage's final activations in even and odd steps, which differ for a plain input only."""
        if not self.training:
            number = len(stage.groups) - 1
            kept = stage.groups[number].tapped
            buffer = Address(f"validation.kept.{stage.index}.{number}" if kept else f"validation.{stage.index % 2}")
        elif stage.index == 0 and stage.is_plain:
            return self.input_buffers()
        else:
            buffer = Address(f"output.{stage.index}")
        return buffer, buffer

    def result(self, stage: Stage, group: int) -> Address:
        """The buffer that a group of a stage writes: one of its own if a later addition takes it, that of the next group's
        norm, or the stage's output."""
        if group < len(stage.groups) - 1:
            if stage.groups[group].tapped:
                return Address(f"{'' if self.training else 'validation.'}kept.{stage.index}.{group}")
            after = stage.groups[group + 1]
            if self.training and (after.batch_norm or after.layer_norm):
                return Address(f"normalised.{stage.index}.{group + 1}")
        return self.output(stage)[0]

    def results(self, stage: Stage, group: int) -> tuple[Address, Address]:
        """The same in even and odd steps, which differ for a plain input only."""
        if group == len(stage.groups) - 1:
            return self.output(stage)
        return self.result(stage, group), self.result(stage, group)

    def forward_by_rows(self, stage: Stage) -> bool:
        statistics = self.training or any(group.batch_norm and not group.batch_norm.tracks for group in stage.groups)
        return self.plan.forward_by_rows(stage, statistics=statistics)


def of_one_width(panels: Sequence[Panel]) -> list[list[Panel]]:
    """Consecutive panels, divided where their width changes."""
    return [list(group) for _, group in groupby(panels, key=lambda panel: panel.width)]


def next_rows(work: Work, tiles: int, wanted: bool) -> dict[str, FieldValue]:
    """How the tiles of dW prefetch the rows of the next batch between them: a piece of a row each, or several."""
    row_bytes = work.plan.stages[0].width * (1 if work.plan.settings.uint8_rows else 4)
    row_lines = ceil_div(row_bytes, CACHE_LINE)
    first, last = work.summed_rows
    lines = min(row_lines, ceil_div((last - first) * row_lines, max(1, tiles)))
    pieces = ceil_div(row_lines, lines)
    times = ceil_div((last - first) * pieces, max(1, tiles)) if wanted else 0
    return {
        "x": Address("x"), "row_bytes": row_bytes, "lines": lines, "pieces": pieces, "times": times,
        "batch": work.plan.batch, "first_next": first,
    }  # fmt: skip
