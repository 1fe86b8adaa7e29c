"""Settings and plans for the tests, without a device and without data."""

from __future__ import annotations

import itertools
from typing import Any

from onelaunch.device import H200, Chip
from onelaunch.engines.resident.plan.placement import choose_plan
from onelaunch.engines.resident.plan.plan import Plan
from onelaunch.engines.resident.plan.rows_plan import RowsPlan
from onelaunch.engines.resident.plan.settings import WARPS, Settings
from onelaunch.engines.resident.plan.stages import Stage
from onelaunch.engines.resident.plan.units_plan import UnitsPlan
from onelaunch.run.network import Activation, Dropout, Linear

LAYERS = [784, 128, 128, 128, 10]


def stages(
    widths: list[int], activation: str | tuple[str, ...] | None = "relu", *, dropout: float = 0.0, bias: bool = True
) -> tuple[Stage, ...]:
    """The stages of an MLP; several activations are used in turn."""
    names = itertools.cycle(activation if isinstance(activation, tuple) else (activation,))
    found = []
    for index, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        chain: list[Activation | Dropout] = []
        if index < len(widths) - 2:
            name = next(names)
            chain += [Activation(name, 0.01)] if name else []
            chain += [Dropout(dropout, index)] if dropout else []
        found.append(Stage(Linear(str(index), inputs, outputs, bias), tuple(chain)))
    return tuple(found)


def settings_of(widths: list[int], **changes: Any) -> Settings:
    """SGD on cross-entropy at batch 32 in bf16. `changes`: fields of Settings, and `activation`, `dropout`, `bias`."""
    chain = {name: changes.pop(name) for name in ("activation", "dropout", "bias") if name in changes}
    options = {
        "batch": 32, "rows": 1000, "precision": "bf16", "optimizer": "sgd", "momentum": False, "nesterov": False,
        "weight_decay": False, "schedule": "constant", "loss": "cross_entropy", "label_smoothing": False, "uint8_rows": False,
        "validates": False,
    }  # fmt: skip
    return Settings(stages=stages(widths, **chain), **{**options, **changes})


def plan_of(widths: list[int], *, chip: Chip = H200, **changes: Any) -> Plan:
    """The chosen plan; `blocks`, `cluster`, `by_rows` and `reserved_registers` as for `choose_plan`."""
    forced = {
        name: changes.pop(name) for name in ("blocks", "cluster", "by_rows", "reserved_registers") if name in changes
    }
    return choose_plan(settings_of(widths, **changes), chip, **forced)


def forced_plan(
    widths: list[int], blocks: int, cluster: bool, rows: int, *, chip: Chip = H200, **changes: Any
) -> UnitsPlan:
    """A plan by units that `choose_plan` might not choose, such as six blocks for a dozen units."""
    return UnitsPlan(settings_of(widths, **changes), chip, blocks, cluster, rows)


def rows_plan(
    widths: list[int], blocks: int, rows: int, *, chip: Chip = H200, warps: int = WARPS, **changes: Any
) -> RowsPlan:
    """A plan by rows: `blocks` divide the rows of a batch, `rows` each per pass."""
    return RowsPlan(settings_of(widths, **changes), chip, blocks, rows, warps)
