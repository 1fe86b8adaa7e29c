"""A benchmark case: our way, the peers' ways, and the check that must pass before any of them is timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Work = Callable[[], object]
GROUPS = ("ops", "train", "cpu", "memory", "fuse")
FLOOR = "floor"  # a contender whose name starts so does the least that any way must do, and is no peer


@dataclass(frozen=True)
class Trial:
    """A case made ready to run. Each Work does the same job once; what it returns is thrown away."""

    ours: Work
    check: Work  # compares ours with a reference on fresh inputs; raises AssertionError saying what differs
    peers: Mapping[str, Work] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)  # peers that cannot run here, and why
    units: int = 1  # steps (or whatever Case.unit says) that one call does: times are given per unit
    floor_seconds: float | None = None  # the time a call's bytes or FLOPs must take on this device, when it is known
    floor_bytes: float | None = None  # what one call must move through the device's memory,
    floor_flops: float | None = None  # and the arithmetic it must do: set against this device's measured ceilings
    floor_dtype: str = "fp32"  # whose matrix rate bounds the arithmetic: fp32, tf32, bf16 or fp16
    cuda: bool = False  # time with CUDA events
    memory: Mapping[str, Work] = field(default_factory=dict)  # one call of each contender, for its peak of CUDA memory
    self_timed: bool = False  # each Work returns the seconds a unit took it, over as many units as it likes
    repeats: int | None = None  # samples at most, where each is long
    notes: Mapping[str, str] = field(default_factory=dict)  # what else the check found, by name


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
