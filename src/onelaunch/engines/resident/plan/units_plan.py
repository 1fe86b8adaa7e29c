"""The plan by units: its layout, with the source and the description that follow from it."""

from __future__ import annotations

from onelaunch.engines.resident.plan.plan import Phases
from onelaunch.engines.resident.plan.units_layout import UnitsLayout
from onelaunch.engines.resident.plan.units_text import units_text
from onelaunch.engines.resident.source.units_source import units_phases, units_source


class UnitsPlan(UnitsLayout):
    def phases(self) -> Phases:
        return units_phases(self)

    def source(self, *, faults: bool = False, stamps: bool = False) -> str:
        return units_source(self, faults=faults, stamps=stamps)

    def describe(self) -> str:
        return units_text(self)
