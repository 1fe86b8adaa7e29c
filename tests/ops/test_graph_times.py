"""The order in which calls are timed. Graphs and clock are fakes; the GPU tests of linear and fuse have real ones."""

from __future__ import annotations

import contextlib
import math
import weakref
from types import SimpleNamespace

import pytest
import torch

from onelaunch.kernels.dropout_key import NO_KEY
from onelaunch.ops import graph_times, linear_choice


@pytest.fixture(autouse=True)
def fake_graphs_and_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replay takes one second longer than the previous one: 9, 10, …"""

    class Graph:
        def replay(self) -> None: ...

    seconds = iter(range(9, 10_000))
    monkeypatch.setattr(graph_times, "capturing", lambda graph: contextlib.nullcontext())
    monkeypatch.setattr(graph_times, "_replay_seconds", lambda graph: next(seconds))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=1000))


def test_the_smallest_time_counts_and_what_cannot_run_is_infinite() -> None:
    """The error that Triton keeps does not keep the call's tensors alive."""
    from triton.runtime.errors import OutOfResources

    kept, ran = [], []

    def too_large(call: linear_choice.Call) -> None:
        kept.append(OutOfResources(300_000, 232_448, "shared memory"))
        raise kept[0]

    x, weight = torch.randn(6, 8), torch.randn(5, 8)
    gone = weakref.ref(x)
    call = linear_choice.Call(x, weight, None, x.new_empty(6, 5), None, None, None, 0.0, NO_KEY)
    runs = linear_choice.Implementation("runs", lambda call: ran.append(call.x.data_ptr()))
    times = linear_choice.time_implementations([runs, linear_choice.Implementation("cannot", too_large)], call)
    assert times["cannot"] == float("inf")
    assert times["runs"] == 10 / 2  # the first replay, of 9 s, decided the number of calls per graph: the minimum
    assert len(set(ran)) == 2
    del x, call
    assert gone() is None


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), "ptxas"])
def test_a_candidate_that_does_not_fit_is_not_taken(error: Exception | str) -> None:
    from triton.runtime.errors import PTXASError

    def fails(number: int) -> None:
        raise PTXASError("out of registers") if isinstance(error, str) else error

    assert graph_times.graph_times({"fails": fails, "runs": lambda number: None}) == {"fails": math.inf, "runs": 10 / 2}


def test_samples_are_taken_in_turns() -> None:
    ran: list[str] = []
    times = graph_times.graph_times(
        {"unfused": lambda number: ran.append("unfused"), "fused": lambda number: ran.append("fused")}
    )
    assert times == {"unfused": 11 / 2, "fused": 12 / 2}  # after one replay of each that decided the number of calls
    assert ran.count("unfused") == ran.count("fused") == 1 + 1 + 2
