from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from onelaunch.bench.peers_torch import Steps
from onelaunch.bench.step_peers import GRAPH, UNROLLED, StepPeer, step_peers
from onelaunch.engines.contract import Run
from tests.bench.workloads import CPU, WORKLOADS


def test_a_step_peer_takes_whole_calls_and_is_made_once() -> None:
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


def test_step_peers_do_not_validate(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Run] = []
    monkeypatch.setattr("onelaunch.bench.step_peers.jax_unavailable_reason", lambda device: "")

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
def test_step_peers_refuse_options_that_they_do_not_support(change: dict[str, Any], reason: str) -> None:
    run = WORKLOADS[0].run(CPU, rows=64, steps=25)
    peers, absent = step_peers(replace(run, spec=replace(run.spec, **change)))
    assert peers == []
    assert absent == dict.fromkeys((GRAPH, UNROLLED), f"does not take {reason}")


def test_step_peers_refuse_layers_that_they_do_not_support() -> None:
    run = WORKLOADS[0].run(CPU, rows=64, steps=25)
    _, absent = step_peers(replace(run, model=nn.Sequential(run.model, nn.Dropout(0.5))))
    assert absent[GRAPH] == absent[UNROLLED] == "takes Linear and ReLU only, not Dropout"
