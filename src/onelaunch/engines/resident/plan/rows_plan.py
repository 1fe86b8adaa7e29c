"""The plan by rows: its layout, with the source and the description that follow from it."""

from __future__ import annotations

from onelaunch.engines.resident.plan.plan import Phases
from onelaunch.engines.resident.plan.rows_layout import RowsLayout
from onelaunch.engines.resident.plan.rows_text import rows_text
from onelaunch.engines.resident.source.rows_source import rows_phases, rows_source


class RowsPlan(RowsLayout):
    def phases(self) -> Phases:
        return rows_phases(self)

    def source(self, *, faults: bool = False, stamps: bool = False) -> str:
        return rows_source(self, faults=faults, stamps=stamps)

    def describe(self) -> str:
        return rows_text(self)
