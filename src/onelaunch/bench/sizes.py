"""Time of a step over the hidden size: every contender, at every size."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from onelaunch.bench.contenders import Contender, OurEngine, contenders_for, shortened
from onelaunch.bench.measure import reason_in_a_line
from onelaunch.bench.step_peers import step_peers
from onelaunch.number import seconds
from onelaunch.train.build import is_out_of_memory
from onelaunch.train.engines import choose
from onelaunch.train.engines.contract import Run

SHORT_STEPS, REPEATS, SAMPLE_SECONDS = 2, 3, 0.3
NOISY, MORE_REPEATS = 1.3, 4  # samples further apart than this factor are followed by more
LEAST_MORE_STEPS, MOST_STEPS = 4, 100_000  # a long run has so many more than a short one, and so many in all
MOST_GROWTH = 16  # of the long run from one try to the next: a first try of few steps tells little


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
        for contender in contenders:
            try:
                timing = time_step(contender, run)
            except (Exception, SystemExit) as error:  # out of memory, say: the others go on
                reason = absent[contender.name] = reason_in_a_line(error)
                fails = isinstance(contender, OurEngine) and not is_out_of_memory(error)
                if fails:
                    results["failed"].setdefault(contender.name, {})[str(size)] = reason
                show(f"{size:>6}  {contender.name:<20} {'failed' if fails else 'absent'} ({reason})")
                continue
            results["step_seconds"].setdefault(contender.name, {})[str(size)] = timing
            show(f"{size:>6}  {contender.name:<20} {seconds(timing['median']):>10} a step")
        for name, reason in absent.items():
            results["absent"].setdefault(name, {})[str(size)] = reason


def time_step(contender: Contender, run: Run) -> dict[str, Any]:
    """Seconds a step, warmed up: median and least of a few samples.

    What a run costs once (allocating, starting threads, the first copy) is in every run: a sample is what a long run takes
    beyond a short one, over the steps it has more. The long run has as many as fill SAMPLE_SECONDS beyond the short one.
    """
    _steps_and_seconds(contender, run, SHORT_STEPS)
    base = _short_run(contender, run)
    steps = SHORT_STEPS + LEAST_MORE_STEPS
    while (sample := _beyond(contender, run, steps, base))[1] < SAMPLE_SECONDS and steps < MOST_STEPS:
        growth = SAMPLE_SECONDS / max(sample[1], SAMPLE_SECONDS / MOST_GROWTH)
        steps = min(MOST_STEPS, base[0] + math.ceil(1.1 * growth * sample[0]))  # a tenth more: the next may be the last
    samples = [sample, *(_beyond(contender, run, steps, base) for _ in range(REPEATS - 1))]
    times = [taken / more for more, taken in samples if taken > 0]
    if not times or max(times) > NOISY * min(times):
        samples = [_beyond(contender, run, steps, base) for _ in range(MORE_REPEATS)]
        times += [taken / more for more, taken in samples if taken > 0]
    if not times:
        raise RuntimeError(f"{steps} steps took no longer than {base[0]}: the machine is too busy to time them")
    middle = statistics.median(times)
    return {"median": middle, "minimum": min(times), "maximum": max(times), "n": len(times)}


def _short_run(contender: Contender, run: Run) -> tuple[int, float]:
    """Steps and seconds of a short run; where it is quick, the median of a few."""
    runs = [_steps_and_seconds(contender, run, SHORT_STEPS)]
    if runs[0][1] < SAMPLE_SECONDS:
        runs += [_steps_and_seconds(contender, run, SHORT_STEPS) for _ in range(REPEATS - 1)]
    return runs[0][0], statistics.median(taken for _, taken in runs)


def _beyond(contender: Contender, run: Run, steps: int, base: tuple[int, float]) -> tuple[int, float]:
    """How many more steps than the short run, and seconds, a run of `steps` took. Some take whole calls of many steps only:
    no more steps than the short run's are no time at all."""
    done, taken = _steps_and_seconds(contender, run, steps)
    return (done - base[0], taken - base[1]) if done > base[0] else (1, 0.0)


def _steps_and_seconds(contender: Contender, run: Run, steps: int) -> tuple[int, float]:
    epochs = contender.train(shortened(run, steps)).epochs
    return sum(count for count, _ in epochs), sum(taken for _, taken in epochs)
