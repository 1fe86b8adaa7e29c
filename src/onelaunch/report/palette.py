"""The colour, dashes and marker of each name, which are the same in every figure of a page."""

from __future__ import annotations

from typing import NamedTuple

from onelaunch.report.theme import SERIES


class Look(NamedTuple):
    colour: int
    form: int  # index of the dashes and of the marker


class Palette:
    """Names get their looks in the order in which they are first drawn. When the colours are used up, the forms are shifted by
    one, so that names of the same colour differ in dashes and marker."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def look(self, name: str) -> Look:
        number = self._numbers.setdefault(name, len(self._numbers))
        return Look(number % SERIES, (number + number // SERIES) % SERIES)
