"""Many members in one launch on a GPU: each follows a run of its own, whatever the others do."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch

from onelaunch.engines.contract import Run
from onelaunch.engines.members import MemberResult, MemberTask
from onelaunch.engines.resident import ENGINE
from onelaunch.train.inputs import make_run
from tests.conftest import LOSS_TOLERANCE, WEIGHT_TOLERANCE
from tests.engines.graph.harness import DEVICE, network
from tests.engines.resident.gpu_runs import fit, losses_of, placed, rows_of
from tests.reference import assert_same_course, assert_same_weights

pytestmark = pytest.mark.gpu
WIDTHS, STEPS = [20, 40, 24, 5], 60
BF16_TOLERANCE = 2e-2  # relative, of losses: the effect of rounded operands
TRAINING_OPTIONS = (
    "steps", "batch_size", "optimizer", "lr", "weight_decay", "label_smoothing", "betas", "eps", "seed", "schedule"
)  # fmt: skip
PLACES: dict[str, dict[str, Any]] = {
    "one block": {"blocks": 1, "by_rows": True, "per_multiprocessor": 1, "warps": 8},
    "three blocks per multiprocessor": {"blocks": 1, "by_rows": True, "per_multiprocessor": 3},
    "one block of 16 warps": {"blocks": 1, "by_rows": True, "warps": 16},
    "cluster by rows": {"blocks": 2, "by_rows": True},
    "cluster by units": {"blocks": 2, "by_rows": False},
}


class Quiet:
    """A monitor that stops after some reports."""

    def __init__(self, reports: int = 10**9) -> None:
        self.left, self.steps = reports, 0

    @property
    def stop(self) -> bool:
        return self.left <= 0

    def report(self, steps: int) -> None:
        self.left, self.steps = self.left - 1, steps


def grid(count: int, *, precision: str = "fp32", seed: int = 0, p: float = 0.0, **common: Any) -> list[Run]:
    """Runs that differ in all that members may differ in.

    In fp32 the activation is smooth. Rounding may move a unit across the kink of ReLU, and Adam then makes a step of another
    size: with weights perturbed by 1e-6, one of 36 such runs ends 1e-3 away.
    """
    draw = random.Random(seed)
    x, y = rows_of(WIDTHS, rows=300)
    held = (x[:77], y[:77])
    runs = []
    for number in range(count):
        torch.manual_seed(number)
        rows = draw.choice([300, 251])
        options = {
            "steps": STEPS, "batch_size": 32, "optimizer": "adam", "lr": draw.choice([1e-3, 3e-3]), "precision": precision,
            "weight_decay": draw.choice([0.0, 1e-3]), "label_smoothing": draw.choice([0.0, 0.1]),
            "betas": draw.choice([(0.9, 0.999), (0.8, 0.99)]), "eps": draw.choice([1e-4, 1e-5]),
            "seed": draw.randrange(2**63), **common,
        }  # fmt: skip
        model = network(WIDTHS, "tanh" if precision == "fp32" else "relu", p or draw.choice([0.1, 0.3]))
        runs.append(make_run(model, x[:rows], y[:rows], held, options))
    return runs


def train(runs: list[Run], *, steps: int = STEPS, forced: dict[str, Any] | None = None) -> list[MemberResult]:
    from onelaunch.engines.resident.members.placement import Forced
    from onelaunch.engines.resident.members.train import train_members

    tasks = [MemberTask(number, run, 0, steps) for number, run in enumerate(runs)]
    found = {result.index: result for result in train_members(tasks, Quiet(), Forced(**(forced or {})))}
    assert len(found) == len(runs)
    return [found[number] for number in range(len(runs))]


def losses(result: MemberResult) -> list[float]:
    return torch.cat([segment.losses for segment in result.segments]).tolist()


def alone(run: Run, model: Any) -> Any:
    """The eager engine's history of the run, for a copy of its first weights."""
    spec = run.spec
    options = {name: getattr(spec, name) for name in TRAINING_OPTIONS}
    return fit(model, run.x, run.y, "eager", validation=run.validation, **options)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", LOSS_TOLERANCE), ("bf16", BF16_TOLERANCE)])
def test_every_member_follows_its_own_run(place, precision, tolerance):
    runs = grid(6, precision=precision)
    twins = [copy.deepcopy(run.model) for run in runs]
    for run, twin, result in zip(runs, twins, train(runs, forced=PLACES[place]), strict=True):
        history = alone(run, twin)
        assert_same_course(losses(result), history.losses, tolerance)
        assert [segment.first_step + len(segment.losses) for segment in result.segments] == [
            e["step"] for e in history.epochs
        ]
        for segment, epoch in zip(result.segments, history.epochs, strict=True):
            assert segment.validation is not None
            assert segment.validation.loss == pytest.approx(epoch["validation"]["loss"], rel=10 * tolerance)
        if precision == "fp32":
            assert_same_weights(run.model, twin, WEIGHT_TOLERANCE)


