"""The turns in which calls are timed. Graphs and clock are stand-ins; the GPU tests of linear and fuse have real ones."""

from __future__ import annotations

import contextlib
import math
import weakref
from types import SimpleNamespace

import pytest
import torch

from onelaunch import graph_times
from onelaunch.kernels.dropout_key import NO_KEY
from onelaunch.ops import linear_choice


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replay takes a second longer than the one before it: 9, 10, …"""

    class Graph:
        def replay(self) -> None: ...

    seconds = iter(range(9, 10_000))
    monkeypatch.setattr(graph_times, "capturing", lambda graph: contextlib.nullcontext())
    monkeypatch.setattr(graph_times, "_replay_seconds", lambda graph: next(seconds))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=1000))


def test_each_candidate_gets_the_least_of_its_times_and_what_cannot_run_none() -> None:
    """And the error that Triton keeps of it does not keep the tensors."""
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
    assert times["runs"] == 10 / 2  # the first told how often to repeat it: the fewest times
    assert len(set(ran)) == 2
    del x, call
    assert gone() is None


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), "ptxas"])
def test_a_candidate_that_finds_no_room_is_not_taken(error: Exception | str) -> None:
    from triton.runtime.errors import PTXASError

    def fails(number: int) -> None:
        raise PTXASError("out of registers") if isinstance(error, str) else error

    assert graph_times.graph_times({"fails": fails, "runs": lambda number: None}) == {"fails": math.inf, "runs": 10 / 2}


def test_chains_are_timed_apart_and_fused_in_turns() -> None:
    ran = []
    times = device_times({"apart": lambda: ran.append("apart"), "fused": lambda: ran.append("fused")})
    assert times == {"apart": 11 / 2, "fused": 12 / 2}  # after one replay each that told how often to repeat it
    assert ran.count("apart") == ran.count("fused") == 3 + 1 + 1 + 2
