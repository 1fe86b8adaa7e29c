"""Timing that can be believed: warm-up, contenders interleaved so that a noisy moment hits all of them, quantiles."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from onelaunch.bench.case import Work
from onelaunch.errors import OnelaunchError

# The device idles before the first event while the host queues the work: what is timed is the device, not how fast Python
# launches. Twice as long as the host took to queue it in the last warm-up, 2 ms at least.
LEAD_SECONDS, MOST_LEAD_SECONDS, CYCLES_A_SECOND = 2e-3, 0.5, 2_000_000_000
# Thread pools (OpenMP's for 200 ms, XLA's) spin on after their work: without a pause a contender is timed against the threads
# of the last one (784-128-128-128-10 on 2 cores: 175 µs a step instead of 102).
SETTLE_SECONDS = 0.25
WARM_UPS, LEAST_SAMPLES = 2, 6  # the first calls compile, and fill caches and allocators
# Where even those take PATIENCE times longer than they should; or of whole training runs.
FEWEST_SAMPLES, PATIENCE = 4, 4
# A sample by the host's clock repeats short work until it fills this: waking up then weighs nothing, and a moment in which
# another process ran is spread over all of it.
SAMPLE_SECONDS = 0.1
VERY_FEW, FEW = 6, 8  # below: too few samples to leave one out, and for their quartiles to say much


@dataclass(frozen=True)
class Timing:
    """Seconds a unit. `spread` is what another run may differ by, relative to the median: the larger of the interquartile
    range and the difference between the medians of the first and the second half; of fewer than FEW samples the range of all
    but the farthest, of fewer than VERY_FEW the whole range. Two runs of independent samples then differ by more than their
    spreads allow in 3 of 1000 pairs or fewer, whatever n is (with quartiles alone 30 of 1000 at n = 5).
    """

    median: float
    minimum: float
    quartiles: tuple[float, float]
    n: int
    spread: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def reason_in_a_line(error: BaseException) -> str:
    """What was raised, and the first line of what it says; ours say all themselves."""
    said = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    first = " ".join(said[:2]) if said[0].endswith(":") else said[0]  # which announces the reason
    return first if isinstance(error, OnelaunchError) else f"{type(error).__name__}: {first}"


def summarise(samples: list[float]) -> Timing:
    """Statistics of samples in the order they were taken; at least two."""
    half = len(samples) // 2
    first, second = statistics.median(samples[:half]), statistics.median(samples[half:])
    median = statistics.median(samples)
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    width = max(abs(first - second), high - low)
    if len(samples) < FEW:
        near = sorted(samples, key=lambda sample: abs(sample - median))[: None if len(samples) < VERY_FEW else -1]
        width = max(near) - min(near)
    return Timing(median, min(samples), (low, high), len(samples), width / median)


def measure(
    contenders: Mapping[str, Work],
    *,
    units: int,
    cuda: bool,
    seconds: float,
    repeats: int,
    self_timed: bool = False,
    check_interrupts: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Time all contenders in turn, `repeats` times or until `seconds` a contender are spent (LEAST_SAMPLES times at least,
    or FEWEST_SAMPLES where that takes very long).

    `self_timed`: a contender's result is its time, in seconds a unit, instead of ours. `check_interrupts` is called after each
    sample: a contender may have swallowed a Ctrl-C, as scikit-learn's does, and its time with it.
    Returns the timings and, for contenders that raised, the reason; one that fails does not stop the others.
    """
    failed: dict[str, str] = {}
    calls = dict.fromkeys(contenders, 1)  # that make a sample
    leads = dict.fromkeys(contenders, LEAD_SECONDS)

    def attempt(name: str, seconds: Callable[[], float]) -> float | None:
        """What it says, unless this contender raises now or has raised before."""
        if name in failed:
            return None
        try:
            taken = seconds()
        except (Exception, SystemExit) as error:  # a peer may raise anything, at any call
            failed[name] = reason_in_a_line(error)
            return None
        check_interrupts()
        return taken

    def sample(name: str) -> float:
        work = contenders[name]
        if self_timed:
            taken = _self_timed(work)
        else:
            taken = (_device_sample(work, leads[name]) if cuda else _host_sample(work, calls[name])) / units
        if not 0 < taken < math.inf:
            raise OnelaunchError(f"a sample took {taken} s, which is no time")
        return taken

    for name, work in contenders.items():
        for _ in range(WARM_UPS):
            taken = attempt(name, functools.partial(sample, name))
        if self_timed or not taken:
            continue
        if cuda:
            queued = attempt(name, functools.partial(_queueing_seconds, work)) or 0.0
            leads[name] = min(MOST_LEAD_SECONDS, max(LEAD_SECONDS, 2 * queued))
        else:
            calls[name] = max(1, math.ceil(SAMPLE_SECONDS / (taken * units)))
            attempt(name, functools.partial(sample, name))
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    begin = time.perf_counter()
    for repeat in range(repeats):
        spent = (time.perf_counter() - begin) / max(1, len(contenders) - len(failed))
        if spent > seconds and repeat >= (
            FEWEST_SAMPLES if self_timed or spent > PATIENCE * seconds else LEAST_SAMPLES
        ):
            break
        for name in contenders:
            taken = attempt(name, functools.partial(sample, name))
            if taken is not None:
                samples[name].append(taken)
    return {name: summarise(taken) for name, taken in samples.items() if name not in failed}, failed


def _queueing_seconds(work: Work) -> float:
    """What the host takes to queue the work; of work that waits for the device, more than that."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    queued = time.perf_counter() - begin
    torch.cuda.synchronize()
    return queued


def give_lead(seconds: float = LEAD_SECONDS) -> None:
    """The device idles for about so long, while the host goes on."""
    torch.cuda._sleep(int(seconds * CYCLES_A_SECOND))


def _device_sample(work: Work, lead: float) -> float:
    give_lead(lead)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _self_timed(work: Work) -> float:
    taken = work()
    assert isinstance(taken, float), taken
    return taken


def _host_sample(work: Work, calls: int) -> float:
    """Seconds a call by the host's clock."""
    time.sleep(SETTLE_SECONDS)
    begin = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - begin) / calls


def peak_bytes(work: Work) -> int:
    """CUDA memory that one call needs at its peak, beyond what was allocated before it."""
    work()  # workspaces of libraries are made once
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = work()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before
