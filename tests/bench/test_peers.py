"""The peers train the run they are timed on, and the check that guards our times can fail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from onelaunch.bench.cases.train import CHECKED_STEPS, TOLERANCE, check_losses
from onelaunch.bench.peers_jax import jax_scan, why_no_jax
from onelaunch.bench.peers_torch import Captured, Steps, TorchStep, reference_losses, row_order, worst_relative
from onelaunch.bench.step_peers import GRAPH, UNROLLED, StepPeer, step_peers
from onelaunch.bench.workload import Workload
from onelaunch.engines.contract import Run
from onelaunch.rng import permutation

CPU = torch.device("cpu")
WORKLOADS = [
    Workload((12, 16, 16, 5), 8),
    Workload((12, 16, 5), 8, "adam"),
    Workload((12, 16, 3), 8, loss="mse", bias=False),
    Workload((12, 16, 5), 8, precision="bf16"),
    Workload((12, 16, 5), 8, pixels=True),
]


def test_rows_come_in_the_order_of_fit() -> None:
    run = WORKLOADS[0].run(CPU, rows=20, epochs=2)
    order = row_order(run, 3)
    assert order[:2].flatten().equal(permutation(20, 0, 0)[:16])  # the last 4 rows make no whole batch
    assert order[2].equal(permutation(20, 0, 1)[:8])


@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
@pytest.mark.usefixtures("one_thread")
def test_the_step_of_the_torch_peers_follows_float64(workload: Workload) -> None:
    run = workload.run(CPU, rows=64, steps=40)
    step = TorchStep(run)
    losses = [step(rows).item() for rows in row_order(run, 40)]
    assert worst_relative(losses, reference_losses(run, 40)) < TOLERANCE[workload.precision]


@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
@pytest.mark.parametrize("unroll", [1, 10])
def test_the_jax_peer_trains_the_same_run(workload: Workload, unroll: int) -> None:
    if reason := why_no_jax(CPU):
        pytest.skip(reason)
    run = workload.run(CPU, rows=64, held_out=16, steps=20)
    scan = jax_scan(run, row_order(run, 20), unroll)
    losses, _ = scan()
    assert worst_relative(losses.tolist(), reference_losses(run, 20)) < TOLERANCE[workload.precision]


def test_the_jax_peer_flattens_images_as_the_model_does() -> None:
    if reason := why_no_jax(CPU):
        pytest.skip(reason)
    run = WORKLOADS[-1].run(CPU, rows=64, held_out=16, steps=20)
    assert run.validation is not None
    x, y = run.validation
    run = replace(run, x=run.x.view(64, 3, 4), validation=(x.view(16, 3, 4), y))
    losses, _ = jax_scan(run, row_order(run, 20))()
    assert worst_relative(losses.tolist(), reference_losses(run, 20)) < TOLERANCE["fp32"]


def test_a_timed_peer_takes_whole_calls_and_is_made_once() -> None:
    run = WORKLOADS[0].run(CPU, rows=64, steps=25)
    taken: list[int] = []
    made: list[bool] = []

    def make() -> Steps:
        made.append(True)
        return taken.append

    peer = StepPeer("peer", make, call=10)
    (steps, seconds), *rest = peer.train(run).epochs
    assert (steps, rest) == (30, [])
    assert seconds >= 0
    peer.train(run)
    assert taken == [10] * 6
    assert made == [True]


def test_nobody_validates_while_steps_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a run that does: a comparison's."""
    given: list[Run] = []
    monkeypatch.setattr("onelaunch.bench.step_peers.why_no_jax", lambda device: "")

    def scan(run: Run, steps: int) -> Steps:
        given.append(run)
        return lambda count: None

    monkeypatch.setattr("onelaunch.bench.step_peers.scan", scan)
    run = WORKLOADS[0].run(CPU, rows=64, held_out=16, steps=25)
    assert run.validation is not None
    (peer,), _ = step_peers(run)
    peer.train(run)
    assert [one.validation for one in given] == [None]


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"momentum": 0.9}, "momentum=0.9"), ({"schedule": "cosine"}, "schedule='cosine'"),
     ({"weight_decay": 0.1}, "weight_decay=0.1"), ({"label_smoothing": 0.1}, "label_smoothing=0.1"),
     ({"optimizer": "adamw"}, "optimizer='adamw'"), ({"precision": "fp16"}, "precision='fp16'")],
)  # fmt: skip
def test_a_run_the_timed_peers_would_train_differently_is_not_theirs(change: dict[str, Any], reason: str) -> None:
    run = WORKLOADS[0].run(CPU, rows=64, steps=25)
    peers, absent = step_peers(replace(run, spec=replace(run.spec, **change)))
    assert peers == []
    assert absent == dict.fromkeys((GRAPH, UNROLLED), f"does not take {reason}")


def test_a_network_the_timed_peers_would_train_differently_is_not_theirs() -> None:
    run = WORKLOADS[0].run(CPU, rows=64, steps=25)
    _, absent = step_peers(replace(run, model=nn.Sequential(run.model, nn.Dropout(0.5))))
    assert absent[GRAPH] == absent[UNROLLED] == "takes Linear and ReLU only, not Dropout"


@pytest.mark.usefixtures("one_thread")
def test_the_check_of_the_training_cases_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    run = WORKLOADS[0].run(CPU, rows=8 * CHECKED_STEPS, epochs=1)
    check_losses(run)
    wrong = replace(run, spec=replace(run.spec, lr=run.spec.lr * 1.001))
    monkeypatch.setattr("onelaunch.bench.cases.train.reference_losses", lambda _, steps: reference_losses(wrong, steps))
    with pytest.raises(AssertionError, match=r"losses differ from float64 by .* more than 1e-05"):
        check_losses(run)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # torch.compile warns of what it imports, and of products in fp32
@pytest.mark.parametrize("mode", [None, "default"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_captured_step_trains_the_same_run(mode: str | None, optimizer: str) -> None:
    run = Workload((12, 16, 5), 8, optimizer).run(torch.device("cuda"), rows=64, steps=8)
    step = TorchStep(run)
    for rows in [*row_order(run, 8), *row_order(run, 8)]:  # the order of the first epoch, again and again
        step(rows)
    trained = Captured(run, mode)
    trained(13)  # and three before the capture
    for ours, theirs in zip(trained.step.model.parameters(), step.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
