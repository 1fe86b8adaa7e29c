"""The comparison: the same weights and rows for everybody, honest clocks, and memory that is counted."""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest
import torch
from torch import nn

from onelaunch.bench.compare import compare, evaluate, spread
from onelaunch.bench.contenders import EAGER, OurEngine, TorchLoop, Trained, contenders_for, peak_memory
from onelaunch.bench.memory_timeline import engine_timeline, step_timeline
from onelaunch.bench.sizes import time_sizes, time_steps
from onelaunch.bench.step_peers import GRAPH, UNROLLED
from onelaunch.report.remarks import is_red, not_run, remarks
from onelaunch.train.inputs import make_run
from onelaunch.train.mlp import mlp

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


def test_what_was_trained_is_kept_when_it_cannot_be_told():
    """Ctrl-C strikes while a contender's line is printed."""
    results: dict = {}
    saved: list[list[str]] = []

    def interrupted(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(make, [0], interrupted, results, lambda: saved.append(list(results["contenders"])))
    assert results["trained"] == [[EAGER, 0]]
    assert saved == [[EAGER]]


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


class Pretender:
    """Trains nothing, and says what it would have taken: so much once a run, so much a step, whole calls of `call` steps."""

    def __init__(self, once: float, step: float, call: int = 1) -> None:
        self.name, self.once, self.step, self.call = "pretender", once, step, call
        self.asked: list[int] = []

    def train(self, run):
        steps = -(-run.spec.total_steps // self.call) * self.call
        self.asked.append(steps)
        return Trained(run.model, [1.0] * steps, [(steps, self.once + steps * self.step)])


@pytest.mark.parametrize("call", [1, 1000])
@pytest.mark.parametrize(("once", "step"), [(0.0, 1e-3), (0.05, 1e-5), (0.5, 1e-4), (2.0, 0.4), (0.02, 1e-6)])
def test_what_a_run_costs_once_is_not_in_the_time_of_a_step(once, step, call):
    pretender = Pretender(once, step, call)
    timings, errors = time_steps([pretender], make())
    assert not errors
    timing = timings["pretender"]
    assert timing["median"] == pytest.approx(step, rel=1e-3)
    assert timing["n"] >= 3
    assert len(pretender.asked) < 20
    assert max(pretender.asked) <= max(100_000, 2 * call)


def test_contenders_are_timed_in_turns_and_one_that_raises_stops_nobody():
    order: list[str] = []

    class Noted(Pretender):
        def __init__(self, name: str, raises_at: int = 0) -> None:
            super().__init__(0.0, 1e-3)
            self.name, self.raises_at = name, raises_at

        def train(self, run):
            order.append(self.name)
            if order.count(self.name) == self.raises_at:
                raise SystemExit("enough")
            return super().train(run)

    timings, errors = time_steps([Noted("a"), Noted("b", raises_at=1), Noted("c"), Noted("d", raises_at=8)], make())
    assert order[-5:] == ["a", "c", "d", "a", "c"]  # after seven runs each that set its pace
    assert set(timings) == {"a", "c"}
    assert errors == dict.fromkeys(("b", "d"), ("SystemExit: enough", False))


def test_a_size_that_cannot_be_made_is_named_and_the_others_go_on(no_compiler):
    results: dict = {}
    sizes = [8, 10**12, 10**20]
    time_sizes(sizes, lambda hidden: make(hidden=hidden, engine="eager"), lambda line: None, results)
    assert results["hidden"] == [8]
    assert list(results["left_out"]) == [str(size) for size in sizes[1:]]
    assert all("do not fit into memory" in reason for reason in results["left_out"].values())
    said = remarks({"contenders": {}, "sizes": results})
    assert [kind for kind, _ in said] == ["bad", "bad"]
    assert "Hidden size 1000000000000 was not timed: layers=[5, 1000000000000, 3] do not fit" in said[0][1]


@pytest.mark.parametrize(("error", "red"), [(ValueError("no"), True), (MemoryError(), False)])
def test_an_engine_of_ours_that_raises_at_a_size_is_red(monkeypatch, no_compiler, error, red):
    """Unless memory does not hold it, which may be so of anyone."""

    def raises(self, run):
        raise error

    monkeypatch.setattr(OurEngine, "train", raises)
    results: dict = {}
    time_sizes([8], lambda hidden: make(hidden=hidden, engine="cpu"), lambda line: None, results)
    assert "8" in results["absent"]["onelaunch cpu"]
    found = {"contenders": {}, "sizes": results}
    assert is_red(found) == red
    assert remarks(found) == ([("bad", "onelaunch cpu failed at hidden size 8: ValueError: no")] if red else [])


def compare_engines(monkeypatch, train, seeds=(0,), **options) -> dict:
    """Our engines train by `train(self, run, real)` instead."""
    real = OurEngine.train
    monkeypatch.setattr(OurEngine, "train", lambda self, run: train(self, run, real))
    results: dict = {"sizes": {}, "finished": True}
    compare(lambda seed: make(seed, **options), list(seeds), lambda line: None, results, lambda: None)
    return results


def test_an_engine_of_ours_that_fails_on_a_later_seed_is_no_longer_in_the_table(monkeypatch, no_compiler):
    def train(self, run, real):
        if self.engine == "cpu" and run.spec.seed == 4:
            raise SystemExit("gone")
        return real(self, run)

    results = compare_engines(monkeypatch, train, (3, 4, 5))
    assert set(results["contenders"]) == {EAGER, "onelaunch eager"}
    assert results["failed"] == {"onelaunch cpu": "SystemExit: gone, seed 4"}
    assert "onelaunch cpu" not in results["absent"]
    assert is_red(results)
    assert ("bad", "onelaunch cpu failed: SystemExit: gone, seed 4") in remarks(results)


def test_two_that_diverge_are_said_to_with_their_step(no_compiler):
    results: dict = {"sizes": {}}
    options = {"optimizer": "sgd", "lr": 1e30, "engine": "cpu"}
    compare(lambda seed: make(seed, **options), [0], lambda line: None, results, lambda: None)
    step = results["contenders"][EAGER]["diverged_step"]
    assert step == results["diverged"]["onelaunch cpu"] == 2
    assert results["failed"] == {"onelaunch cpu": "diverged at step 2"}
    assert is_red(results)
    words = "torch eager and onelaunch cpu both diverged (at step 2): the loss is no longer finite; pass a smaller lr"
    assert ("bad", words) in remarks(results)


def test_one_that_goes_on_where_pytorch_diverges_is_red(monkeypatch, no_compiler):
    train = TorchLoop.train

    def diverges(self, run):
        trained = train(self, run)
        trained.losses[-1] = float("nan")
        return trained

    monkeypatch.setattr(TorchLoop, "train", diverges)
    results: dict = {"sizes": {}}
    compare(lambda seed: make(seed, engine="cpu"), [0], lambda line: None, results, lambda: None)
    assert results["contenders"]["onelaunch cpu"]["gap"] is None
    assert is_red(results)
    assert ("bad", "onelaunch cpu did not diverge as torch eager did") in remarks(results)


def test_the_line_of_a_seed_has_its_own_time(monkeypatch):
    """Seed 0 takes 1 ms a step, seed 1 takes 9."""
    pretenders = {seed: Pretender(0.0, 1e-3 + 8e-3 * seed) for seed in (0, 1)}

    class Both(Pretender):
        def train(self, run):
            return pretenders[run.spec.seed].train(run)

    monkeypatch.setattr("onelaunch.bench.compare.contenders_for", lambda run: ([Both(0.0, 0.0)], {}))
    lines: list[str] = []
    compare(make, [0, 1], lines.append, {}, lambda: None)
    assert [line.split(", loss")[0] for line in lines] == [
        "pretender, seed 0: 1.00 ms a step",
        "pretender, seed 1: 9.00 ms a step",
    ]


@pytest.mark.parametrize(
    ("once", "steps", "said"), [(1e-3, 4, True), (1e-3, 2, True), (1e-3, 3000, False), (0.0, 4, False)]
)
def test_a_run_too_short_to_time_a_step_says_so(monkeypatch, once, steps, said):
    pretender = Pretender(once, 1e-5)
    monkeypatch.setattr("onelaunch.bench.compare.contenders_for", lambda run: ([pretender], {}))
    results: dict = {"sizes": {}}
    compare(lambda seed: make(epochs=None, steps=steps), [0], lambda line: None, results, lambda: None)
    found = [words for kind, words in remarks(results) if "too few steps" in words]
    assert bool(found) == said
    assert all("(of pretender); pass more --steps" in words for words in found)


def test_memory_is_shown_of_those_compared(no_compiler):
    for engine in ("eager", "cpu"):
        results: dict = {}
        compare(functools.partial(make, engine=engine), [0], lambda line: None, results, lambda: None)
        assert set(results["memory"]) == {EAGER, f"onelaunch {engine}"}


def test_our_eager_engine_holds_about_what_the_plain_loop_does():
    plain, ours = step_timeline(make(hidden=64)), engine_timeline(make(hidden=64))
    assert len(ours["operations"]) == len(ours["bytes"])
    assert max(ours["bytes"]) == pytest.approx(max(plain["bytes"]), rel=0.1)


def test_what_was_not_run_is_known_from_the_file(no_compiler):
    results: dict = {"sizes": {}, "planned": {"sizes": [8]}, "finished": False}

    def save():
        if len(results["trained"]) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(lambda seed: make(seed, engine="cpu"), [0, 1], lambda line: None, results, save)
    assert not_run(results) == ["torch eager (seed 1)", "onelaunch cpu (seed 1)", "hidden size 8"]
    assert not_run({**results, "finished": True}) == []


def test_weights_that_are_not_those_of_their_curve_are_red():
    def ends(loss, first=2.0):
        return {"final": {"loss": {"mean": loss}}, "curve": {"mean": [first]}, "gap": None}

    def found(ours, reference, first=2.0):
        return {"contenders": {EAGER: ends(reference, first), "onelaunch cpu": ends(ours, first)}}

    words = "onelaunch cpu ends with a loss of 2.3 where torch eager has 0.4: its weights are not those of its curve"
    assert remarks(found(2.3, 0.4)) == [("bad", words)]
    assert is_red(found(2.3, 0.4))
    assert is_red(found(0.1, 0.4))
    for ours, reference in ((0.4, 0.5), (None, 0.4), (0.4, None), (1e-7, 5e-7)):  # the last two are as good as none
        assert not is_red(found(ours, reference))
