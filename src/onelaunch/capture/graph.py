"""Capture of CUDA graphs that other threads and the garbage collector cannot break."""

from __future__ import annotations

import contextlib
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

    After a capture that failed, the current stream is the caller's again, random numbers can be drawn, also by graphs that were
    captured before, and the memory of the capture is free.
    """
    if torch.cuda.device_count() > 1:  # PyTorch's own capture stream belongs to the device of the first capture
        options.setdefault("stream", _stream_on(torch.cuda.current_device()))
    clear_workspaces()
    callers = None
    if torch.cuda.is_available():
        callers = torch.cuda.current_stream()
        options.setdefault("pool", torch.cuda.graph_pool_handle())  # PyTorch does not tell the one that it would choose
    try:
        with _disabled_collector, torch.cuda.graph(graph, capture_error_mode="thread_local", **options):
            yield
    except BaseException:
        if callers is not None:
            _end_allocation(options["pool"])
            _leave_capture_mode(options.get("stream"), callers)
        raise
    finally:
        clear_workspaces()  # no other work uses the graph's


def _end_allocation(pool: Any) -> None:
    """Let go of the memory of a capture that failed. PyTorch only does so after a success: until then it does not allocate in
    this pool again, reuses no memory that several streams have used, and frees none of its cache when memory runs out.
    """
    device = torch.cuda.current_device()
    with contextlib.suppress(RuntimeError):  # the failure came before the allocation began, or after it ended
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)


def _leave_capture_mode(stream: torch.cuda.Stream | None, callers: torch.cuda.Stream) -> None:
    """Mend what PyTorch leaves behind when a capture fails: the generator is in capture mode, so that every draw on the device
    would fail, and every replay of a graph that draws, until a capture succeeds; and the capture's stream is current.
    """
    options: dict[str, Any] = {"stream": stream, "capture_error_mode": "thread_local"}
    with contextlib.suppress(RuntimeError):  # the first error counts
        with torch.cuda.graph(torch.cuda.CUDAGraph(), **options):
            torch.zeros(1, device="cuda")  # PyTorch warns of empty graphs
        torch.cuda.synchronize()
    torch.cuda.set_stream(callers)


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
