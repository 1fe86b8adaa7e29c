"""A plan in words: where it runs and why, which block owns what, the memory, the exchanges and the phases of a pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Generic, TypeVar

from onelaunch.engines.resident.plan.layers import Layer, Memory
from onelaunch.engines.resident.plan.plan import Plan
from onelaunch.run.network import Dropout

MEMORIES = {True: "shared memory", False: "registers"}
P = TypeVar("P", bound=Plan)


class PlanText(ABC, Generic[P]):
    def __init__(self, plan: P) -> None:
        self.plan = plan

    @abstractmethod
    def placement(self) -> str:
        """Where the plan runs, and why there."""

    @abstractmethod
    def rows(self) -> str:
        """Rows per pass, and how many are multiplied at once."""

    @abstractmethod
    def ownership(self, layer: Layer) -> str:
        """Which block owns which part of a layer, and where it keeps it."""

    @abstractmethod
    def phase(self, name: str) -> str:
        """What a phase reads and writes."""

    def write(self) -> str:
        plan = self.plan
        lines = [*self._head(), *map(self._layer, plan.layers), *_memory("shared memory of a block", plan.shared)]
        if plan.exchange.size:
            lines += _memory("global memory, kept in the L2 cache", plan.exchange)
        if plan.blocks > 1:
            lines += self._exchanges()
        lines.append("a pass:")
        for number, (name, _) in enumerate(plan.phases(), 1):
            alone = plan.blocks == 1 and name.startswith("wait")
            lines.append(f"  {number:>2}. {name}: {'the barrier of the block' if alone else self.phase(name)}")
        return "\n".join(lines)

    def _head(self) -> Iterator[str]:
        plan, settings = self.plan, self.plan.settings
        linears = [layer.stage.linear for layer in plan.layers]
        widths = "-".join(str(width) for width in [linears[0].inputs, *(linear.outputs for linear in linears)])
        yield f"resident: {widths}, batch {settings.batch}, {settings.precision}, {settings.optimizer}"
        operands = (
            f"a number is the sum of {plan.planes} bf16 numbers"
            if plan.planes > 1
            else f"products in {settings.precision}"
        )
        yield f"precision: {operands}; sums, masters and optimizer state are fp32"
        yield f"placement: {self.placement()}; predicted {plan.predicted_microseconds:.1f} µs per step"
        passes = f"; a batch takes {plan.micro_batches} passes, whose gradients are summed"
        buffers = (
            "while the pass before computes" if plan.input_buffers == 2 else "after the pass before: no room for two"
        )
        yield f"rows: {self.rows()}{passes if plan.micro_batches > 1 else ''}; fetched {buffers}"

    def _layer(self, layer: Layer) -> str:
        linear = layer.stage.linear
        chain = [f"dropout {part.p}" if isinstance(part, Dropout) else part.name for part in layer.stage.chain]
        head = ", ".join([f"linear {linear.inputs} -> {linear.outputs}", *chain])
        return f"layer {layer.index}: {head}: {self.ownership(layer)}"

    def _exchanges(self) -> Iterator[str]:
        way = (
            "st.async into every block's shared memory, counted by its barriers"
            if self.plan.cluster
            else "global memory, with one flag per writer"
        )
        yield f"exchanges, by {way}; bytes that a block receives:"
        names = self.plan.exchange_names()
        for number, size in sorted(self.plan.exchanged_bytes().items()):
            yield f"  {size:>9,}  {names[number]}"


def _memory(title: str, memory: Memory) -> Iterator[str]:
    yield f"{title}: {memory.size:,} bytes"
    for region in memory.regions.values():
        yield f"  {region.offset:>9,}  {region.bytes:>9,}  {region.name}"
