"""Which candidate is kept, under which key, and that trial runs leave no trace. Times are made up."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from onelaunch.fuse import decide, patterns
from onelaunch.fuse.captured import capture_graphs, uncompiled_call
from onelaunch.fuse.decide import Choice, candidates_of, compiled, fastest, graph_key
from onelaunch.trial_runs import copied, restored, trial_mode


def test_candidates() -> None:
    plain = {"uncompiled": Choice(None), "compiled": Choice(())}
    assert candidates_of([], False) == plain
    assert candidates_of(["linear"], False) == plain | {"linear": Choice(("linear",))}
    both = candidates_of(["linear", "relu_dropout"], False)
    assert both == plain | {
        "linear + relu_dropout": Choice(("linear", "relu_dropout")), "linear": Choice(("linear",)),
        "relu_dropout": Choice(("relu_dropout",)),
    }  # fmt: skip


def test_candidates_without_gradients_are_recorded() -> None:
    assert candidates_of(["linear"], True) == {
        "uncompiled": Choice(None), "compiled": Choice(()), "compiled as a CUDA graph": Choice((), True),
        "linear as a CUDA graph": Choice(("linear",), True),
    }  # fmt: skip


def test_the_fastest_must_lead_clearly() -> None:
    assert fastest({"uncompiled": 1.0, "compiled": 2.0, "linear": 3.0}) == "uncompiled"
    assert fastest({"uncompiled": 3.0, "compiled": 2.0, "linear": 1.99}) == "compiled"
    assert fastest({"uncompiled": 3.0, "compiled": 2.0, "linear": 1.9}) == "linear"
    assert fastest({"compiled": 2.0, "linear": float("inf")}) == "compiled"
    recorded = {"uncompiled": 3.0, "compiled": 2.0, "compiled as a CUDA graph": 1.5}
    assert fastest(recorded) == "compiled as a CUDA graph"
    assert fastest(recorded | {"linear as a CUDA graph": 1.49}) == "compiled as a CUDA graph"
    assert fastest(recorded | {"linear as a CUDA graph": 1.4}) == "linear as a CUDA graph"
    assert fastest(recorded | {"compiled": 1.51}) == "compiled"


def test_evaluation_is_measured_without_gradients() -> None:
    model, x = nn.Linear(3, 3), torch.ones(2, 3)
    seen = []
    for training, requires in ((True, False), (False, False), (False, True)):
        with trial_mode(model.train(training), (x.clone().requires_grad_(requires),), {}):
            seen.append(torch.is_grad_enabled())
    assert seen == [True, False, True]


def key_of(model: nn.Module, x: torch.Tensor) -> str:
    return graph_key(model, capture_graphs(uncompiled_call(model), (x,), {}))


def test_keys_differ_where_programs_do() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.1)), torch.randn(3, 4)
    keys = [
        key_of(model, x),
        key_of(model, torch.randn(2, 4)),
        key_of(model.eval(), x),
        key_of(model.double(), x.double()),
    ]
    keys.append(key_of(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.1)), x))
    assert len(set(keys)) == 5
    again = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.1))
    assert key_of(again, x) == keys[0]


PROGRAM = """
import torch
from torch import nn
from onelaunch.fuse.captured import capture_graphs, uncompiled_call
from onelaunch.fuse.decide import graph_key
model = nn.Sequential(nn.Linear(4, 4), nn.Hardswish(), nn.LayerNorm(4), nn.Softmax(1))
model.register_forward_hook(lambda module, args, output: torch.relu(output) + torch.cat([output]))
print(graph_key(model, capture_graphs(uncompiled_call(model), (torch.randn(3, 4),), {})))
"""


def test_a_key_is_the_same_in_another_process() -> None:
    """Addresses of functions are not part of it."""
    here: dict[str, Any] = {"print": lambda key: here.update(key=key)}
    exec(PROGRAM, here)
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == here["key"]


def test_trials_leave_no_trace() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    model[0].weight.grad = gradient = torch.ones(4, 4)
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    state = torch.get_rng_state()
    with contextlib.suppress(KeyError), restored(model):
        model(torch.randn(8, 4)).sum().backward()
        raise KeyError
    assert model[0].weight.grad is gradient
    assert model[0].bias.grad is None
    assert (gradient == 1).all()
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.named_buffers():
        assert torch.equal(value, buffers[name]), name


def test_trials_run_on_copies_of_their_inputs() -> None:
    x = torch.ones(3, requires_grad=True)
    made, (same, number) = copied(({"x": x}, (torch.zeros(2), 5)))
    assert made["x"].requires_grad
    assert made["x"] is not x
    assert number == 5
    assert not same.requires_grad


def test_compiled_with_nothing_is_the_function() -> None:
    def function() -> None: ...

    assert compiled(function, None) is function


class FakeTimes:
    """Measured times in memory."""

    def __init__(self) -> None:
        self.entries: dict[str, dict[str, float]] = {}

    def times(self, key: str) -> dict[str, float]:
        return self.entries.get(key, {})

    def add(self, key: str, times: dict[str, float]) -> None:
        self.entries[key] = times


def measure_as_on_cuda(monkeypatch: pytest.MonkeyPatch, program_seconds: Callable[[Any], dict[str, float]]) -> None:
    """Let `decide` measure by `program_seconds`, with a new cache, whatever the device."""
    times = FakeTimes()
    monkeypatch.setattr(decide, "device_of", lambda *values: torch.device("cuda", 0))
    monkeypatch.setattr(decide, "times_of", lambda device: times)
    monkeypatch.setattr(decide, "pays", lambda match: True)
    monkeypatch.setattr(decide, "pays_without_graph", lambda match: True)
    monkeypatch.setattr(decide, "program_times", program_seconds)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({"uncompiled": 1.0, "compiled": 2.0, "linear": 2.0}, None),
        ({"uncompiled": 3.0, "compiled": 2.0, "linear": 2.0}, ()),
        ({"uncompiled": 3.0, "compiled": 2.0, "linear": 1.0}, ("linear",)),
    ],
)
def test_decisions_are_measured_once(
    seconds: dict[str, float], expected: Any, no_code: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a CUDA device, with made-up times."""
    measured = []

    def program_seconds(runs: Any) -> dict[str, float]:
        for run in runs.values():
            run(0)
        measured.append(list(runs))
        return seconds

    measure_as_on_cuda(monkeypatch, program_seconds)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    x = torch.randn(3, 4, requires_grad=True)
    for _ in range(2):
        choice, function = decide.decide(uncompiled_call(model), model, (x,), {})
        assert choice == Choice(expected)
        torch.testing.assert_close(function(x), model(x))
    assert measured == [["uncompiled", "compiled", "linear"]]
    assert x.grad is None
    assert model[0].weight.grad is None


