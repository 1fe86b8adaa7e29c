"""Timing: warm-up, samples of all contenders in turn so that a noisy moment hits all of them, medians and quartiles."""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from onelaunch.bench.busy import Watch
from onelaunch.bench.case import Work
from onelaunch.bench.time_limit import OUT_OF_TIME, READY_SHARE, OutOfTimeError, TimeLimit
from onelaunch.errors import OnelaunchError, UnsupportedError

# The device sleeps before the first event while the host queues the work, so that the device is timed, not Python's launches.
# It sleeps twice as long as the host took to queue the work in the last warm-up, and at least 2 ms.
LEAD_SECONDS, MAX_LEAD_SECONDS, CYCLES_PER_SECOND = 2e-3, 0.5, 2_000_000_000
# Thread pools (OpenMP's for 200 ms, XLA's) spin on after their work. Without a pause a contender is timed while the threads of
# the last one still run (784-128-128-128-10 on 2 cores: 175 µs per step instead of 102).
SETTLE_SECONDS = 0.25
WARM_UPS, MIN_SAMPLES = 2, 6  # the first calls compile, and fill caches and allocators
# Fewer samples are enough for whole training runs, and where MIN_SAMPLES would take PATIENCE times the time given.
MIN_LONG_SAMPLES, PATIENCE = 4, 4
# A sample by the host's clock repeats short work until it fills this time: the cost of waking up is then negligible, and a
# moment in which another process ran is spread over the whole sample.
SAMPLE_SECONDS = 0.1
MIN_QUICK_SAMPLES = 3  # where the time is over
VERY_FEW, FEW = 6, 8  # fewer samples are too few to leave one out, and for their quartiles to say much


@dataclass(frozen=True)
class Timing:
    """Seconds per unit. `spread` is the relative difference to expect in another run, as a fraction of the median.

    It is the larger of the interquartile range and the difference between the medians of the first and the second half. Of
    fewer than FEW samples it is the range of all but the farthest, of fewer than VERY_FEW the whole range. Two runs of
    independent samples then differ by more than their spreads allow in at most 3 of 1000 pairs, whatever n is (with quartiles
    alone in 30 of 1000 at n = 5).
    """

    median: float
    minimum: float
    quartiles: tuple[float, float]
    n: int
    spread: float


def one_line_reason(error: BaseException) -> str:
    """The type of an exception and the first line of its message; the message alone for our own errors."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    first = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]  # a colon announces the reason
    return first if isinstance(error, OnelaunchError) else f"{type(error).__name__}: {first}"


def summarise(samples: list[float]) -> Timing:
    """Statistics of at least two samples, in the order in which they were taken."""
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
    warm_ups: int = WARM_UPS,
    limit: TimeLimit | None = None,
    watch: Watch | None = None,
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Time all contenders in turn, `repeats` times or until `seconds` per contender are spent, but at least MIN_SAMPLES times
    (MIN_LONG_SAMPLES where that takes very long).

    `self_timed`: a contender returns its own time in seconds per unit. `check_interrupts` is called after each sample: a
    contender may have swallowed a Ctrl-C, as scikit-learn's does, and the sample is then worthless. `limit`: contenders that
    are not ready in time are left out, and sampling ends with MIN_QUICK_SAMPLES when the time is over. `watch` is restarted
    when the contenders are ready, so that it does not count the processes that compile them.
    Returns the timings and, for contenders that raised, the reason; one that fails does not stop the others.
    """
    limit = limit or TimeLimit()
    failed: dict[str, str] = {}
    calls = dict.fromkeys(contenders, 1)  # per sample
    leads = dict.fromkeys(contenders, LEAD_SECONDS)

    def attempt(name: str, seconds: Callable[[], float]) -> float | None:
        """The result of `seconds`; None if this contender raises now or has raised before."""
        if name in failed:
            return None
        try:
            taken = seconds()
        except OutOfTimeError:
            raise
        except (Exception, SystemExit) as error:  # a peer may raise anything, at any call
            failed[name] = one_line_reason(error)
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
            raise OnelaunchError(f"a sample took {taken} s, which is not a time")
        return taken

    def make_ready(name: str, work: Work) -> None:
        taken = None
        for _ in range(warm_ups):
            taken = attempt(name, functools.partial(sample, name))
        if self_timed or not taken:
            return
        if cuda:
            queued = attempt(name, functools.partial(_queueing_seconds, work)) or 0.0
            leads[name] = min(MAX_LEAD_SECONDS, max(LEAD_SECONDS, 2 * queued))
        else:
            calls[name] = max(1, math.ceil(SAMPLE_SECONDS / (taken * units)))
            attempt(name, functools.partial(sample, name))

    whole, (first, *_) = limit.whole, contenders

    def in_time(name: str, act: Callable[[], float | None]) -> float | None:
        """The result of `act`. A peer for which it takes too long is left out, of the later cases too; where all time is over,
        OutOfTimeError."""
        patience = READY_SHARE * whole.left() if name == first else limit.patience()
        try:
            with whole.cut(0 if name in whole.too_slow else patience):
                return act()
        except OutOfTimeError as error:
            if whole.left() == 0 and name not in whole.too_slow:
                raise
            failed[name] = str(error)  # also where the contender has turned it into an error of its own
            whole.too_slow |= {name} - {first}
            return None

    with contextlib.suppress(OutOfTimeError):
        for name, work in contenders.items():
            in_time(name, functools.partial(make_ready, name, work))
    if watch is not None:
        watch.restart()
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    begin = time.perf_counter()
    for repeat in range(repeats):
        spent = (time.perf_counter() - begin) / max(1, len(contenders) - len(failed))
        if spent > seconds and repeat >= (
            MIN_LONG_SAMPLES if self_timed or spent > PATIENCE * seconds else MIN_SAMPLES
        ):
            break
        if limit.left() == 0 and repeat >= MIN_QUICK_SAMPLES:
            break
        try:
            found = {name: in_time(name, functools.partial(attempt, name, functools.partial(sample, name)))
                     for name in contenders if name not in failed}  # fmt: skip
        except OutOfTimeError:
            break
        for name, one in found.items():
            samples[name] += [] if one is None else [one]
    failed |= {name: OUT_OF_TIME for name, some in samples.items() if len(some) < 2 and name not in failed}
    return {name: summarise(taken) for name, taken in samples.items() if name not in failed}, failed


def _queueing_seconds(work: Work) -> float:
    """The time the host takes to queue the work; an upper bound for work that waits for the device."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    queued = time.perf_counter() - begin
    torch.cuda.synchronize()
    return queued


def give_lead(seconds: float = LEAD_SECONDS) -> None:
    """Let the device sleep for about this long while the host goes on."""
    torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND))


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
    """Seconds per call by the host's clock."""
    time.sleep(SETTLE_SECONDS)
    begin = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - begin) / calls


def cuda_device() -> torch.device:
    """The current CUDA device, for the set-up of a case; raises UnsupportedError without one.

    It also forgets what torch.compile knows: the networks of earlier cases would count towards its limit of recompilations.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError("this machine has no CUDA device")
    torch.compiler.reset()
    return torch.device("cuda", torch.cuda.current_device())


def peak_bytes(work: Work) -> int:
    """The peak of CUDA memory during one call, beyond what was allocated before it."""
    work()  # libraries allocate their workspaces once
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = work()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before
