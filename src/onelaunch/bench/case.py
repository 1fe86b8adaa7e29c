"""A benchmark case: our implementation, its peers, and the check that must pass before any of them is timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Work = Callable[[], object]
OURS = "onelaunch"  # our name among the contenders of a case
FLOOR = "floor"  # a contender whose name starts with this does the least that any implementation must do; it is no peer


@dataclass(frozen=True)
class Group:
    """Cases that are run, recorded and shown together: `onelaunch bench NAME`."""

    name: str
    title: str
    on_gpu: bool | None  # None: some of its cases run on the GPU, others on the CPU


# In the order in which they run and are shown.
GROUPS: Mapping[str, Group] = {
    group.name: group
    for group in (
        Group("train", "Training runs", None),
        Group("cpu", "Training on a CPU", False),
        Group("sweep", "Many networks at once", None),
        Group("ops", "Fused ops", True),
        Group("models", "Real models", True),
        Group("zoo", "Models that nobody tuned for", True),
        Group("memory", "Memory", True),
        Group("tabular", "Estimators on real tables", False),
    )
}


def group_of(name: str) -> Group:
    """The group of that name; one titled like its name where a results file holds a group that we do not know."""
    return GROUPS.get(name) or Group(name, name, None)


@dataclass(frozen=True)
class Trial:
    """A case ready to run. Each Work does the same job once; its result is thrown away."""

    ours: Work
    check: Work  # compares ours with a reference on fresh inputs; raises AssertionError saying what differs
    peers: Mapping[str, Work] = field(default_factory=dict)
    slow_peers: Mapping[str, Work] = field(default_factory=dict)  # not run with --quick: they take long to compile
    absent: Mapping[str, str] = field(default_factory=dict)  # peers that cannot run on this machine, and why
    units: int = 1  # steps (or whatever Case.unit says) per call: times are given per unit
    floor_bytes: float | None = None  # the bytes that one call must move through the device's memory
    floor_flops: float | None = None  # the arithmetic that one call must do
    floor_dtype: str = "fp32"  # whose matrix rate bounds the arithmetic: fp32, tf32, bf16 or fp16
    cuda: bool = False  # time with CUDA events
    memory: Mapping[str, Work] = field(default_factory=dict)  # one call of each contender, for its peak of CUDA memory
    peak_bytes: Mapping[str, int] = field(default_factory=dict)  # of contenders that measure their own peak, when timed
    self_timed: bool = False  # each Work returns its own seconds per unit, over as many units as it likes
    repeats: int | None = None  # maximum number of samples, where each takes long
    warm_ups: int | None = None  # calls of each contender before the first that counts; None for the usual number
    errors: Mapping[str, list[float]] = field(default_factory=dict)  # by contender, filled in call by call while timed
    notes: Mapping[str, str] = field(default_factory=dict)  # further findings of the check, by name


@dataclass(frozen=True)
class Case:
    name: str
    group: str
    about: str  # one line: what is computed
    setup: Callable[[], Trial]
    unit: str = "step"


REGISTRY: dict[str, Case] = {}


def case(name: str, group: str, about: str, unit: str = "step") -> Callable[[Callable[[], Trial]], Callable[[], Trial]]:
    """Register the decorated set-up function as a case."""
    assert group in GROUPS, group
    assert name not in REGISTRY, name

    def register(setup: Callable[[], Trial]) -> Callable[[], Trial]:
        REGISTRY[name] = Case(name, group, about, setup, unit)
        return setup

    return register
