"""Specialisations compile for every chip, with no GPU; the main ones without a spill.

Each takes NVRTC a few seconds, so the list covers options together: every precision, placement, optimizer, loss, activation,
schedule and kind of input stands in at least one row, and a test says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from onelaunch.device import A100, H200
from onelaunch.engines.resident.plan.rows_plan import RowsPlan
from onelaunch.engines.resident.plan.settings import PLANES
from onelaunch.engines.resident.plan.units_plan import Plan
from onelaunch.engines.resident.session import WORKING, spilled_bytes
from onelaunch.engines.resident.source.source import HEADERS, source_of
from onelaunch.nvrtc.compile import compile_cubin, unavailable_reason
from onelaunch.run.schedule import SCHEDULES
from onelaunch.run.spec import LOSSES, OPTIMIZERS
from tests.engines.resident.planning import LAYERS, plan_of
from tests.reference import ACTIVATIONS

pytestmark = pytest.mark.skipif(bool(unavailable_reason()), reason=f"cannot compile CUDA here: {unavailable_reason()}")


@dataclass(frozen=True)
class Row:
    arch: str
    widths: list[int]
    place: str  # wanted: one block, cluster, grid or rows
    changes: dict[str, Any] = field(default_factory=dict)
    faults: bool = False
    stamps: bool = False

    def plan(self, **more: Any) -> Plan:
        return plan_of(self.widths, chip=A100 if self.arch == "sm_80" else H200, **more, **self.changes)


MNIST = {"bytes_input": True, "validates": True, "rows": 60_000}
# The rows of the table that the engine is measured by: not a byte may spill.
MAIN = {
    "128 sgd bf16": Row("sm_90a", LAYERS, "cluster", MNIST),
    "512 sgd bf16": Row("sm_90a", [784, 512, 512, 512, 10], "grid", MNIST),
    "784 sgd bf16": Row("sm_90a", [784, 784, 784, 784, 10], "grid", {**MNIST, "batch": 64}),
    "128 adam bf16": Row("sm_90a", LAYERS, "cluster", {**MNIST, "optimizer": "adam"}),
    "128 sgd tf32": Row("sm_90a", LAYERS, "cluster", {**MNIST, "precision": "tf32"}),
    "128 sgd fp32": Row("sm_90a", LAYERS, "cluster", {**MNIST, "precision": "fp32"}),
    "64 sgd bf16": Row("sm_90a", [64, 64, 64, 16], "rows", {"batch": 256, "loss": "mse", "bias": False}),
}
OTHERS = {
    "one linear": Row("sm_80", [7, 3], "one block", {"precision": "fp16", "loss": "bce_with_logits", "by_rows": False}),
    "rows in one block": Row(
        "sm_80", [5, 9, 2], "rows", {"blocks": 1, "by_rows": True, "optimizer": "adam", "dropout": 0.1}
    ),
    "micro-batches": Row(
        "sm_80", [20, 40, 24, 5], "grid",
        {"blocks": 3, "by_rows": False, "batch": 300, "precision": "fp32", "optimizer": "adamw", "weight_decay": True,
         "loss": "mse", "activation": "gelu", "dropout": 0.3, "schedule": "cosine", "validates": True},
    ),
    "nesterov": Row(
        "sm_100a", [20, 40, 24, 5], "cluster",
        {"blocks": 2, "cluster": True, "by_rows": False, "batch": 37, "momentum": True, "nesterov": True,
         "weight_decay": True, "smooths": True, "activation": "leaky_relu", "dropout": 0.5, "schedule": "linear"},
        faults=True,
    ),
    "adam": Row(
        "sm_100a", [20, 40, 5], "grid",
        {"blocks": 5, "cluster": False, "precision": "tf32", "optimizer": "adam", "activation": "silu",
         "schedule": "one_cycle", "bytes_input": True, "loss": "bce_with_logits"},
        stamps=True,
    ),
    "sigmoid": Row(
        "sm_90a", [5, 9, 9, 2], "one block",
        {"by_rows": False, "activation": "sigmoid", "precision": "fp16", "batch": 1},
    ),
    "tanh": Row(
        "sm_80", [5, 9, 2], "one block",
        {"by_rows": False, "activation": "tanh", "momentum": True, "bytes_input": True},
    ),
    "gelu_tanh": Row(
        "sm_100a", [5, 9, 64], "rows",
        {"blocks": 2, "by_rows": True, "activation": "gelu_tanh", "precision": "fp16", "bytes_input": True, "batch": 99},
    ),
}  # fmt: skip


def place_of(plan: Plan) -> str:
    if isinstance(plan, RowsPlan):
        return "rows"
    return "one block" if plan.blocks == 1 else "cluster" if plan.cluster else "grid"


@pytest.mark.parametrize("name", MAIN)
def test_the_main_rows_compile_without_a_spill(name, tmp_path):
    row, spilled = MAIN[name], list[int]()
    for working in WORKING:  # as a session does
        made = compile_cubin(source_of(row.plan(working=working)), row.arch, headers=HEADERS, place=tmp_path)
        assert made.code.startswith(b"\x7fELF")
        spilled.append(spilled_bytes(made))
        if not spilled[-1]:
            return
    raise AssertionError(f"bytes of spills: {spilled}")


@pytest.mark.parametrize("name", OTHERS)
def test_other_rows_compile(name, tmp_path):
    row = OTHERS[name]
    plan = row.plan()
    assert place_of(plan) == row.place
    made = compile_cubin(
        source_of(plan, faults=row.faults, stamps=row.stamps), row.arch, headers=HEADERS, place=tmp_path
    )
    assert made.code.startswith(b"\x7fELF")
    assert f"'{row.arch}'" in made.log


def test_every_option_stands_in_some_row():
    plans = [row.plan() for row in (*MAIN.values(), *OTHERS.values())]
    options = {
        "precision": set(PLANES), "optimizer": set(OPTIMIZERS), "loss": set(LOSSES), "schedule": set(SCHEDULES),
        "momentum": {True, False}, "nesterov": {True, False}, "weight_decay": {True, False}, "smooths": {True, False},
        "bytes_input": {True, False}, "validates": {True, False},
    }  # fmt: skip
    for name, wanted in options.items():
        assert {getattr(plan.settings, name) for plan in plans} == wanted, name
    chains = [part for plan in plans for stage in plan.settings.stages for part in stage.chain]
    assert {part.name for part in chains if hasattr(part, "name")} == set(ACTIVATIONS)
    assert any(hasattr(part, "p") for part in chains)
    assert {row.arch for row in OTHERS.values()} == {"sm_80", "sm_90a", "sm_100a"}
    assert {plan.micro_batches > 1 for plan in plans} == {True, False}
    assert {plan.input_buffers for plan in plans} == {1, 2}


def test_a_source_names_what_it_was_made_for():
    plan = MAIN["128 sgd bf16"].plan()
    source = source_of(plan)
    assert f"constexpr int BLOCKS = {plan.blocks};" in source
    assert "constexpr bool FAULTS = false;" in source
    assert "constexpr bool FAULTS = true;" in source_of(plan, faults=True)
    assert source == source_of(MAIN["128 sgd bf16"].plan())  # the cache's key
