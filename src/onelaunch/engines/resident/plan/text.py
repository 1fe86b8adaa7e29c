"""A plan in words: where it runs and why, which block owns what, the memory, the exchanges and the phases of a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from onelaunch.engines.resident.plan.layers import Layer, Memory
from onelaunch.engines.resident.plan.plan import Plan
from onelaunch.run.network import Dropout

MEMORIES = {True: "shared memory", False: "registers"}


def describe(
    plan: Plan, *, placement: str, rows: str, ownership: Callable[[Layer], str], phase: Callable[[str], str]
) -> str:
    """The text of `History.plan`.

    `placement`: where the plan runs, and why there. `rows`: how many per pass and at once. `ownership`: which block owns which
    part of a layer, and where it keeps it. `phase`: what a phase reads and writes, by its name.
    """
    lines = [*_head(plan, placement, rows), *(f"{_name(layer)}: {ownership(layer)}" for layer in plan.layers)]
    lines += _memory("shared memory of a block", plan.shared)
    if plan.exchange.size:
        lines += _memory("global memory, kept in the L2 cache", plan.exchange)
    if plan.blocks > 1:
        lines += _exchanges(plan)
    lines.append("a pass:")
    for number, name in enumerate(plan.phase_names(), 1):
        alone = plan.blocks == 1 and name.startswith("wait")
        lines.append(f"  {number:>2}. {name}: {'the barrier of the block' if alone else phase(name)}")
    return "\n".join(lines)


def _head(plan: Plan, placement: str, rows: str) -> Iterator[str]:
    settings, linears = plan.settings, [layer.stage.linear for layer in plan.layers]
    widths = "-".join(str(width) for width in [linears[0].inputs, *(linear.outputs for linear in linears)])
    yield f"resident: {widths}, batch {settings.batch}, {settings.precision}, {settings.optimizer}"
    split = f"a number is the sum of {plan.planes} bf16 numbers"
    operands = split if plan.planes > 1 else f"products in {settings.precision}"
    yield f"precision: {operands}; sums, masters and optimizer state are fp32"
    yield f"placement: {placement}; predicted {plan.predicted_microseconds:.1f} µs per step"
    passes = (
        f"; a batch takes {plan.micro_batches} passes, whose gradients are summed" if plan.micro_batches > 1 else ""
    )
    buffers = "while the pass before computes" if plan.input_buffers == 2 else "after the pass before: no room for two"
    yield f"rows: {rows}{passes}; fetched {buffers}"


def _name(layer: Layer) -> str:
    linear = layer.stage.linear
    chain = [f"dropout {part.p}" if isinstance(part, Dropout) else part.name for part in layer.stage.chain]
    return f"layer {layer.index}: " + ", ".join([f"linear {linear.inputs} -> {linear.outputs}", *chain])


def _memory(title: str, memory: Memory) -> Iterator[str]:
    yield f"{title}: {memory.size:,} bytes"
    for region in memory.regions.values():
        yield f"  {region.offset:>9,}  {region.bytes:>9,}  {region.name}"


def _exchanges(plan: Plan) -> Iterator[str]:
    shared = "st.async into every block's shared memory, counted by its barriers"
    way = shared if plan.cluster else "global memory, with one flag per writer"
    yield f"exchanges, by {way}; bytes that a block receives:"
    names = plan.exchange_names()
    for number, size in sorted(plan.exchanged_bytes().items()):
        yield f"  {size:>9,}  {names[number]}"
