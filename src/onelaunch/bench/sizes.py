"""Time of a step over the hidden size: every contender, at every size."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from onelaunch.bench.contenders import Contender, OurEngine, contenders_for, shortened
from onelaunch.bench.measure import SETTLE_SECONDS, reason_in_a_line
from onelaunch.bench.step_peers import step_peers
from onelaunch.engines import choose
from onelaunch.engines.contract import Run
from onelaunch.errors import is_out_of_memory
from onelaunch.format import format_seconds

SHORT_STEPS, REPEATS, SAMPLE_SECONDS = 2, 3, 0.3
NOISY, MORE_REPEATS = 1.3, 4  # samples further apart than this factor are followed by more
LEAST_MORE_STEPS, MOST_STEPS = 4, 100_000  # a long run has so many more than a short one, and so many in all
MOST_GROWTH = 16  # of the long run from one try to the next: a first try of few steps tells little

T = TypeVar("T")


def time_sizes(
    sizes: Sequence[int], run_of: Callable[[int], Run], show: Callable[[str], None], results: dict[str, Any]
) -> None:
    """Fill `results` size by size, so that an interruption keeps what is done. `run_of(hidden)` makes the run of a size; one
    that cannot be made is named under "left_out", an engine of ours that raises under "failed", and the others go on."""
    results.update({"hidden": [], "step_seconds": {}, "absent": {}, "auto": {}, "left_out": {}, "failed": {}})
    for size in sizes:
        try:
            run = run_of(size)
            contenders, absent = contenders_for(run)
            faster, missing = step_peers(run)
            auto = f"onelaunch {choose(run)[0].name}"
        except Exception as error:  # more than memory holds, say
            results["left_out"][str(size)] = reason_in_a_line(error)
            continue
        contenders, absent = [*faster, *contenders], {**absent, **missing}
        results["hidden"].append(size)
        results["auto"][str(size)] = auto
        show(f"{size:>6}  {len(contenders)} contenders in turns")
        timings, errors = time_steps(contenders, run)
        for name, timing in timings.items():
            results["step_seconds"].setdefault(name, {})[str(size)] = timing
            show(f"{size:>6}  {name:<20} {format_seconds(timing['median']):>10} a step")
        for contender in contenders:
            if contender.name not in errors:
                continue
            reason, out_of_memory = errors[contender.name]
            absent[contender.name] = reason
            fails = isinstance(contender, OurEngine) and not out_of_memory
            if fails:
                results["failed"].setdefault(contender.name, {})[str(size)] = reason
            show(f"{size:>6}  {contender.name:<20} {'failed' if fails else 'absent'} ({reason})")
        for name, reason in absent.items():
            results["absent"].setdefault(name, {})[str(size)] = reason


def time_steps(
    contenders: Sequence[Contender], run: Run
) -> tuple[dict[str, dict[str, Any]], dict[str, tuple[str, bool]]]:
    """Seconds a step of each, warmed up: median, least and most of a few samples; and of those that raised the reason, and
    whether it was memory. (Not the error: it would hold on to theirs.)

    Samples are taken in turns: a slow moment of the machine hits all alike. Who is noisy gets more of them.
    """
    paced: dict[str, _Paced] = {}
    errors: dict[str, tuple[str, bool]] = {}

    def attempt(name: str, act: Callable[[], T]) -> T | None:
        try:
            return act()
        except (Exception, SystemExit) as error:
            errors[name] = (reason_in_a_line(error), is_out_of_memory(error))
            del paced[name]
            return None

    for contender in contenders:
        paced[contender.name] = _Paced(contender, run)
        attempt(contender.name, paced[contender.name].find_pace)
    for _ in range(REPEATS - 1):
        for name in list(paced):
            attempt(name, paced[name].sample)
    noisy = [name for name, one in paced.items() if one.is_noisy()]
    for _ in range(MORE_REPEATS):
        for name in noisy:
            if name in paced:
                attempt(name, paced[name].sample)
    timed = ((name, attempt(name, one.timing)) for name, one in list(paced.items()))
    return {name: timing for name, timing in timed if timing is not None}, errors


class _Paced:
    """A contender, how long its runs must be to be timed, and its samples.

    What a run costs once (allocating, starting threads, the first copy) is in every run: a sample is what a long run takes
    beyond a short one, over the steps it has more. The long run has as many as fill SAMPLE_SECONDS beyond the short one.
    """

    def __init__(self, contender: Contender, run: Run) -> None:
        self.contender, self.run = contender, run
        self.steps = SHORT_STEPS + LEAST_MORE_STEPS
        self.samples: list[tuple[int, float]] = []

    def find_pace(self) -> None:
        """Warms up, finds how long a run must be, and takes the first sample."""
        _steps_and_seconds(self.contender, self.run, SHORT_STEPS)
        self.base = _short_run(self.contender, self.run)
        while (first := self._beyond())[1] < SAMPLE_SECONDS and self.steps < MOST_STEPS:
            growth = SAMPLE_SECONDS / max(first[1], SAMPLE_SECONDS / MOST_GROWTH)
            self.steps = min(
                MOST_STEPS, self.base[0] + math.ceil(1.1 * growth * first[0])
            )  # a tenth more: it may be the last
        self.samples.append(first)

    def sample(self) -> None:
        if self.run.device.type == "cpu":
            time.sleep(SETTLE_SECONDS)  # the last contender's threads spin on for a while
        self.samples.append(self._beyond())

    def is_noisy(self) -> bool:
        times = self._times()
        return not times or max(times) > NOISY * min(times)

    def timing(self) -> dict[str, Any]:
        times = self._times()
        if not times:
            raise RuntimeError(
                f"{self.steps} steps took no longer than {self.base[0]}: the machine is too busy to time them"
            )
        return {"median": statistics.median(times), "minimum": min(times), "maximum": max(times), "n": len(times)}

    def _times(self) -> list[float]:
        return [taken / more for more, taken in self.samples if taken > 0]

    def _beyond(self) -> tuple[int, float]:
        """How many more steps than the short run, and seconds, a long one took. Some take whole calls of many steps only: no
        more steps than the short run's are no time at all."""
        done, taken = _steps_and_seconds(self.contender, self.run, self.steps)
        return (done - self.base[0], taken - self.base[1]) if done > self.base[0] else (1, 0.0)


def _short_run(contender: Contender, run: Run) -> tuple[int, float]:
    """Steps and seconds of a short run; where it is quick, the median of a few."""
    runs = [_steps_and_seconds(contender, run, SHORT_STEPS)]
    if runs[0][1] < SAMPLE_SECONDS:
        runs += [_steps_and_seconds(contender, run, SHORT_STEPS) for _ in range(REPEATS - 1)]
    return runs[0][0], statistics.median(taken for _, taken in runs)


def _steps_and_seconds(contender: Contender, run: Run, steps: int) -> tuple[int, float]:
    epochs = contender.train(shortened(run, steps)).epochs
    return sum(count for count, _ in epochs), sum(taken for _, taken in epochs)
