"""Launching: what one thread only compiles, another one runs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from onelaunch.kernels.launch import call, compiling, needs_triton


class Recorded:
    """In place of a kernel: says how it was called."""

    run = object()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: "run"

    def warmup(self, *arguments: Any, grid: tuple[int, ...], **options: Any) -> Recorded:
        return self


def test_compiling_is_of_one_thread() -> None:
    kernel = Recorded()
    with ThreadPoolExecutor(1) as pool:
        assert call(kernel, (1,)) == "run"
        with compiling():
            assert call(kernel, (1,)) is kernel
            assert needs_triton()
            assert pool.submit(call, kernel, (1,)).result() == "run"
            assert not pool.submit(needs_triton).result()
        assert call(kernel, (1,)) == "run"
