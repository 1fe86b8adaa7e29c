"""Launching: a thread that only compiles does not affect launches of another thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from onelaunch.kernels.launch import call, compiling, needs_triton


class Recorded:
    """Takes the place of a kernel and tells how it was called."""

    run = object()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: "run"

    def warmup(self, *arguments: Any, grid: tuple[int, ...], **options: Any) -> Recorded:
        return self


def test_compiling_affects_one_thread_only() -> None:
    kernel = Recorded()
    with ThreadPoolExecutor(1) as pool:
        assert call(kernel, (1,)) == "run"
        with compiling():
            assert call(kernel, (1,)) is kernel
            assert needs_triton()
            assert pool.submit(call, kernel, (1,)).result() == "run"
            assert not pool.submit(needs_triton).result()
        assert call(kernel, (1,)) == "run"
