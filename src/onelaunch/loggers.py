"""Other libraries' log messages, left out for a while."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def logging_from(level: int, logger: str | logging.Logger) -> Iterator[None]:
    """Inside, the logger and those below it log messages of this level and above only."""
    found = logging.getLogger(logger) if isinstance(logger, str) else logger
    before = found.level
    found.setLevel(level)
    try:
        yield
    finally:
        found.setLevel(before)
