"""Ctrl-C that is not lost: Python drops an exception that strikes inside a destructor, and the work would go on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def remembered() -> Iterator[Callable[[], None]]:
    """Inside, Ctrl-C raises KeyboardInterrupt as ever; what is given raises it again where nobody got to see it."""
    struck: list[int] = []
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield lambda: None
        return

    def note(number: int, frame: FrameType | None) -> None:
        struck.append(number)
        raise KeyboardInterrupt

    def check() -> None:
        if struck:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.SIG_DFL)
