"""A plan as CUDA C++: its numbers as constants, its phases as calls. The library they call is in `cuda/`."""

from __future__ import annotations

from pathlib import Path

from onelaunch.engines.resident.plan.rows_plan import RowsPlan
from onelaunch.engines.resident.plan.units_plan import Plan
from onelaunch.engines.resident.source.rows_source import rows_phases, rows_source
from onelaunch.engines.resident.source.units_source import units_phases, units_source

HEADERS = Path(__file__).parents[1] / "cuda"


def source_of(plan: Plan, *, faults: bool = False, stamps: bool = False) -> str:
    """`faults` compiles in the injected fault; `stamps` the clocks that tell what each phase costs."""
    if isinstance(plan, RowsPlan):
        return rows_source(plan, faults=faults, stamps=stamps)
    return units_source(plan, faults=faults, stamps=stamps)


def phase_names(plan: Plan) -> list[str]:
    """The phases of a training pass in their order, as the stamps count them; the first is what lies between passes."""
    phases = rows_phases(plan) if isinstance(plan, RowsPlan) else units_phases(plan)
    return [name for name, _ in phases]
