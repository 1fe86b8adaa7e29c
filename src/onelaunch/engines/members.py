"""Training many networks at once: what a sweep hands to an engine, and what it gets back.

A member is one Run of its own: model, rows, hyper-parameters and seed. All members handed over together have the same network,
batch size, optimizer, precision and loss; an engine that can train several at a time says so by having `train_members`.
An engine without it trains one member after another through its Session.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from onelaunch.engines.contract import Run, Segment, State


@dataclass(frozen=True)
class MemberTask:
    """Steps `first_step` to `last_step` of one member's run. Its model holds the weights of `first_step`.

    Both steps are ends of epochs, or of the run. Runs that train on the same rows share the tensors `x` and `y`.
    """

    index: int  # the member's number in the sweep
    run: Run
    first_step: int
    last_step: int
    state: Mapping[str, object] = field(default_factory=dict)  # the optimizer's, as Session.snapshot returns it


@dataclass(frozen=True)
class MemberResult:
    """What a task came to. The run's model holds the weights after the last segment."""

    index: int
    segments: tuple[Segment, ...]  # the last is shorter than its epoch if the loss stopped being finite
    state: State  # the optimizer's; empty where the task ends its run
    error: str = ""  # why the model cannot be trained any further, such as a batch that it does not take


class MembersMonitor(Protocol):
    """How a running engine hears of Ctrl-C and tells how far it is. Both members are cheap."""

    @property
    def stop(self) -> bool:
        """Whether to return without the results of unfinished members."""

    def report(self, steps: int) -> None:
        """Say how many steps of all tasks together are done."""


class MembersEngine(Protocol):
    """An engine that trains several members at a time."""

    def members_unsupported_reason(self, runs: Sequence[Run]) -> str:
        """Why these runs cannot be trained together; empty when they can."""
        return ""

    def members_plan(self, runs: Sequence[Run]) -> str:
        """For people: how many members run at once, where each is placed, and the predicted steps per second of all."""

    def train_members(self, tasks: Sequence[MemberTask], monitor: MembersMonitor) -> Iterator[MemberResult]:
        """Train every task, and yield each result when it is done, in any order."""
