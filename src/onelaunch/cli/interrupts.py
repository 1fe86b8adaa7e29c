"""Ctrl-C while the command line starts: one line and exit code 130."""

from __future__ import annotations

import os
import signal
from types import FrameType


def exit_on_interrupt() -> None:
    """From here on Ctrl-C ends the process, unless it is ignored, as under nohup.

    During start-up there is nothing to clean up, and an exception would not do: raised inside the import of an extension
    module, it ends in a traceback, turns into an ImportError, or is lost.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)


def raise_on_interrupt() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt again. A command calls this once its imports are done."""
    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _stop(number: int, frame: FrameType | None) -> None:
    os.write(2, b"stopped  interrupted\n")
    os._exit(130)
