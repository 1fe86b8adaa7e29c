"""Compiled graphs replayed as CUDA graphs: right results whatever changes between calls, and what is not recorded."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from onelaunch.capture.recorded_call import (
    MAX_RECORDINGS,
    RecordedCall,
    _same,
    is_fixed,
    is_number,
    unrecordable_reason,
)
from onelaunch.fuse.backend import changes_inputs
from onelaunch.fuse.captured import capture_graphs, uncompiled_call
from onelaunch.fuse.decide import Choice
from onelaunch.fuse.fuse import FusedCall, fuse


def test_what_stays_in_place() -> None:
    seen: list[list[bool]] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
        seen.append([is_fixed(one) for one in example_inputs])
        return gm.forward

    model = nn.BatchNorm1d(3).eval()
    torch.compile(uncompiled_call(model), backend=backend)(torch.randn(2, 3))
    assert sorted(seen[0]) == [False, True, True, True, True]


@pytest.mark.parametrize(
    ("function", "changed"),
    [
        (lambda x: x + 1, False),
        (lambda x: x.add_(1), True),
        (lambda x: F.relu(x.view(-1), inplace=True), True),
        (lambda x: (x * 2).add_(1), False),
        (lambda x: torch.add(x, 1, out=x), True),
    ],
)
def test_graphs_that_change_their_input(function: Any, changed: bool) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return function(x)

    x = torch.ones(3)
    (captured,) = capture_graphs(uncompiled_call(Model()), (x,), {})
    assert changes_inputs(captured.graph, [x]) is changed


def test_reasons_without_a_gpu() -> None:
    x = torch.ones(3)
    assert unrecordable_reason((x,), (x + 1,), False) == "its tensors are not all on one CUDA device"
    assert unrecordable_reason((x, None), (x + 1,), False) == "it has arguments that are neither tensors nor numbers"
    assert unrecordable_reason((x, torch.tensor(3.0)), (), False) == "its tensors are not all on one CUDA device"
    assert [is_number(one) for one in (3, 0.5, torch.tensor(3.0), torch.ones(1))] == [True, True, True, False]
    assert unrecordable_reason((3,), (), False) == "its tensors are not all on one CUDA device"


def test_same_values() -> None:
    nan = torch.tensor([1.0, float("nan")])
    assert _same(nan, nan.clone())
    assert not _same(nan, torch.tensor([1.0, 2.0]))
    assert _same(torch.tensor([1, 2]), torch.tensor([1, 2]))
    assert not _same(torch.tensor([1j]), torch.tensor([2j]))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 4))
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.scale


def recorded_model(model: nn.Module) -> nn.Module:
    """On a GPU, in evaluation, as `fuse` leaves it where a CUDA graph is fastest."""
    fused = fuse(model.cuda().eval())
    vars(fused)["_call_impl"] = FusedCall(fused, Choice((), True))
    return fused


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[RecordedCall]:
    """Every RecordedCall that is made."""
    made: list[RecordedCall] = []
    real = RecordedCall.__init__

    def noted(self: RecordedCall, *args: Any) -> None:
        made.append(self)
        real(self, *args)

    monkeypatch.setattr(RecordedCall, "__init__", noted)
    return made


def batch(rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, 16, device="cuda")


def assert_same_calls(model: nn.Module, fused: nn.Module, times: int = 4, rows: int = 8) -> None:
    """Each call with other values at another address; results of earlier calls stay as they were."""
    inputs = [batch(rows) for _ in range(times)]
    got = [fused(x) for x in inputs]
    for x, y in zip(inputs, got, strict=True):
        torch.testing.assert_close(y, model(x))


@pytest.mark.gpu
def test_replays_follow_the_model(recordings: list[RecordedCall]) -> None:
    model = Net()
    fused = recorded_model(model)
    with torch.no_grad():
        assert_same_calls(model, fused)
        assert [(one.reason, len(one._recordings)) for one in recordings] == [("", 1)]
        model.body[0].weight.mul_(2)  # in place
        assert_same_calls(model, fused)
        assert len(recordings[0]._recordings) == 1
        model.body[0].weight.data = torch.randn_like(model.body[0].weight)  # at another address
        assert_same_calls(model, fused)
        model.body[4] = nn.Linear(32, 4).cuda()  # another module
        assert_same_calls(model, fused)
        model.scale = fused.scale = 3.0  # an attribute
        assert_same_calls(model, fused)
        assert_same_calls(model, fused, rows=5)  # other shapes
        assert_same_calls(model, fused, rows=6)
        assert_same_calls(model, fused)
    assert [one.reason for one in recordings if one.reason] == []


@pytest.mark.gpu
def test_modes() -> None:
    model = Net()
    fused = recorded_model(model)
    for _ in range(2):
        with torch.no_grad():
            assert_same_calls(model, fused)
        with torch.inference_mode():
            assert_same_calls(model, fused)
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            assert fused(batch()).dtype == torch.bfloat16
            assert_same_calls(model, fused)
        x = batch().requires_grad_()
        got, expected = torch.autograd.grad(fused(x).sum(), x), torch.autograd.grad(model(x).sum(), x)
        torch.testing.assert_close(got, expected)
        fused.train()
        with torch.no_grad():
            x, before = batch(), model.body[1].running_mean.clone()
            draws = [fused(x) for _ in range(4)]
            assert not torch.equal(draws[2], draws[3])  # a replay draws new masks
            assert not torch.equal(before, model.body[1].running_mean)
            assert int(model.body[1].num_batches_tracked) % 4 == 0
        fused.eval()


@pytest.mark.gpu
def test_threads_and_streams(recordings: list[RecordedCall]) -> None:
    model = Net()
    fused = recorded_model(model)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
                for _ in range(50):
                    assert_same_calls(model, fused, 2)
        except BaseException as error:
            failures.append(error)

    with torch.no_grad():
        assert_same_calls(model, fused)
    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert not any(one.reason for one in recordings)


@pytest.mark.gpu
def test_what_is_not_recorded(recordings: list[RecordedCall]) -> None:
    class Views(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x[1:], x + 1

    class Changes(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            x.add_(1)
            return x * 2

    with torch.no_grad():
        for model in (Views(), Changes()):
            fused = recorded_model(model)
            for _ in range(3):
                x = batch()
                y = x.clone()
                torch.testing.assert_close(fused(x), model(y))
                torch.testing.assert_close(x, y)
        x = batch()
        fused = recorded_model(Views())
        for _ in range(3):
            assert fused(x)[0].data_ptr() == x[1:].data_ptr()
    assert not any(one._recordings for one in recordings)


@pytest.mark.gpu
def test_many_places_of_parameters_end_the_recording(recordings: list[RecordedCall]) -> None:
    model = Net()
    fused = recorded_model(model)
    kept = []
    with torch.no_grad():
        for _ in range(MAX_RECORDINGS + 2):
            assert_same_calls(model, fused, 2)
            kept.append(model.body[0].weight.data)
            model.body[0].weight.data = torch.randn_like(kept[-1])
    assert "more than 8 shapes or places" in recordings[0].reason


@pytest.mark.gpu
def test_inside_a_recording_of_the_caller() -> None:
    model = Net()
    fused = recorded_model(model)
    x = batch()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        assert_same_calls(model, fused)
        with torch.cuda.graph(graph):
            y = fused(x)
        x.copy_(batch())
        graph.replay()
        torch.testing.assert_close(y, model(x))


@pytest.mark.gpu
def test_fuse_measures_recorded_candidates() -> None:
    model = Net().cuda().eval()
    fused = fuse(model, batch())
    choice = vars(fused)["_call_impl"].choice
    assert choice.recorded  # the host is slower than this network on any machine
    with torch.no_grad():
        assert_same_calls(model, fused)
