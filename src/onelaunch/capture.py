"""Recording CUDA graphs beside whatever else a program does."""

from __future__ import annotations

import functools
import gc
import threading
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
    if torch.cuda.device_count() > 1:  # PyTorch's own stream for captures lies on the device of the first one
        options.setdefault("stream", _stream_on(torch.cuda.current_device()))
    try:
        with _resting_collector, torch.cuda.graph(graph, capture_error_mode="thread_local", **options):
            yield
    except BaseException:
        # PyTorch leaves the generator as if it were still captured: every draw on the device would fail from now on.
        if torch.cuda.is_initialized():
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())
        raise


@functools.cache
def _stream_on(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class _RestingCollector:
    """The garbage collector is off inside, in all threads; the last to leave puts it as the first found it."""

    def __init__(self) -> None:
        self._lock, self._inside, self._collecting = threading.Lock(), 0, False

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._collecting = gc.isenabled()
                gc.disable()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._collecting:
                gc.enable()


_resting_collector = _RestingCollector()