PLAIN, BOTH, EACH = ["uncompiled", "compiled"], ["linear + relu_dropout"], ["linear", "relu_dropout"]


@pytest.mark.parametrize(
    ("seconds", "expected", "rounds"),
    [
        ({"linear + relu_dropout": 1.0}, ("linear", "relu_dropout"), [PLAIN + BOTH]),
        ({"linear + relu_dropout": 2.5}, (), [PLAIN + BOTH, PLAIN + BOTH + EACH]),
        ({"linear + relu_dropout": 2.5, "linear": 1.0}, ("linear",), [PLAIN + BOTH, PLAIN + BOTH + EACH]),
        ({"linear + relu_dropout": float("inf"), "uncompiled": 1.0}, None, [PLAIN + BOTH, PLAIN + BOTH + EACH]),
    ],
)
def test_patterns_are_tried_alone_where_they_do_not_win_together(
    seconds: dict[str, float], expected: Any, rounds: list[list[str]], no_code: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []
    known = {"uncompiled": 3.0, "compiled": 2.0, "linear": 2.0, "relu_dropout": 2.0} | seconds

    def program_seconds(runs: Any) -> dict[str, float]:
        measured.append(list(runs))
        return {name: known[name] for name in runs}

    measure_as_on_cuda(monkeypatch, program_seconds)
    model = nn.Sequential(nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 4), nn.GELU())
    for _ in range(2):  # the second time from the cache
        assert decide.decide(uncompiled_call(model), model, (torch.randn(3, 4),), {})[0] == Choice(expected)
    assert measured == rounds


def test_training_tries_no_small_op_of_ours(no_code: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its call takes the host longer than it saves the device. In evaluation it is called inside a CUDA graph."""
    measured = []

    def program_seconds(runs: Any) -> dict[str, float]:
        measured.append(list(runs))
        return {name: float(len(name)) for name in runs}

    measure_as_on_cuda(monkeypatch, program_seconds)
    monkeypatch.setattr(decide, "pays_without_graph", patterns.pays_without_graph)
    monkeypatch.setattr(patterns, "is_on_cuda", lambda match: True)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(3, 4)
    for training in (True, False):
        decide.decide(uncompiled_call(model), model.train(training), (x,), {})
    assert measured == [
        ["uncompiled", "compiled"],
        ["uncompiled", "compiled", "compiled as a CUDA graph", "linear as a CUDA graph"],
    ]


def test_a_cpu_uses_all_patterns_unmeasured(no_code: None) -> None:
    model = nn.Linear(3, 3)
    assert decide.decide(uncompiled_call(model), model, (torch.ones(2, 3),), {})[0] == Choice()
    assert decide.decide(lambda: 3, model, (), {})[0] == Choice()
