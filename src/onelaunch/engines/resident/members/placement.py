"""Where members are placed: the blocks of each, how many run at once, and the steps per second that this should give."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from onelaunch.device import Chip
from onelaunch.engines.resident.members.slices import rounds
from onelaunch.engines.resident.plan.placement import plans_by_rows, plans_by_units
from onelaunch.engines.resident.plan.plan import Plan
from onelaunch.engines.resident.plan.rows_plan import RowsPlan
from onelaunch.engines.resident.plan.settings import (
    MAX_BATCH,
    MAX_OUTPUTS,
    RESERVED_REGISTERS,
    THREADS,
    WARPS,
    Settings,
)
from onelaunch.engines.stages import UnsupportedNetworkError

RESERVED_BYTES = 1024  # of shared memory, which the device keeps for itself per block
MAX_PER_MULTIPROCESSOR = 4  # blocks: more would leave fewer than 64 registers per thread
CLUSTER_SHARE = 0.92  # of the multiprocessors that clusters can use: an H200 holds 15 clusters of 8 blocks, 30 of 4
# Fitted to members timed on an H200 (docs/lab-notebook/resident.md). A plan's own prediction is for a single run; one block of
# eight warps that updates at once is faster. State that is streamed through L2 delays a step by its latency, and all of it
# together is read and written with at most so many KiB per microsecond and multiprocessor.
ONE_BLOCK, BUSY_SHARE, MICROSECONDS_PER_STREAMED_KIB, L2_KIB_PER_MICROSECOND = 0.82, 0.44, 0.058, 32.4


@dataclass(frozen=True)
class MembersPlan:
    """The plan of each member, and how many run at once."""

    plan: Plan
    places: int

    @property
    def microseconds(self) -> float:
        """Predicted time of a step while all places are taken."""
        plan, per = self.plan, self.plan.settings.per_multiprocessor
        streamed = plan.exchange.size / 1024
        alone = plan.predicted_microseconds * (
            ONE_BLOCK if isinstance(plan, RowsPlan) and plan.threads == THREADS else 1.0
        )
        alone += MICROSECONDS_PER_STREAMED_KIB * streamed
        busy = BUSY_SHARE * plan.predicted_microseconds * per if per > 1 else 0.0  # issue slots that blocks compete for
        return max(math.hypot(alone, busy), 2 * streamed * per / L2_KIB_PER_MICROSECOND)

    def steps_per_second(self, members: int, epochs: int = 1) -> float:
        """Predicted, of all members together, if all take the same number of steps and can take turns in so many epochs."""
        return members / (rounds(members, self.places, epochs) * self.microseconds) * 1e6

    def describe(self, members: int, epochs: int = 1) -> str:
        plan, rate = self.plan, self.steps_per_second(members, epochs)
        by = "rows" if isinstance(plan, RowsPlan) else "units"
        where = f"a cluster of {plan.blocks} blocks, divided by {by}," if plan.blocks > 1 else "one block"
        per = plan.settings.per_multiprocessor
        shared = f", {per} members per multiprocessor" if per > 1 else ""
        head = f"{members} members, {min(members, self.places)} at once: {where} for each{shared}"
        return f"{head}; predicted {rate / 1e6:.2f} million steps per second\n{plan.describe()}"


@dataclass(frozen=True)
class Forced:
    """A placement for tests and measurements; None leaves the choice."""

    blocks: int | None = None
    by_rows: bool | None = None
    per_multiprocessor: int | None = None
    warps: int | None = None

    def allows(self, plan: Plan) -> bool:
        found = (plan.blocks, isinstance(plan, RowsPlan), plan.settings.per_multiprocessor, plan.warps)
        return all(value in (None, of) for value, of in zip(dataclasses.astuple(self), found, strict=True))


FREE = Forced()


@functools.lru_cache(maxsize=64)
def choose_members_plan(
    settings: Settings, chip: Chip, members: int, epochs: int = 1, *, reserved_registers: int = RESERVED_REGISTERS,
    forced: Forced = FREE,
) -> MembersPlan:  # fmt: skip
    """The placement with the most predicted steps per second; UnsupportedNetworkError with the reason where none fits.

    It is needed when the engine is chosen, described and started. For a network of 784 inputs it takes half a second to find.
    """
    outputs = settings.stages[-1].linear.outputs
    if outputs > MAX_OUTPUTS:
        raise UnsupportedNetworkError(f"the model has {outputs} outputs, this engine takes up to {MAX_OUTPUTS}")
    if settings.batch > MAX_BATCH:
        raise UnsupportedNetworkError(f"batch_size={settings.batch} is above the {MAX_BATCH} rows this engine takes")
    refused = list[Plan]()
    fitting = list[MembersPlan]()
    for plan in _candidates(settings, chip, reserved_registers):
        if not forced.allows(plan):
            continue
        if plan.refusal:
            refused.append(plan)
        else:
            fitting.append(MembersPlan(plan, places(plan, chip)))
    if not fitting:
        reason = min(refused, key=lambda plan: plan.shared.size).refusal if refused else "too wide for its blocks"
        raise UnsupportedNetworkError(f"the network does not fit on the chip: {reason}")
    return max(fitting, key=lambda found: found.steps_per_second(members, epochs))


def places(plan: Plan, chip: Chip) -> int:
    """Members at once, before the device is asked."""
    if plan.blocks == 1:
        return chip.multiprocessors * plan.settings.per_multiprocessor
    return max(1, int(CLUSTER_SHARE * chip.multiprocessors / plan.blocks))


def _candidates(settings: Settings, chip: Chip, reserved_registers: int) -> Iterator[Plan]:
    """Per placement, the plan with the most rows per pass that fits, or one that does not."""
    for per in range(1, MAX_PER_MULTIPROCESSOR + 1):
        each = (chip.shared_bytes + RESERVED_BYTES) // per - RESERVED_BYTES
        narrow = dataclasses.replace(chip, shared_bytes=each)
        shared = dataclasses.replace(settings, per_multiprocessor=per)
        for plans in plans_by_rows(shared, narrow):
            yield from _first_that_fits(plan for plan in plans if per == 1 or plan.blocks == 1)
    for plans in plans_by_rows(settings, chip, warps=2 * WARPS):
        yield from _first_that_fits(plan for plan in plans if plan.blocks == 1)
    for plans in plans_by_units(settings, chip, reserved_registers):
        yield from _first_that_fits(plan for plan in plans if plan.blocks == 1 or plan.cluster)


def _first_that_fits(plans: Iterator[Plan]) -> Iterator[Plan]:
    for plan in plans:
        yield plan
        if not plan.refusal:
            return
