"""Handling of Ctrl-C during a run or a benchmark."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def on_interrupt(act: Callable[[], None]) -> Iterator[None]:
    """Inside the block, Ctrl-C calls `act`. No effect in other threads than the main one, or if Ctrl-C is ignored (nohup)."""
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
    """Yield a function that raises KeyboardInterrupt if Ctrl-C was pressed inside the block.

    Ctrl-C raises KeyboardInterrupt at once too, as usual. But Python drops an exception that is raised inside a destructor, and
    without the second chance the work would continue.
    """
    interrupted = False

    def check() -> None:
        if interrupted:
            raise KeyboardInterrupt

    def interrupt() -> None:
        nonlocal interrupted
        interrupted = True
        check()

    with on_interrupt(interrupt):
        yield check
