"""The forms in which a step can be compiled: with our patterns, or as Inductor compiles it alone.

Which is faster depends on the model, the shapes and the chip, so whole recorded steps decide. A run begins with our patterns.
When it has lasted as long as compiling took, the other form is compiled too: a short run never waits for it, and a long one
waits once. Then both take turns for a few dozen steps, which train as all others do, over the same parameters and optimizer
state. The device's clock decides. The decision is kept on disk by graph, shapes, chip, versions and sources, and the next
process compiles the faster form alone.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import fx

from onelaunch.capture.dynamo import compile_by
from onelaunch.capture.named_inputs import keeping_names
from onelaunch.format import format_seconds
from onelaunch.fuse.backend import onelaunch
from onelaunch.fuse.decide import ALL, graphs_key, times_of
from onelaunch.fuse.patterns import find_matches, pays

log = logging.getLogger("onelaunch")
WITH_PATTERNS, ALONE = "our patterns", "Inductor alone"
Samples = list[tuple[Any, Any]]  # events before and after a step
TURNS = 32  # timed steps of each form, of which the median counts


class Candidates:
    """The forms of one step, and whose turn it is.

    tune: whether to compare them: at once, never, or, for None, when the run has lasted as long as compiling took. recorded:
    whether steps are recorded as CUDA graphs; otherwise the first form is kept.
    """

    def __init__(
        self, function: Callable[..., Any], device: torch.device, mode: str | None, tune: bool | None, recorded: bool
    ) -> None:
        self._function, self._device, self._mode, self._recorded = function, device, mode, recorded
        self.tune = tune
        self.forms = [WITH_PATTERNS, ALONE]
        self.current = 0
        self.is_settled = tune is False or not recorded
        self.takes_turns = False
        self.choice = ""  # what was decided and why, in words
        self._kinds: set[str] = set()  # of patterns that match
        self._graphs: list[str] = []  # the keys of what the first form compiled
        self._due = math.inf
        self._timed: dict[Any, tuple[Samples, Samples]] = defaultdict(lambda: ([], []))
        self._functions: dict[int, Callable[..., Any]] = {}

    @property
    def function(self) -> Callable[..., Any]:
        """The form whose turn it is. It is compiled when it is called."""
        if self.current not in self._functions:
            backend = functools.partial(self._compile, self.current)
            self._functions[self.current] = compile_by(
                keeping_names(backend) if self._recorded else backend, self._function
            )
        return self._functions[self.current]

    def _compile(self, form: int, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        if form == 0 and not self.is_settled:
            self._look_up(gm)
        patterns = ALL if self.forms[form] == WITH_PATTERNS else ()
        return onelaunch(gm, example_inputs, mode=self._mode, patterns=patterns, captured=self._recorded)

    def _look_up(self, gm: fx.GraphModule) -> None:
        """Which patterns match in a graph, and what was decided about it before."""
        self._kinds |= {match.pattern.name for match in find_matches(gm.graph, pays)}
        self._graphs.append(graphs_key([gm.graph], f"train_step {self._mode}"))
        if len(self._graphs) == 1 and self._device.type == "cuda":
            known = times_of(self._device).times(self._graphs[0])
            if known.keys() == {WITH_PATTERNS, ALONE}:
                self.forms[0] = min(known, key=known.__getitem__)
                self._settle(known, "measured before")

    def has_compiled(self, seconds: float) -> None:
        """After a call that compiled, which took so long."""
        if self._kinds and not self.is_settled and not self.takes_turns:
            self._due = time.monotonic() + (0.0 if self.tune else seconds)

    def is_due(self) -> bool:
        """Whether it is time to compile the other form."""
        return not self.is_settled and not self.takes_turns and time.monotonic() >= self._due

    def begin_turns(self) -> None:
        self.takes_turns = True
        log.info(
            "train_step: compiling the step without our patterns as well, to keep the faster form (tune=False: not compared)"
        )

    def take_turn(self, kind: Any) -> None:
        """Choose the form of the next step, of this kind of inputs."""
        if self.takes_turns:
            first, second = self._timed[kind]
            self.current = int(len(second) <= len(first))

    @contextlib.contextmanager
    def timed(self, kind: Any) -> Iterator[None]:
        """Inside, while forms take turns, one recorded step is replayed. After enough of them, the faster form is kept."""
        begin, end = self._clock(), self._clock()
        begin.record()
        yield
        end.record()
        timed = self._timed[kind]
        timed[self.current].append((begin, end))
        if min(map(len, timed)) >= TURNS and all(end.query() for samples in timed for _, end in samples[:TURNS]):
            self._keep_the_faster(timed)  # the device may be many steps behind: nothing waits for it

    def _keep_the_faster(self, timed: tuple[Samples, Samples]) -> None:
        medians = [median(begin.elapsed_time(end) for begin, end in samples[:TURNS]) / 1e3 for samples in timed]
        found = dict(zip(self.forms, medians, strict=True))
        self.current = int(medians[1] < medians[0])
        self._settle(found, f"medians of {TURNS} steps")
        if self._device.type == "cuda":
            for key in self._graphs:
                times_of(self._device).add(key, found)

    def give_up(self, reason: str) -> None:
        """The second form cannot be used."""
        self.current = 0
        self._settle({}, f"{self.forms[1]} cannot be used: {reason}")

    def _settle(self, seconds: dict[str, float], why: str) -> None:
        self.is_settled, self.takes_turns = True, False
        self._timed.clear()
        for form in {*self._functions} - {self.current}:
            del self._functions[form]
        names = {WITH_PATTERNS: f"our patterns ({', '.join(sorted(self._kinds))})", ALONE: ALONE}
        chosen = self.forms[self.current]
        others = [f", {names[name]} {format_seconds(one)}" for name, one in seconds.items() if name != chosen]
        compared = f": {format_seconds(seconds[chosen])} per step{''.join(others)}" if seconds else ""
        self.choice = f"{names[chosen]}{compared} ({why})"
        log.info("train_step: %s", self.choice)

    def _clock(self) -> Any:
        return torch.cuda.Event(enable_timing=True) if self._device.type == "cuda" else HostEvent()


class HostEvent:
    """Like `torch.cuda.Event`, on a CPU."""

    def record(self) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: HostEvent) -> float:
        return 1e3 * (end._at - self._at)
