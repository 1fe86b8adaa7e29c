"""How members share the places of the chip where there are more members than places: in turns of some epochs each.

64 members on 30 places would take three rounds of whole runs, the last one nearly empty. Cut into 16 slices each, they take 35
launches of 30 slices, one after another: 2.2 times the length of a run. A slice begins with the weights and the state that
the slice before left in memory, so the bits are those of a whole run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from onelaunch.engines.members import MemberTask
from onelaunch.integers import ceil_div

MAX_SLICES = 16  # per member
SLICE_COST = 0.003  # of a run's length: the start of a launch, and weights and state in and out


class Slice(NamedTuple):
    member: int  # number of the task
    first_step: int
    last_step: int
    epochs_before: int  # epochs of the task that have ended before it


def launches_of(tasks: Sequence[MemberTask], places: int, *, whole: bool = False) -> list[list[Slice]]:
    """The slices of each launch, in order. `whole`: every task in one piece, all in one launch.

    A member is in a launch at most once, and its slices are in order.
    """
    count = slices_per_member(len(tasks), places, 1 if whole else shared_epochs(tasks))
    if count == 1:
        return [[Slice(number, task.first_step, task.last_step, 0) for number, task in enumerate(tasks)]]
    ends = _epoch_ends(tasks[0])
    cuts = [len(ends) * part // count for part in range(count + 1)]
    bounds = [tasks[0].first_step, *(ends[cut - 1] for cut in cuts[1:])]
    entries = [
        Slice(number, bounds[part], bounds[part + 1], cuts[part])
        for part in range(count)
        for number in range(len(tasks))
    ]
    return [entries[first : first + places] for first in range(0, len(entries), places)]


def shared_epochs(tasks: Sequence[MemberTask]) -> int:
    """The epochs of each task if all are alike, so that they can take turns; else 1."""
    alike = {(task.first_step, task.last_step, task.run.spec.steps_per_epoch) for task in tasks}
    return len(_epoch_ends(tasks[0])) if len(alike) == 1 else 1


def slices_per_member(members: int, places: int, epochs: int) -> int:
    """The number that is predicted fastest: 1 where the places are filled evenly anyway."""
    if members <= places:
        return 1
    return min(range(1, min(epochs, MAX_SLICES) + 1), key=lambda count: _rounds(members, places, count))


def rounds(members: int, places: int, epochs: int) -> float:
    """The time until all have ended, in lengths of a run."""
    return _rounds(members, places, slices_per_member(members, places, epochs))


def _rounds(members: int, places: int, count: int) -> float:
    launches = ceil_div(members * count, places)
    return launches / count + (SLICE_COST * launches if count > 1 else 0.0)


def _epoch_ends(task: MemberTask) -> list[int]:
    """The steps at which the task's epochs end; the last is the task's end."""
    per_epoch = task.run.spec.steps_per_epoch
    first = task.first_step - task.first_step % per_epoch + per_epoch
    return [*range(first, task.last_step, per_epoch), task.last_step]
