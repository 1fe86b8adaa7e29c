"""What a forward runs while it is traced, however it reaches it: a parent's method, a helper, a property, under a decorator.

The names in a forward's code lead to some of the functions it calls (`readable.py`). The others are seen as they are called,
through the hook of Python's profilers, or of its debuggers where a profiler has taken that one.
"""

from __future__ import annotations

import gc
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from onelaunch.fuse.proxies import from_child, is_part
from onelaunch.fuse.readable import Reading, read
from onelaunch.fuse.refused import RefusedError

# Code that knows a proxy, or that does nothing with tensors.
_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "onelaunch"}


class Running:
    """What one module's forward runs. `holders` are the functions, of all modules, that met a part of what a child returns."""

    def __init__(self, holders: set[int]) -> None:
        self.readings: dict[int, tuple[types.CodeType, Reading]] = {}  # by identity: hashing code takes microseconds
        self.holders = holders
        self.asked: str | None = None  # the function that compares such a part with None

    def see(self, frame: types.FrameType) -> None:
        """Of a function that is being called."""
        code = frame.f_code
        known = self.readings.get(id(code))
        if known is None:
            if not _is_of_the_forward(frame) or _is_importing(frame):
                return
            known = self.readings[id(code)] = code, read(code)
        reading = known[1]
        if reading.asks_for_none and any(map(_holds_part, frame.f_locals.values())):
            self.holders.add(id(code))
        for name, of_attribute in reading.arguments:
            value = frame.f_locals.get(name)
            if from_child(value) if of_attribute else _holds_part(value):
                self.asked = code.co_qualname

    def meet_part(self) -> None:
        """Whoever runs now may have the part in a variable."""
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None:
            self.holders.add(id(frame.f_code))
            frame = frame.f_back

    def check(self) -> None:
        """Refuses what would not be seen again in a graph."""
        for code, reading in self.readings.values():
            if reading.why_not_run:
                raise RefusedError(f"its forward runs {code.co_qualname}, which {reading.why_not_run}")
            if reading.asks_for_none and id(code) in self.holders:
                self.asked = code.co_qualname
        if self.asked:
            raise RefusedError(f"{self.asked} compares a part of what a child returns with `is`")


class CallsSeen:
    """Shows each call of a Python function in this thread, while it is on."""

    def __init__(self, see: Callable[[types.FrameType], None]) -> None:
        self.see, self.is_on = see, False
        if sys.getprofile() is None:
            self.install: Callable[[Any], None] = sys.setprofile
        elif sys.gettrace() is None:  # in Python 3.12 five times slower
            self.install = sys.settrace
        else:
            raise RefusedError("a debugger and a profiler watch it: what it runs cannot be seen")

    def turn(self, on: bool) -> bool:
        """Turns it on or off, and says what it was before."""
        before, self.is_on = self.is_on, on
        if on != before:
            self.install(self._at_event if on else None)
        return before

    def _at_event(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self.see(frame)


@contextmanager
def no_collection() -> Iterator[None]:
    """No finaliser or callback of the garbage collector runs in the block, where it would seem to be of the forward."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _is_of_the_forward(frame: types.FrameType) -> bool:
    """Not the code of a library, but for a context that decorates a function; nor the body of a class or a file."""
    name = _library(frame)
    if name == "contextlib" and frame.f_back is not None:
        return _library(frame.f_back) not in _LIBRARIES
    return name not in _LIBRARIES and bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)


def _library(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _is_importing(frame: types.FrameType | None) -> bool:
    """What an import inside the forward runs, the first time, is no part of it."""
    while frame is not None and _library(frame) not in ("importlib", "onelaunch"):
        frame = frame.f_back
    return frame is not None and _library(frame) == "importlib"


def _holds_part(value: Any) -> bool:
    if type(value) in (list, tuple):
        return any(map(is_part, value))
    if type(value) is dict:
        return any(map(is_part, value.values()))
    return is_part(value)
