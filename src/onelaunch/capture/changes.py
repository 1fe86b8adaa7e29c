"""How often a step is recorded anew before it is not recorded any more."""

from __future__ import annotations

MAX_RECORDINGS = 3  # after changes of what they depend on, beside one more for every so many replays:
MANY_REPLAYS = 100  # recording anew costs little beside them


class Changes:
    """Counts changes of what recordings depend on. Recording is not for what changes always, as by a schedule of every step."""

    def __init__(self) -> None:
        self.count = 0

    def are_too_many(self, replays: int) -> bool:
        """Count one more, after so many replays of all recordings so far."""
        self.count += 1
        return self.count >= MAX_RECORDINGS + replays // MANY_REPLAYS
