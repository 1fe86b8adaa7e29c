"""Recording CUDA graphs beside whatever else a program does."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """`torch.cuda.graph(graph)` that nobody else can spoil.

    While a stream is captured, a call that frees or waits ends the capture with an error. Another thread may make one at any
    time (JAX's, a data loader's): with "thread_local" that is its own affair. And so may the garbage collector, in this very
    thread, when it finds another library's dead arrays: it rests until the capture is over.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local", **options):
            yield
    finally:
        if collecting:
            gc.enable()