@pytest.mark.parametrize("place", ["one block", "cluster by units"])
def test_a_member_has_the_bits_of_a_single_run_in_the_same_placement(place):
    forced = PLACES[place]
    # Equal options that are compiled into a single run, so that one kernel serves all of them.
    runs = grid(3, precision="bf16", p=0.3, weight_decay=1e-3, label_smoothing=0.1)
    twins = [copy.deepcopy(run.model) for run in runs]
    results = train(runs, forced=forced)
    for run, twin, result in zip(runs, twins, results, strict=True):
        single = make_run(twin, run.x, run.y, run.validation, _options(run))
        where = {"blocks": forced["blocks"], "cluster": forced["blocks"] > 1, "by_rows": forced["by_rows"]}
        assert losses_of(placed(single, where)) == losses(result)
        assert_same_weights(run.model, twin, 0)


@pytest.mark.parametrize("place", PLACES)
def test_class_weights_may_differ_between_members(place):
    x, y = rows_of(WIDTHS, rows=300)
    runs, weights = [], (None, "balanced", {0: 5.0}, {1: 0.0, 3: 2.0})
    for number, weight in enumerate(weights):
        torch.manual_seed(number)
        options = {"steps": STEPS, "batch_size": 32, "optimizer": "adam", "precision": "fp32", "seed": number}
        model = network(WIDTHS, "tanh", 0.1)
        runs.append(make_run(model, x, y, (x[:77], y[:77]), {**options, "eps": 1e-4, "class_weight": weight}))
    twins = [copy.deepcopy(run.model) for run in runs]
    results = train(runs, forced=PLACES[place])
    for run, twin, result, weight in zip(runs, twins, results, weights, strict=True):
        options = {name: getattr(run.spec, name) for name in TRAINING_OPTIONS}
        history = fit(twin, x, y, "eager", validation=run.validation, class_weight=weight, **options)
        assert_same_course(losses(result), history.losses, LOSS_TOLERANCE)
        assert_same_weights(run.model, twin, WEIGHT_TOLERANCE)
        first = result.segments[0]
        assert first.weights is not None
        mean = float((first.losses.double() * first.weights).sum() / first.weights.sum())
        assert mean == pytest.approx(history.epochs[0]["loss"], rel=LOSS_TOLERANCE)


def _options(run: Run) -> dict[str, Any]:
    return {name: getattr(run.spec, name) for name in (*TRAINING_OPTIONS, "precision")}


def test_a_queue_longer_than_the_places_gives_the_same_bits():
    """With more members than places, each block trains several; equal members must end equal."""
    count = 2 * torch.cuda.get_device_properties(DEVICE).multi_processor_count + 40
    x, y = rows_of(WIDTHS, rows=300)
    runs = []
    for number in range(count):
        torch.manual_seed(number % 3)
        options = {"steps": STEPS, "batch_size": 32, "optimizer": "adam", "precision": "bf16", "seed": number % 3}
        runs.append(make_run(network(WIDTHS, "relu", 0.2), x, y, None, options))
    results = train(runs, forced=PLACES["one block"])
    for number, (run, result) in enumerate(zip(runs, results, strict=True)):
        assert losses(result) == losses(results[number % 3])
        assert_same_weights(run.model, runs[number % 3].model, 0)


def test_members_that_take_turns_have_the_bits_of_whole_runs(monkeypatch):
    """With a few members more than places, all take turns in slices of some epochs."""
    from onelaunch.engines.resident.members import slices

    count = torch.cuda.get_device_properties(DEVICE).multi_processor_count + 8
    x, y = rows_of(WIDTHS, rows=300)
    trained, launches = [], list[int]()

    def counted(*given: Any, **named: Any) -> Any:
        found = slices.launches_of(*given, **named)
        launches.append(len(found))
        return found

    monkeypatch.setattr("onelaunch.engines.resident.members.train.launches_of", counted)
    for most in (slices.MAX_SLICES, 1):
        monkeypatch.setattr(slices, "MAX_SLICES", most)
        runs = []
        for number in range(count):
            torch.manual_seed(number)
            options = {"steps": STEPS, "batch_size": 32, "optimizer": "adam", "precision": "bf16", "seed": number}
            runs.append(make_run(network(WIDTHS, "relu", 0.2), x, y, (x[:77], y[:77]), options))
        trained.append((runs, train(runs, forced=PLACES["one block"])))
    assert launches[0] > 1 == launches[1]
    (in_turns, results), (whole, expected) = trained
    for run, twin, result, other in zip(in_turns, whole, results, expected, strict=True):
        assert losses(result) == losses(other)
        assert [one.validation for one in result.segments] == [one.validation for one in other.segments]
        assert [one.correct for one in result.segments] == [one.correct for one in other.segments]
        assert_same_weights(run.model, twin.model, 0)


