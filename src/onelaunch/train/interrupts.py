"""Ctrl-C while a run or a benchmark goes on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def on_interrupt(act: Callable[[], None]) -> Iterator[None]:
    """Inside, Ctrl-C calls `act`; not in other threads than the main one, nor where it is ignored, as under nohup."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: act())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.SIG_DFL)


@contextmanager
def reraise_interrupts() -> Iterator[Callable[[], None]]:
    """Inside, Ctrl-C raises KeyboardInterrupt as ever; what is given raises it again where nobody got to see it: Python
    drops an exception that strikes inside a destructor, and the work would go on."""
    struck = False

    def check() -> None:
        if struck:
            raise KeyboardInterrupt

    def note() -> None:
        nonlocal struck
        struck = True
        check()

    with on_interrupt(note):
        yield check
