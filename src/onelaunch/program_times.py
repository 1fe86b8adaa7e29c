"""Times of alternative calls on GPUs as a program sees them: with the host's work, which may take longer than the device's."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

from onelaunch.errors import first_line

log = logging.getLogger("onelaunch")
ROUNDS = 7  # every run once per round, so that a chip that warms up slows all of them alike
CALLS = 5  # per round


def program_times(runs: Mapping[str, Callable[[int], None]]) -> dict[str, float]:
    """Seconds of one call of each run as a program sees them, launches included; infinite for one that fails.

    A run is called with the number of the call.
    """
    found: dict[str, float] = {}
    samples: dict[str, list[float]] = {}
    for name, run in runs.items():
        try:
            for number in range(3):
                run(number)
            samples[name] = []
        except Exception as error:  # one that cannot be compiled, for example
            log.warning("%s cannot be run: %s", name, first_line(error))
            found[name] = float("inf")
    for _ in range(ROUNDS):
        for name, taken in samples.items():
            _synchronize()
            begin = time.perf_counter()
            for number in range(CALLS):
                runs[name](number)
            _synchronize()
            taken.append((time.perf_counter() - begin) / CALLS)
    return found | {name: median(taken) for name, taken in samples.items()}


def _synchronize() -> None:
    """Wait for all devices: a model may be on several."""
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)