@pytest.mark.parametrize("place", ["one block", "cluster by units"])
def test_a_task_goes_on_from_the_state_of_another(place):
    """Successive halving: the first steps of all members, then the rest of some, with the bits of one whole run."""
    from onelaunch.engines.resident.members.placement import Forced
    from onelaunch.engines.resident.members.train import train_members

    forced, spe = Forced(**PLACES[place]), 10
    runs, whole = grid(4, precision="bf16", steps=6 * spe), grid(4, precision="bf16", steps=6 * spe)
    first = {
        r.index: r for r in train_members([MemberTask(i, run, 0, 23) for i, run in enumerate(runs)], Quiet(), forced)
    }
    tasks = [MemberTask(i, runs[i], 23, 6 * spe, first[i].state) for i in (1, 3)]
    rest = {r.index: r for r in train_members(tasks, Quiet(), forced)}
    results = train(whole, steps=6 * spe, forced=PLACES[place])
    for number in (1, 3):
        assert losses(first[number]) + losses(rest[number]) == losses(results[number])
        assert_same_weights(runs[number].model, whole[number].model, 0)
    assert first[0].state
    assert not results[0].state, "a task that ends its run leaves no state"


def test_rows_may_be_chosen_by_number():
    """A member whose rows are listed (a fold) trains as on these rows alone."""
    import dataclasses

    x, y = rows_of(WIDTHS, rows=300)
    rows = torch.randperm(300, generator=torch.Generator().manual_seed(0))[:200]
    options = {"steps": STEPS, "batch_size": 32, "optimizer": "adam", "precision": "fp32"}
    model = network(WIDTHS, "relu")
    twin = copy.deepcopy(model)
    run = make_run(model, x, y, None, options)
    fold = dataclasses.replace(run, spec=dataclasses.replace(run.spec, rows=200), train_rows=rows.to(DEVICE))
    plain = make_run(twin, x[rows.to(DEVICE)], y[rows.to(DEVICE)], None, options)
    got, expected = train([fold, plain])
    assert losses(got) == losses(expected)


def test_a_diverging_member_ends_alone():
    runs = grid(4, precision="bf16", optimizer="sgd", steps=2000, betas=(0.9, 0.999))
    like = runs[0]
    wild = make_run(network(WIDTHS, "relu", 0.1), like.x, like.y, like.validation, {**_options(like), "lr": 1e30})
    results = train([*runs[:2], wild, *runs[2:]], steps=2000)
    for number, result in enumerate(results):
        found = torch.tensor(losses(result))
        assert bool(found.isfinite().all()) == (number != 2)
        assert (len(found) == 2000) == (number != 2)
    assert not torch.tensor(losses(results[2])[-1]).isfinite()
    assert torch.tensor(losses(results[2])[:-1]).isfinite().all()


def test_a_stop_ends_the_launch_and_keeps_what_is_finished():
    import time

    x, y = rows_of(WIDTHS, rows=300)
    options = {"steps": 20_000_000, "batch_size": 32, "optimizer": "sgd", "lr": 1e-4, "precision": "bf16"}
    runs = [make_run(network(WIDTHS, "relu"), x, y, None, {**options, "seed": seed}) for seed in range(3)]
    tasks = [MemberTask(n, run, 0, 100 if n == 1 else 20_000_000) for n, run in enumerate(runs)]
    begin = time.perf_counter()
    results = list(ENGINE.train_members(tasks, Quiet(reports=4)))
    assert time.perf_counter() - begin < 30  # a compilation, and a second at most
    assert [result.index for result in results] == [1]


def test_uint8_rows_and_other_options():
    widths = [784, 32, 10]
    x, y = rows_of(widths, rows=300, uint8_rows=True)
    runs = []
    for seed in range(3):
        torch.manual_seed(seed)
        options = {"steps": STEPS, "batch_size": 48, "optimizer": "sgd", "momentum": 0.9, "nesterov": True, "lr": 0.005,
                   "schedule": "cosine", "precision": "fp32", "seed": seed}  # fmt: skip
        runs.append(make_run(network(widths, "tanh"), x, y, (x[:50], y[:50]), options))
    twins = [copy.deepcopy(run.model) for run in runs]
    for run, twin, result in zip(runs, twins, train(runs), strict=True):
        history = fit(twin, x, y, "eager", steps=STEPS, batch_size=48, momentum=0.9, nesterov=True, lr=0.005,
                      schedule="cosine", seed=run.spec.seed, validation=run.validation)  # fmt: skip
        assert_same_course(losses(result), history.losses, LOSS_TOLERANCE)
        assert_same_weights(run.model, twin, WEIGHT_TOLERANCE)


def test_progress_counts_the_steps_of_all_members():
    runs = grid(5, precision="bf16")
    monitor = Quiet()
    list(ENGINE.train_members([MemberTask(n, run, 0, STEPS) for n, run in enumerate(runs)], monitor))
    assert monitor.steps == 5 * STEPS
