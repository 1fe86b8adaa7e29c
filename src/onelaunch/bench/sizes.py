"""Time of a step over the hidden size: every contender, at every size."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from onelaunch.bench.contenders import Contender, contenders_for, shortened
from onelaunch.bench.step_peers import step_peers
from onelaunch.fuse.quantities import duration
from onelaunch.train.engines import choose
from onelaunch.train.engines.contract import Run

FIRST_STEPS, REPEATS, SAMPLE_SECONDS = 4, 3, 0.3
NOISY, MORE_REPEATS = 1.3, 4  # samples further apart than this factor are followed by more
MOST_STEPS = 20_000


def time_sizes(
    sizes: Sequence[int], run_of: Callable[[int], Run], show: Callable[[str], None], results: dict[str, Any]
) -> None:
    """Fill `results` size by size, so that an interruption keeps what is done. `run_of(hidden)` makes the run of a size."""
    results.update({"hidden": [], "step_seconds": {}, "absent": {}, "auto": {}})
    for size in sizes:
        run = run_of(size)
        contenders, absent = contenders_for(run)
        faster, missing = step_peers(run)
        contenders, absent = [*faster, *contenders], {**absent, **missing}
        results["hidden"].append(size)
        results["auto"][str(size)] = f"onelaunch {choose(run)[0].name}"
        for contender in contenders:
            try:
                timing = time_step(contender, run)
            except Exception as error:  # out of memory, say: the others go on
                absent[contender.name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                continue
            results["step_seconds"].setdefault(contender.name, {})[str(size)] = timing
            show(f"{size:>6}  {contender.name:<20} {duration(timing['median']):>10} a step")
        for name, reason in absent.items():
            results["absent"].setdefault(name, {})[str(size)] = reason


def time_step(contender: Contender, run: Run) -> dict[str, Any]:
    """Seconds a step, warmed up: median and least of a few samples, each of as many steps as fill SAMPLE_SECONDS."""
    _step_seconds(contender, shortened(run, FIRST_STEPS))
    once = _step_seconds(contender, shortened(run, FIRST_STEPS))
    steps = min(MOST_STEPS, max(FIRST_STEPS, math.ceil(SAMPLE_SECONDS / once)))
    samples = [_step_seconds(contender, shortened(run, steps)) for _ in range(REPEATS)]
    if max(samples) > NOISY * min(samples):
        samples += [_step_seconds(contender, shortened(run, steps)) for _ in range(MORE_REPEATS)]
    middle = statistics.median(samples)
    return {"median": middle, "minimum": min(samples), "maximum": max(samples), "n": len(samples)}


def _step_seconds(contender: Contender, run: Run) -> float:
    epochs = contender.train(run).epochs
    return sum(seconds for _, seconds in epochs) / sum(steps for steps, _ in epochs)
