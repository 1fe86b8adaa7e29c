"""The highest rates of this device, measured once per run: bytes per second of a large copy, FLOPs per second of a large GEMM.

They turn a floor counted in bytes or FLOPs into a time. The rates of a datasheet are never reached.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from onelaunch.bench.measure import SETTLE_SECONDS

COPIED_BYTES = {"cuda": 2**30, "cpu": 2**27}  # many times the last cache
PRODUCT_SIZE = {"cuda": 8192, "cpu": 1024}
REPEATS = {"cuda": 10, "cpu": 40}
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Ceilings:
    """Measures a rate when it is first needed, and remembers it."""

    def __init__(self) -> None:
        self.measured: dict[str, dict[str, float]] = {}

    def bandwidth(self, kind: str) -> float:
        """Bytes read plus bytes written, per second."""
        return self._known(kind, "copy", lambda: _copy_rate(kind))

    def product(self, kind: str, dtype: str) -> float:
        """FLOPs per second of a matrix product."""
        return self._known(kind, dtype, lambda: _product_rate(kind, dtype))

    def _known(self, kind: str, what: str, measure: Callable[[], float]) -> float:
        found = self.measured.setdefault(kind, {})
        if what not in found:
            found[what] = measure()
        return found[what]

    def seconds(self, kind: str, moved: float | None, flops: float | None, dtype: str) -> float | None:
        """The shortest time for this many bytes and FLOPs. The two overlap, so the longer one counts; None for neither."""
        times = []
        if moved is not None:
            times.append(moved / self.bandwidth(kind))
        if flops is not None:
            times.append(flops / self.product(kind, dtype))
        return max(times, default=None)


def _copy_rate(kind: str) -> float:
    source = torch.randint(256, (COPIED_BYTES[kind],), dtype=torch.uint8, device=kind)
    target = torch.empty_like(source)
    return 2 * source.numel() / _shortest_seconds(lambda: target.copy_(source), kind)


def _product_rate(kind: str, dtype: str) -> float:
    n = PRODUCT_SIZE[kind]
    a, b = (torch.randn(n, n, device=kind, dtype=DTYPES[dtype]) for _ in range(2))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        return 2 * n**3 / _shortest_seconds(functools.partial(torch.mm, a, b), kind)
    finally:
        torch.set_float32_matmul_precision(before)


def _shortest_seconds(work: Callable[[], Any], kind: str) -> float:
    """The minimum of the samples, not the median: a ceiling is what the device can do when nobody else uses it."""
    wait = torch.cuda.synchronize if kind == "cuda" else lambda: None
    time.sleep(SETTLE_SECONDS)
    samples = []
    for _ in range(REPEATS[kind]):
        wait()
        begin = time.perf_counter()
        work()
        wait()
        samples.append(time.perf_counter() - begin)
    return min(samples)
