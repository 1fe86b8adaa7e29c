"""The colour and marker of each name, which are the same in every figure of a page."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import NamedTuple

from onelaunch.colours import OWN_COLOUR, SERIES


class Look(NamedTuple):
    colour: int
    turn: int = 0  # above 0 the line has dashes: the figure has more names than there are colours

    @property
    def form(self) -> int:
        """A number for its marker."""
        return self.colour + 3 * self.turn


class Palette:
    """A name keeps the look that it gets first. No two names of one group look alike."""

    def __init__(self, *groups: Iterable[str]) -> None:
        self._looks: dict[str, Look] = {}
        for group in groups:
            self.add(group)

    def add(self, group: Iterable[str]) -> None:
        """Give a look to each name that has none: its own colour, or the first one that nobody in the group has or owns."""
        names = list(dict.fromkeys(group))
        taken = {self._looks[name] for name in names if name in self._looks}
        owned = {OWN_COLOUR[name] for name in names if name in OWN_COLOUR}
        for name in names:
            if name in self._looks:
                continue
            look = Look(OWN_COLOUR.get(name, -1))
            if look.colour < 0 or look in taken:
                free = (Look(n % SERIES, n // SERIES) for n in count() if n >= SERIES or n not in owned)
                look = next(look for look in free if look not in taken)
            self._looks[name] = look
            taken.add(look)

    def look(self, name: str) -> Look:
        self.add([name])
        return self._looks[name]
