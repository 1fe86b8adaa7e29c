"""A CUDA graph is captured whatever other threads and the garbage collector do."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from onelaunch.capture.graph import _stream_on, capturing


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of each call of `torch.cuda.graph`, which is replaced: no GPU is needed."""
    calls: list[dict[str, Any]] = []

    class Graph:
        def __init__(self, graph: object, **options: Any) -> None:
            calls.append(options)

        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "graph", Graph)
    return calls


class Cycle:
    def __init__(self) -> None:
        self.self = self


def test_the_collector_is_disabled_during_a_capture(entered):
    gc.collect()
    dead = weakref.ref(Cycle())
    with capturing(None, stream="a stream"):
        for _ in range(10_000):
            Cycle()  # enough for several collections
        assert dead() is not None
    assert gc.isenabled()
    gc.collect()
    assert dead() is None
    assert entered == [{"capture_error_mode": "thread_local", "stream": "a stream"}]


def test_it_is_disabled_until_the_last_of_two_captures_ends(entered):
    first, second = capturing(None), capturing(None)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_it_is_restored_after_an_error_and_stays_disabled_if_it_was(entered):
    with pytest.raises(ValueError, match="body"), capturing(None):
        raise ValueError("body")
    assert gc.isenabled()
    gc.disable()
    try:
        with capturing(None):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("mending_fails", [False, True])
def test_after_a_failure_another_capture_ends_capture_mode(entered, monkeypatch, mending_fails):
    """Whatever becomes of it, the first error is raised, and the caller's stream is current."""
    streams: list[str] = []
    pools: list[tuple[str, Any]] = []

    def zeros(*_: Any, **options: Any) -> None:
        assert options == {"device": "cuda"}
        if mending_fails:
            raise RuntimeError("the device is lost")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the caller's")
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "another pool")
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *of: pools.append(("end", of)), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *of: pools.append(("release", of)), raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: "another graph")
    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr("onelaunch.capture.graph.clear_workspaces", lambda: None)
    with pytest.raises(ValueError, match="body"), capturing("a graph", stream="a stream", pool="a pool"):
        raise ValueError("body")
    shared = {"stream": "a stream", "capture_error_mode": "thread_local"}
    assert entered == [{**shared, "pool": "a pool"}, shared]
    assert pools == [("end", (0, "a pool")), ("release", (0, "a pool"))]
    assert streams == ["the caller's"]


def capture_that_fails(**options: Any) -> None:
    def fails() -> None:
        with capturing(torch.cuda.CUDAGraph(), **options):
            torch.rand(2**26, device="cuda")
            torch.cuda.synchronize()  # not allowed here

    with pytest.raises(RuntimeError):
        fails()


@pytest.mark.gpu
def test_random_numbers_can_be_drawn_after_a_failed_capture():
    torch.manual_seed(5)
    for _ in range(2):
        capture_that_fails()
    first = torch.rand(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        drawn = torch.rand(3, device="cuda")
    graph.replay()
    second = drawn.clone()
    graph.replay()
    assert not first.equal(second)
    assert not second.equal(drawn)


@pytest.mark.gpu
@pytest.mark.parametrize("own_stream", [False, True])
def test_a_graph_that_draws_survives_a_later_capture_that_fails(own_stream):
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        drawn = torch.rand(1000, device="cuda")

    def replayed(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(seed)
        graph.replay()
        return drawn.clone(), torch.rand(1000, device="cuda")

    before = replayed(3)
    capture_that_fails(stream=torch.cuda.Stream() if own_stream else None)
    after, other = replayed(3), replayed(4)
    assert all(map(torch.equal, before, after))
    assert not any(map(torch.equal, before, other))


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [False, True])
def test_memory_can_be_allocated_and_freed_after_a_capture_that_fails(shared):
    size, options = 2**28, {"pool": torch.cuda.graph_pool_handle()} if shared else {}
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()

    for _ in range(2):
        capture_that_fails(**options)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < before + size
    x = torch.empty(size, dtype=torch.uint8, device="cuda")
    place = x.data_ptr()
    x.record_stream(torch.cuda.Stream())
    del x
    torch.cuda.synchronize()
    assert torch.empty(size, dtype=torch.uint8, device="cuda").data_ptr() == place


@pytest.mark.gpu
def test_the_callers_stream_is_current_after_a_capture_that_fails():
    mine = torch.cuda.Stream()
    with torch.cuda.stream(mine):
        capture_that_fails()
        assert torch.cuda.current_stream() == mine
    capture_that_fails(stream=mine)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


@pytest.mark.gpu
def test_a_graph_survives_that_others_free_the_workspaces_of_cublas():
    """As a model compiled with "reduce-overhead" does in the same process."""
    a, b = (torch.randn(512, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        expected = a @ b  # before the capture, on its stream: a workspace outside of the graph's memory
    graph = torch.cuda.CUDAGraph()
    with capturing(graph, stream=stream):
        product = a @ b
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    taken = [torch.full((2**20,), 7, dtype=torch.int32, device="cuda") for _ in range(32)]
    for _ in range(3):
        graph.replay()
    assert product.equal(expected)
    assert all(bool((one == 7).all()) for one in taken)


def test_with_several_devices_a_capture_has_a_stream_of_its_device(entered, monkeypatch):
    """PyTorch's capture stream belongs to the first device: work on another device would run and not be captured."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"stream on {device}")
    for device in (1, 0, 1):
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        with capturing(None):
            pass
    with capturing(None, stream="mine"):
        pass
    _stream_on.cache_clear()
    assert [options["stream"] for options in entered] == ["stream on 1", "stream on 0", "stream on 1", "mine"]
