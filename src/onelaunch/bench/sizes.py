"""Time per step over the hidden size: every contender at every size."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from onelaunch.bench.contenders import Contender, OurEngine, contenders_for, shortened
from onelaunch.bench.measure import SETTLE_SECONDS, one_line_reason
from onelaunch.bench.step_peers import step_peers
from onelaunch.engines import choose
from onelaunch.engines.contract import Run
from onelaunch.errors import is_out_of_memory
from onelaunch.format import format_seconds

SHORT_STEPS, REPEATS, SAMPLE_SECONDS = 2, 3, 0.3
NOISY, MORE_REPEATS = 1.3, 4  # where samples differ by more than this factor, more are taken
MIN_MORE_STEPS, MAX_STEPS = 4, 100_000  # steps that a long run has beyond a short one, and in all
MAX_GROWTH = 16  # of the long run from one try to the next: a first try of few steps tells little

T = TypeVar("T")


def time_sizes(
    sizes: Sequence[int], run_of: Callable[[int], Run], show: Callable[[str], None], results: dict[str, Any]
) -> None:
    """Fill `results` size by size, so that an interruption keeps what is done. `run_of(hidden)` makes the run of a size.

    A size whose run cannot be made is listed under "left_out", an engine of ours that raises under "failed".
    """
    results.update({"hidden": [], "step_seconds": {}, "absent": {}, "auto": {}, "left_out": {}, "failed": {}})
    for size in sizes:
        try:
            run = run_of(size)
            contenders, absent = contenders_for(run)
            faster, missing = step_peers(run)
            auto = f"onelaunch {choose(run)[0].name}"
        except Exception as error:  # for example because it does not fit into memory
            results["left_out"][str(size)] = one_line_reason(error)
            continue
        contenders, absent = [*faster, *contenders], {**absent, **missing}
        results["hidden"].append(size)
        results["auto"][str(size)] = auto
        show(f"{size:>6}  {len(contenders)} contenders in turns")
        timings, errors = time_steps(contenders, run)
        for name, timing in timings.items():
            results["step_seconds"].setdefault(name, {})[str(size)] = timing
            show(f"{size:>6}  {name:<20} {format_seconds(timing['median']):>10} per step")
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
    """Seconds per step of each contender, warmed up: median, minimum and maximum of a few samples.

    For contenders that raised: the reason, and whether it was a lack of memory (not the error, which would keep their memory
    alive). Samples are taken in turns, so that a slow moment of the machine hits all contenders; noisy ones get more samples.
    """
    paced: dict[str, _Paced] = {}
    errors: dict[str, tuple[str, bool]] = {}

    def attempt(name: str, act: Callable[[], T]) -> T | None:
        try:
            return act()
        except (Exception, SystemExit) as error:
            errors[name] = (one_line_reason(error), is_out_of_memory(error))
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
    """A contender, the number of steps its runs need to be timed, and its samples.

    The one-time cost of a run (allocating, starting threads, the first copy) is in every run. So a sample is the difference
    between a long and a short run in time and in steps. The long run takes SAMPLE_SECONDS longer than the short one.
    """

    def __init__(self, contender: Contender, run: Run) -> None:
        self.contender, self.run = contender, run
        self.steps = SHORT_STEPS + MIN_MORE_STEPS
        self.samples: list[tuple[int, float]] = []

    def find_pace(self) -> None:
        """Warm up, find how long a run must be, and take the first sample."""
        _steps_and_seconds(self.contender, self.run, SHORT_STEPS)
        self.base = _short_run(self.contender, self.run)
        while (first := self._beyond())[1] < SAMPLE_SECONDS and self.steps < MAX_STEPS:
            growth = SAMPLE_SECONDS / max(first[1], SAMPLE_SECONDS / MAX_GROWTH)
            more = math.ceil(1.1 * growth * first[0])  # a tenth more than needed, so that the next try is enough
            self.steps = min(MAX_STEPS, self.base[0] + more)
        self.samples.append(first)

    def sample(self) -> None:
        if self.run.device.type == "cpu":
            time.sleep(SETTLE_SECONDS)  # the threads of the last contender spin on for a while
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
        """Steps and seconds of a long run beyond the short one. Some contenders take whole calls of many steps only: where
        both runs are one call, the time is 0."""
        done, taken = _steps_and_seconds(self.contender, self.run, self.steps)
        return (done - self.base[0], taken - self.base[1]) if done > self.base[0] else (1, 0.0)


def _short_run(contender: Contender, run: Run) -> tuple[int, float]:
    """Steps and seconds of a short run; the median of a few where it is quick."""
    runs = [_steps_and_seconds(contender, run, SHORT_STEPS)]
    if runs[0][1] < SAMPLE_SECONDS:
        runs += [_steps_and_seconds(contender, run, SHORT_STEPS) for _ in range(REPEATS - 1)]
    return runs[0][0], statistics.median(taken for _, taken in runs)


def _steps_and_seconds(contender: Contender, run: Run, steps: int) -> tuple[int, float]:
    epochs = contender.train(shortened(run, steps)).epochs
    return sum(count for count, _ in epochs), sum(taken for _, taken in epochs)
