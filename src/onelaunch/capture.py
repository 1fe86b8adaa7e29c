"""Capture of CUDA graphs that other threads and the garbage collector cannot break."""

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
    """`torch.cuda.graph(graph)`, safe from other threads and from the garbage collector.

    While a stream is captured, a CUDA call that frees memory or synchronises ends the capture with an error. Another thread
    (JAX's, a data loader's) may make such a call at any time; with "thread_local" it does not affect this capture. The garbage
    collector may make one in this very thread, when it frees another library's arrays; it is disabled during the capture.

    The graph has cuBLAS workspaces of its own. PyTorch keeps one per stream and frees all of them whenever it records a model
    compiled with "reduce-overhead": a graph that had recorded the address of such a workspace would write to freed memory.
    """
    if torch.cuda.device_count() > 1:  # PyTorch's own capture stream belongs to the device of the first capture
        options.setdefault("stream", _stream_on(torch.cuda.current_device()))
    clear_workspaces()
    try:
        with _disabled_collector, torch.cuda.graph(graph, capture_error_mode="thread_local", **options):
            yield
    except BaseException:
        # PyTorch leaves the generator in capture mode: from now on every random draw on the device would fail.
        if torch.cuda.is_initialized():
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())
        raise
    finally:
        clear_workspaces()  # no other work uses the graph's


def clear_workspaces() -> None:
    """Let cuBLAS allocate workspaces anew: inside a capture, in the graph's own memory."""
    if torch.cuda.is_initialized():
        torch._C._cuda_clearCublasWorkspaces()


@functools.cache
def _stream_on(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class _DisabledCollector:
    """A context without garbage collection, in all threads. Contexts may nest; the last exit restores the first state."""

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


_disabled_collector = _DisabledCollector()
