"""Generated sources compile for every chip without a GPU; the main ones without a spill.

Each takes NVRTC several seconds, so the list combines options: every precision, placement, optimizer, loss, activation,
schedule and kind of input is in at least one row, which a test checks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest

from onelaunch.device import A100, H200
from onelaunch.engines.resident import ACTIVATIONS, OPTIMIZERS
from onelaunch.engines.resident.plan.plan import Plan
from onelaunch.engines.resident.plan.rows_plan import RowsPlan
from onelaunch.engines.resident.plan.settings import PLANES
from onelaunch.engines.resident.session import REGISTER_RESERVES, spilled_bytes
from onelaunch.engines.resident.source.source_common import HEADERS
from onelaunch.nvrtc.compile import compile_cubin, unavailable_reason
from onelaunch.run.schedule import SCHEDULES
from onelaunch.run.spec import LOSSES
from tests import pairwise
from tests.engines.resident.planning import LAYERS, plan_of

pytestmark = pytest.mark.skipif(bool(unavailable_reason()), reason=f"cannot compile CUDA here: {unavailable_reason()}")


@dataclass(frozen=True)
class Row:
    arch: str
    widths: list[int]
    placement: str  # expected: one block, cluster, grid or rows
    changes: dict[str, Any] = field(default_factory=dict)
    faults: bool = False
    stamps: bool = False

    def plan(self, **more: Any) -> Plan:
        return plan_of(self.widths, chip=A100 if self.arch == "sm_80" else H200, **more, **self.changes)


MNIST = {"uint8_rows": True, "validates": True, "rows": 60_000}
# The networks that the engine is measured by: nothing may spill. Without --all-cases, the first three.
MAIN = {
    "128 sgd bf16": Row("sm_90a", LAYERS, "cluster", MNIST),
    "128 adam bf16": Row("sm_90a", LAYERS, "cluster", {**MNIST, "optimizer": "adam"}),
    "64 sgd bf16": Row("sm_90a", [64, 64, 64, 16], "rows", {"batch": 256, "loss": "mse", "bias": False}),
    "512 sgd bf16": Row("sm_90a", [784, 512, 512, 512, 10], "grid", MNIST),
    "784 sgd bf16": Row("sm_90a", [784, 784, 784, 784, 10], "grid", {**MNIST, "batch": 64}),
    "128 sgd tf32": Row("sm_90a", LAYERS, "cluster", {**MNIST, "precision": "tf32"}),
    "128 sgd fp32": Row("sm_90a", LAYERS, "cluster", {**MNIST, "precision": "fp32"}),
}
OTHERS = {
    "one linear": Row("sm_80", [7, 3], "one block", {"precision": "fp16", "loss": "bce_with_logits", "by_rows": False}),
    "rows in one block": Row(
        "sm_80", [5, 9, 9, 2], "rows",
        {"blocks": 1, "by_rows": True, "optimizer": "rmsprop", "activation": ("elu", "hardswish"), "dropout": 0.1,
         "weighted": True},
    ),
    "micro-batches": Row(
        "sm_80", [20, 40, 24, 5], "grid",
        {"blocks": 3, "by_rows": False, "batch": 300, "precision": "tf32", "optimizer": "adamw", "weight_decay": True,
         "loss": "mse", "activation": ("gelu", "mish"), "dropout": 0.3, "schedule": "cosine", "validates": True},
    ),
    "nesterov": Row(
        "sm_100a", [20, 40, 24, 5], "cluster",
        {"blocks": 2, "cluster": True, "by_rows": False, "batch": 37, "momentum": True, "nesterov": True,
         "weight_decay": True, "label_smoothing": True, "activation": ("leaky_relu", "softplus"), "dropout": 0.5,
         "schedule": "linear", "weighted": True},
        faults=True,
    ),
    "adam": Row(
        "sm_100a", [20, 40, 5], "grid",
        {"blocks": 5, "cluster": False, "optimizer": "adam", "activation": "silu",
         "schedule": "one_cycle", "uint8_rows": True, "loss": "bce_with_logits", "weighted": True},
        stamps=True,
    ),
    "lion": Row(
        "sm_90a", [5, 9, 9, 2], "one block",
        {"by_rows": False, "activation": ("sigmoid", "selu"), "precision": "fp16", "batch": 1, "optimizer": "lion",
         "weighted": True, "validates": True},
    ),
    "rmsprop with momentum": Row(
        "sm_80", [5, 9, 2], "one block",
        {"by_rows": False, "activation": "tanh", "optimizer": "rmsprop", "momentum": True, "uint8_rows": True,
         "precision": "fp32"},
    ),
    "gelu_tanh": Row(
        "sm_100a", [5, 9, 64], "rows",
        {"blocks": 2, "by_rows": True, "activation": "gelu_tanh", "precision": "fp16", "uint8_rows": True, "batch": 99},
    ),
}  # fmt: skip


def placement_of(plan: Plan) -> str:
    if isinstance(plan, RowsPlan):
        return "rows"
    return "one block" if plan.blocks == 1 else "cluster" if plan.cluster else "grid"


@pytest.mark.parametrize("name", list(MAIN)[: None if pairwise.ALL_CASES else 3])
def test_the_main_plans_compile_without_a_spill(name, tmp_path):
    row, spilled = MAIN[name], list[int]()
    for reserved in REGISTER_RESERVES:  # as a session does
        source = row.plan(reserved_registers=reserved).source()
        made = compile_cubin(source, row.arch, headers=HEADERS, place=tmp_path)
        assert made.code.startswith(b"\x7fELF")
        spilled.append(spilled_bytes(made))
        if not spilled[-1]:
            return
    raise AssertionError(f"bytes of spills: {spilled}")


@pytest.mark.parametrize("name", OTHERS)
def test_other_plans_compile(name, tmp_path):
    row = OTHERS[name]
    plan = row.plan()
    assert placement_of(plan) == row.placement
    source = plan.source(faults=row.faults, stamps=row.stamps)
    made = compile_cubin(source, row.arch, headers=HEADERS, place=tmp_path)
    assert made.code.startswith(b"\x7fELF")
    assert f"'{row.arch}'" in made.log


def test_every_option_is_in_some_row():
    plans = [row.plan() for row in (*MAIN.values(), *OTHERS.values())]
    options = {
        "precision": set(PLANES), "optimizer": OPTIMIZERS, "loss": set(LOSSES), "schedule": set(SCHEDULES),
        "momentum": {True, False}, "nesterov": {True, False}, "weight_decay": {True, False},
        "label_smoothing": {True, False}, "uint8_rows": {True, False}, "validates": {True, False},
        "weighted": {True, False},
    }  # fmt: skip
    for name, expected in options.items():
        assert {getattr(plan.settings, name) for plan in plans} == expected, name
    chains = [part for plan in plans for stage in plan.settings.stages for part in stage.chain]
    assert {part.name for part in chains if hasattr(part, "name")} == ACTIVATIONS
    assert any(hasattr(part, "p") for part in chains)
    assert {placement_of(plan) for plan in plans if plan.settings.weighted} == {"one block", "cluster", "grid", "rows"}
    assert {row.arch for row in OTHERS.values()} == {"sm_80", "sm_90a", "sm_100a"}
    assert {plan.micro_batches > 1 for plan in plans} == {True, False}
    assert {plan.input_buffers for plan in plans} == {1, 2}


def test_the_declared_optimizers_are_those_of_the_kernel():
    rules = re.findall(r"OPTIMIZER == (\w+)", (HEADERS / "weights.cuh").read_text())
    assert {name.lower() for name in rules} == OPTIMIZERS


def test_a_source_has_the_numbers_of_its_plan():
    plan = MAIN["128 sgd bf16"].plan()
    source = plan.source()
    assert f"constexpr int BLOCKS = {plan.blocks};" in source
    assert "constexpr bool FAULTS = false;" in source
    assert "constexpr bool FAULTS = true;" in plan.source(faults=True)
    assert source == MAIN["128 sgd bf16"].plan().source()  # the key of the cache
