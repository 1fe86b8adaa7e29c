"""The comparison: the same weights and rows for everybody, honest clocks, and memory that is counted."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from onelaunch.bench.compare import compare, evaluate, spread
from onelaunch.bench.contenders import EAGER, OurEngine, TorchLoop, contenders_for, peak_memory
from onelaunch.bench.memory_timeline import step_timeline
from onelaunch.bench.sizes import time_sizes
from onelaunch.bench.step_peers import GRAPH, UNROLLED
from onelaunch.train.build import mlp
from onelaunch.train.inputs import make_run

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings(
        "ignore:`torch.jit:DeprecationWarning"
    ),  # PyTorch's own, when torch.compile is first used
]


def make(seed: int = 0, hidden: int = 16, dropout: float = 0.0, **options):
    random = np.random.default_rng(0)
    y = np.arange(330) % 3
    x = random.normal(size=(330, 5)).astype(np.float32) + 2 * np.eye(5, dtype=np.float32)[y]
    settings = {"epochs": 3, "batch_size": 32, "optimizer": "adam", "lr": 1e-2, "seed": seed, **options}
    model = mlp([5, hidden, 3], dropout=dropout, seed=seed)
    return make_run(model, x[:300], y[:300], (x[300:], y[300:]), settings)


def test_the_plain_loop_follows_our_engines():
    """No dropout, so all see the same numbers: the PyTorch loop trains what `fit` trains, partial last batch included."""
    run = make()
    before = copy.deepcopy(run.model.state_dict())
    losses = {
        c.name: c.train(run).losses for c in (TorchLoop(run, compiled=False), OurEngine("eager"), OurEngine("cpu"))
    }
    for name, found in losses.items():
        assert len(found) == 30, name
        np.testing.assert_allclose(found, losses[EAGER], rtol=1e-4, err_msg=name)
    for name, value in run.model.state_dict().items():
        assert torch.equal(value, before[name]), "a contender trains a copy"


def test_a_contender_can_train_again_to_the_same_losses():
    run = make(dropout=0.3)
    for contender in (TorchLoop(run, compiled=False), OurEngine("cpu")):
        assert contender.train(run).losses == contender.train(run).losses


def test_epochs_are_timed_one_by_one():
    trained = TorchLoop(make(), compiled=False).train(make(steps=25, epochs=None))
    assert [steps for steps, _ in trained.epochs] == [10, 10, 5]
    assert all(seconds > 0 for _, seconds in trained.epochs)


def test_compare_fills_in_everybody_and_saves_on_the_way():
    results: dict = {}
    saves: list[int] = []
    lines: list[str] = []
    compare(lambda seed: make(seed), [3, 4], lines.append, results, lambda: saves.append(len(results["contenders"])))
    assert results["seeds"] == [3, 4]
    assert {"torch eager", "torch.compile", "onelaunch eager", "onelaunch cpu"} == set(results["contenders"])
    assert saves[0] == 1
    for name, one in results["contenders"].items():
        assert one["step_seconds"]["n"] == 6, name
        assert one["final"]["accuracy"]["mean"] > 0.6
        assert one["final"]["accuracy"]["n"] == 2
        assert one["curve"]["steps"][-1] == 30
        assert all(
            low <= mean <= high
            for low, mean, high in zip(*(one["curve"][k] for k in ("low", "mean", "high")), strict=True)
        )
        assert (one["gap"] is None) == (name == EAGER)
        assert one["gap"] is None or one["gap"]["agrees"]
    assert len(lines) == 8


@pytest.fixture
def no_compiler(monkeypatch):
    """torch.compile fails, at once instead of after ten seconds of compiling."""

    def make_ready(self, run):
        if self.name != EAGER:
            raise RuntimeError("no compiler\nhere")

    monkeypatch.setattr(TorchLoop, "_make_ready", make_ready)


@pytest.mark.usefixtures("no_compiler")
def test_a_contender_that_raises_is_named_and_the_others_go_on():
    results: dict = {}
    compare(make, [0], lambda line: None, results, lambda: None)
    assert results["absent"]["torch.compile"] == "RuntimeError: no compiler"
    assert "onelaunch cpu" in results["contenders"]


@pytest.mark.usefixtures("no_compiler")
def test_an_engine_that_trains_wrongly_does_not_agree(monkeypatch):
    train = OurEngine.train

    def wrong(self, run):
        result = train(self, run)
        result.losses = [1.5 * loss for loss in result.losses]
        return result

    monkeypatch.setattr(OurEngine, "train", wrong)
    results: dict = {}
    compare(lambda seed: make(seed, engine="cpu"), [0], lambda line: None, results, lambda: None)
    assert not results["contenders"]["onelaunch cpu"]["gap"]["agrees"]


def test_one_engine_can_be_asked_for():
    found, absent = contenders_for(make(engine="cpu"))
    assert [contender.name for contender in found] == ["torch eager", "torch.compile", "onelaunch cpu"]
    found, absent = contenders_for(make())
    assert any(name.startswith("onelaunch") for name in absent)
    assert all(absent.values())


def test_final_figures_come_from_the_weights():
    run = make()
    model = nn.Sequential(nn.Flatten(), nn.Linear(5, 3))
    with torch.no_grad():
        model[1].weight.copy_(torch.eye(3, 5) * 10)
        model[1].bias.zero_()
    found = evaluate(model, run)
    x, y = run.validation
    assert found["accuracy"] == pytest.approx((x[:, :3].argmax(1) == y).float().mean().item())
    assert found["loss"] == pytest.approx(nn.functional.cross_entropy(model(x), y).item(), rel=1e-5)


@pytest.mark.usefixtures("no_compiler")
def test_sizes_are_timed_for_everybody_and_auto_is_named():
    results: dict = {}
    time_sizes([8, 16], lambda hidden: make(hidden=hidden, engine="cpu"), lambda line: None, results)
    assert results["hidden"] == [8, 16]
    assert results["auto"] == {"8": "onelaunch cpu", "16": "onelaunch cpu"}
    assert results["absent"].pop("torch.compile") == dict.fromkeys(("8", "16"), "RuntimeError: no compiler")
    assert all(set(by_size) == {"8", "16"} and all(by_size.values()) for by_size in results["absent"].values())
    assert set(results["step_seconds"]) | set(results["absent"]) == {EAGER, GRAPH, UNROLLED, "onelaunch cpu"}
    for by_size in results["step_seconds"].values():
        assert all(0 < by_size[size]["minimum"] <= by_size[size]["median"] for size in ("8", "16"))


def test_memory_over_a_step_counts_live_bytes():
    run = make(hidden=64)
    timeline = step_timeline(run)
    assert len(timeline["operations"]) == len(timeline["bytes"]) > 10
    assert any("addmm" in name for name in timeline["operations"])
    weights = 4 * sum(p.numel() for p in run.model.parameters())
    assert min(timeline["bytes"]) >= 3 * weights  # parameters and Adam's two states outlive the step
    assert max(timeline["bytes"]) >= 4 * weights + 4 * 32 * 64  # gradients and the hidden activations


def test_peak_memory_sees_what_was_held_in_between():
    with peak_memory(torch.device("cpu")) as peak:
        torch.ones(2**24)  # 64 MiB, freed at once
    if peak.bytes is None:
        pytest.skip("this system does not tell a process its peak")
    assert 60 * 2**20 < peak.bytes < 200 * 2**20


def test_spread_of_nothing_is_none():
    assert spread([]) is None
    both = spread([1.0, 3.0])
    assert both is not None
    assert both["deviation"] == pytest.approx(2**0.5)
