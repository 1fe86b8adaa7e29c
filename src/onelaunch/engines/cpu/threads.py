"""Threads that hold the shares of a run, and the barrier between its phases.

The calling thread takes share 0; the others wait in Python between native calls and cost nothing there. Inside a call they
meet at barriers made of one counter a share: a share raises its own and waits for the others'. Counters only grow, so a
barrier needs no reset. Waiting spins a bounded number of times, then gives the processor away with each further look; it
ends when the share waited for comes, or when the call is abandoned because its thread never will.

`Team` also decides, call by call, whether the other threads help: the bits are the same either way, so it compares the time
a step takes with and without them, and looks again when the machine seems to have changed.
"""

from __future__ import annotations

import ctypes
import math
import queue
import sys
import threading
from collections.abc import Callable, Sequence

from onelaunch.engines.cpu.code.emit import Function, Module
from onelaunch.engines.cpu.code.instructions import Value
from onelaunch.engines.cpu.plan.plan import CONTROL, Plan

PATIENCE = 1000  # looks (tens of nanoseconds each) before a waiting thread yields
SLOWER = 1.3  # times the best step since the last look, at which the team looks again whether threads help
FIRST_LOOK = 8  # calls between two looks; doubled each time nothing has changed
LAST_LOOK = {True: 512, False: 16}  # but not beyond this: alone is for a busy machine, which will be free again
SAMPLES = 2  # calls in each way that a look takes


def barrier(module: Module, plan: Plan, share: int) -> str:
    """`barrier_<t>(arena)`: returns when every share has called its own as often. Release and acquire: what was written
    before one share's barrier is seen by all after theirs."""

    def make(f: Function) -> None:
        def flag(number: int) -> Value:
            return f.at(f["arena"], plan.offset(f"flag.{number}"), "i8", f"flag_{number}")

        control = f.at(f["arena"], plan.offset("control"), "i8", "control")
        mine = f.i64(f.add(f.load("i64", flag(share)), 1, "mine"))
        f.emit(f"store atomic i64 {mine.text}, ptr {flag(share).text} release, align 8")
        patience = f.load("i64", control, CONTROL.index("patience"), element="i64", hint="patience")
        give_way = f.load("ptr", control, CONTROL.index("yield_thread"), element="i64", hint="give_way")
        abandoned = f.at(control, 8 * CONTROL.index("abandoned"), "i8", "abandoned")
        for other in range(plan.shares):
            if other == share:
                continue
            theirs = flag(other)

            def behind(theirs: Value = theirs) -> Value:
                seen = f.op("i64", f"load atomic i64, ptr {theirs.text} acquire, align 8", "theirs")
                late = f.compare("slt", seen, mine, "behind")
                left = f.op("i64", f"load atomic i64, ptr {abandoned.text} monotonic, align 8", "left")
                return f.op("i1", f"and i1 {late.text}, {f.compare('eq', left, f.i64(0)).text}", "wait")

            def wait(times: Value) -> None:
                _pause(f)
                f.when(f.compare("sgt", times, patience), lambda: f.emit(f"call void {give_way.text}()"))

            f.wait_while(behind, wait)

    return module.function(f"barrier_{share}", "ptr %arena", make)


def _pause(f: Function) -> None:
    """Tell the processor that this is a spin loop."""
    architecture = f.module.target.triple.split("-")[0]
    if architecture == "x86_64":
        f.intrinsic("void", "x86.sse2.pause")
    elif architecture.startswith(("aarch64", "arm64")):
        f.intrinsic("void", "aarch64.hint", Value("i32", "1"))


def yield_address() -> int:
    """The address of the operating system's "let others run"."""
    if sys.platform == "win32":
        function = ctypes.WinDLL("kernel32").SwitchToThread
    else:
        function = ctypes.CDLL(None).sched_yield
    return ctypes.cast(function, ctypes.c_void_p).value or 0


class Team:
    """The threads of one session. Not shared between sessions; `close` ends them."""

    def __init__(self, shares: int, abandon: Callable[[], None]) -> None:
        """`abandon` lets the native code of the other shares run to its end without the calling thread's."""
        self.shares = shares
        self._abandon = abandon
        self.helps = shares > 1  # whether the other threads take part in the next call
        self._choice = self.helps
        self._interval, self._calls = FIRST_LOOK, 0
        self._times: dict[bool, list[float]] = {True: [], False: []}  # of the look under way
        self.looking = shares > 1  # trying both ways
        self._best = math.inf
        self._tasks: list[queue.SimpleQueue[Callable[[], None] | None]] = []
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def call(self, alone: Callable[[], None], together: Sequence[Callable[[], None]]) -> None:
        """Run one native call the way that is faster now. Returns when every share is done."""
        if not self.helps:
            alone()
            return
        self._start()
        try:
            for tasks, work in zip(self._tasks, together[1:], strict=True):
                tasks.put(work)
            together[0]()
            for _ in self._tasks:
                self._done.get()
        except BaseException:  # a signal between handing out the work and the end of it: nobody else does this share's
            self._abandon()
            self.close()
            raise

    def note(self, seconds_per_step: float) -> None:
        """What a step of the last call took; decides how the next call runs."""
        if self.shares == 1:
            return
        if self.looking:
            self._look(seconds_per_step)
            return
        self._calls += 1
        self._best = min(self._best, seconds_per_step)
        slow = seconds_per_step > SLOWER * self._best
        if self._calls >= self._interval or (slow and self._calls >= FIRST_LOOK):
            self.looking = True
            self._times = {True: [], False: []}

    def _look(self, seconds_per_step: float) -> None:
        """Try both ways for a few calls each, then take the faster."""
        times = self._times[self.helps]
        times.append(seconds_per_step)
        if len(times) < SAMPLES:
            return
        if not self._times[not self.helps]:
            self.helps = not self.helps
            return
        faster = min(self._times[True]) <= min(self._times[False])
        self._interval = min(2 * self._interval, LAST_LOOK[faster]) if faster == self._choice else FIRST_LOOK
        self.helps = self._choice = faster
        self._best = min(self._times[faster])
        self.looking, self._calls = False, 0

    def _start(self) -> None:
        if self._threads:
            return
        for number in range(1, self.shares):
            tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
            thread = threading.Thread(target=self._serve, args=(tasks,), name=f"onelaunch-{number}", daemon=True)
            thread.start()  # first: a signal may strike anywhere, and only what has started can be joined
            self._tasks.append(tasks)
            self._threads.append(thread)

    def _serve(self, tasks: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while (work := tasks.get()) is not None:
            try:
                work()
            finally:
                self._done.put(None)

    def close(self) -> None:
        for tasks in self._tasks:
            tasks.put(None)
        for thread in self._threads:
            thread.join()
        self._tasks, self._threads = [], []
