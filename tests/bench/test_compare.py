"""`compare`: the results of all contenders, and the remarks on failures and disagreement."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from onelaunch.bench.compare import compare, evaluate, spread
from onelaunch.bench.contenders import EAGER, OurEngine, TorchLoop
from onelaunch.report.remarks import is_red, not_run, remarks
from tests.bench.runs import Pretender, make

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings(
        "ignore:`torch.jit:DeprecationWarning"
    ),  # PyTorch's own, when torch.compile is first used
]


@pytest.mark.usefixtures("quick_compiler")
def test_compare_trains_all_contenders_and_saves_after_each():
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


def test_a_result_is_kept_when_printing_it_is_interrupted():
    results: dict = {}
    saved: list[list[str]] = []

    def interrupted(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(make, [0], interrupted, results, lambda: saved.append(list(results["contenders"])))
    assert results["trained"] == [[EAGER, 0]]
    assert saved == [[EAGER]]


@pytest.mark.usefixtures("no_compiler")
def test_a_contender_that_raises_is_absent():
    results: dict = {}
    compare(make, [0], lambda line: None, results, lambda: None)
    assert results["absent"]["torch.compile"] == "RuntimeError: no compiler"
    assert "onelaunch cpu" in results["contenders"]


@pytest.mark.usefixtures("no_compiler")
def test_an_engine_with_wrong_losses_disagrees(monkeypatch):
    train = OurEngine.train

    def wrong(self, run):
        result = train(self, run)
        result.losses = [1.5 * loss for loss in result.losses]
        return result

    monkeypatch.setattr(OurEngine, "train", wrong)
    results: dict = {}
    compare(lambda seed: make(seed, engine="cpu"), [0], lambda line: None, results, lambda: None)
    assert not results["contenders"]["onelaunch cpu"]["gap"]["agrees"]


def test_evaluate_uses_the_trained_weights():
    run = make()
    model = nn.Sequential(nn.Flatten(), nn.Linear(5, 3))
    with torch.no_grad():
        model[1].weight.copy_(torch.eye(3, 5) * 10)
        model[1].bias.zero_()
    found = evaluate(model, run)
    x, y = run.validation
    assert found["accuracy"] == pytest.approx((x[:, :3].argmax(1) == y).float().mean().item())
    assert found["loss"] == pytest.approx(nn.functional.cross_entropy(model(x), y).item(), rel=1e-5)


def test_spread_of_nothing_is_none():
    assert spread([]) is None
    both = spread([1.0, 3.0])
    assert both is not None
    assert both["deviation"] == pytest.approx(2**0.5)


def compare_engines(monkeypatch, train, seeds=(0,), **options) -> dict:
    """The results of a comparison in which our engines train by `train(self, run, real)`."""
    real = OurEngine.train
    monkeypatch.setattr(OurEngine, "train", lambda self, run: train(self, run, real))
    results: dict = {"sizes": {}, "finished": True}
    compare(lambda seed: make(seed, **options), list(seeds), lambda line: None, results, lambda: None)
    return results


def test_an_engine_of_ours_that_fails_on_a_later_seed_leaves_the_table(monkeypatch, no_compiler):
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


def test_divergence_is_reported_with_its_step(no_compiler):
    results: dict = {"sizes": {}}
    options = {"optimizer": "sgd", "lr": 1e30, "engine": "cpu"}
    compare(lambda seed: make(seed, **options), [0], lambda line: None, results, lambda: None)
    step = results["contenders"][EAGER]["diverged_step"]
    assert step == results["diverged"]["onelaunch cpu"] == 2
    assert results["failed"] == {"onelaunch cpu": "diverged at step 2"}
    assert is_red(results)
    words = "torch eager and onelaunch cpu both diverged (at step 2): the loss is no longer finite; pass a smaller lr"
    assert ("bad", words) in remarks(results)


def test_an_engine_that_does_not_diverge_as_pytorch_does_is_red(monkeypatch, no_compiler):
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
    """Seed 0 takes 1 ms per step, seed 1 takes 9 ms."""
    pretenders = {seed: Pretender(0.0, 1e-3 + 8e-3 * seed) for seed in (0, 1)}

    class Both(Pretender):
        def train(self, run):
            return pretenders[run.spec.seed].train(run)

    monkeypatch.setattr("onelaunch.bench.compare.contenders_for", lambda run: ([Both(0.0, 0.0)], {}))
    lines: list[str] = []
    compare(make, [0, 1], lines.append, {}, lambda: None)
    assert [line.split(", loss")[0] for line in lines] == [
        "pretender, seed 0: 1.00 ms per step",
        "pretender, seed 1: 9.00 ms per step",
    ]


@pytest.mark.parametrize(
    ("once", "steps", "reported"), [(1e-3, 4, True), (1e-3, 2, True), (1e-3, 3000, False), (0.0, 4, False)]
)
def test_a_run_too_short_to_time_a_step_is_reported(monkeypatch, once, steps, reported):
    pretender = Pretender(once, 1e-5)
    monkeypatch.setattr("onelaunch.bench.compare.contenders_for", lambda run: ([pretender], {}))
    results: dict = {"sizes": {}}
    compare(lambda seed: make(epochs=None, steps=steps), [0], lambda line: None, results, lambda: None)
    found = [words for kind, words in remarks(results) if "too few steps" in words]
    assert bool(found) == reported
    assert all("(of pretender); pass more --steps" in words for words in found)


def test_memory_is_recorded_for_the_compared_engines(no_compiler):
    for engine in ("eager", "cpu"):
        results: dict = {}
        compare(functools.partial(make, engine=engine), [0], lambda line: None, results, lambda: None)
        assert set(results["memory"]) == {EAGER, f"onelaunch {engine}"}


def test_interrupted_results_list_what_was_not_run(no_compiler):
    results: dict = {"sizes": {}, "planned": {"sizes": [8]}, "finished": False}

    def save():
        if len(results["trained"]) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(lambda seed: make(seed, engine="cpu"), [0, 1], lambda line: None, results, save)
    assert not_run(results) == ["torch eager (seed 1)", "onelaunch cpu (seed 1)", "hidden size 8"]
    assert not_run({**results, "finished": True}) == []


def test_a_final_loss_unlike_pytorchs_is_red():
    def ends(loss, first=2.0):
        return {"final": {"loss": {"mean": loss}}, "curve": {"mean": [first]}, "gap": None}

    def found(ours, reference, first=2.0):
        return {"contenders": {EAGER: ends(reference, first), "onelaunch cpu": ends(ours, first)}}

    words = "onelaunch cpu ends with a loss of 2.3 where torch eager has 0.4: its weights are not those of its curve"
    assert remarks(found(2.3, 0.4)) == [("bad", words)]
    assert is_red(found(2.3, 0.4))
    assert is_red(found(0.1, 0.4))
    for ours, reference in ((0.4, 0.5), (None, 0.4), (0.4, None), (1e-7, 5e-7)):  # losses near zero count as zero
        assert not is_red(found(ours, reference))
