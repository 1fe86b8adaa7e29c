"""Threads that execute the partitions of a run.

The calling thread executes partition 0. The others block in Python between native calls and cost nothing there. Inside a
call the threads meet at barriers (code/driver.py) of one counter per partition: a thread increments its own and waits.
Counters only grow, so a barrier needs no reset. A waiting thread spins a bounded number of times, then yields the processor
after every poll. The wait ends when the other partition arrives, or when the call is abandoned because it never will.

`Team` also decides, call by call, whether the other threads take part. The bits are the same either way, so it compares the
time per step with and without them, and probes again when the machine seems to have changed.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Sequence

SPINS_BEFORE_YIELD = 1000  # polls (tens of nanoseconds each) of a waiting thread
SLOWDOWN = 1.3  # a step slower than this times the best since the last probe starts another probe
MIN_PROBE_INTERVAL = 8  # calls between two probes; doubled each time the result is the same
# One thread is faster on a busy machine, which may soon be free again: probe more often then.
MAX_PROBE_INTERVAL = {True: 512, False: 16}  # by whether threads are in use
PROBE_CALLS = 2  # with threads, and as many without


class Team:
    """The threads of one session. Not shared between sessions; `close` ends them."""

    def __init__(self, partitions: int, abandon: Callable[[], None]) -> None:
        """`abandon` lets the native code of the other partitions return without waiting for the calling thread's."""
        self.partitions = partitions
        self._abandon = abandon
        self.uses_threads = partitions > 1  # in the next call
        self._choice = self.uses_threads
        self._interval, self._calls = MIN_PROBE_INTERVAL, 0
        self._times: dict[bool, list[float]] = {True: [], False: []}  # seconds per step in the current probe
        self.probing = partitions > 1
        self._best = math.inf
        self._tasks: list[queue.SimpleQueue[Callable[[], None] | None]] = []
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def call(self, alone: Callable[[], None], together: Sequence[Callable[[], None]]) -> None:
        """Run one native call, with or without the other threads. Returns when every partition is done."""
        if not self.uses_threads:
            alone()
            return
        self._start()
        try:
            for tasks, work in zip(self._tasks, together[1:], strict=True):
                tasks.put(work)
            together[0]()
            for _ in self._tasks:
                self._done.get()
        except BaseException:  # a signal arrived: no other thread executes this partition, the others must not wait
            self._abandon()
            self.close()
            raise

    def note(self, seconds_per_step: float) -> None:
        """Record the time per step of the last call; decides whether the next call uses the threads."""
        if self.partitions == 1:
            return
        if self.probing:
            self._probe(seconds_per_step)
            return
        self._calls += 1
        self._best = min(self._best, seconds_per_step)
        slow = seconds_per_step > SLOWDOWN * self._best
        if self._calls >= self._interval or (slow and self._calls >= MIN_PROBE_INTERVAL):
            self.probing = True
            self._times = {True: [], False: []}

    def _probe(self, seconds_per_step: float) -> None:
        """Measure a few calls with and without threads, then take the faster."""
        times = self._times[self.uses_threads]
        times.append(seconds_per_step)
        if len(times) < PROBE_CALLS:
            return
        if not self._times[not self.uses_threads]:
            self.uses_threads = not self.uses_threads
            return
        faster = min(self._times[True]) <= min(self._times[False])
        longer = min(2 * self._interval, MAX_PROBE_INTERVAL[faster])
        self._interval = longer if faster == self._choice else MIN_PROBE_INTERVAL
        self.uses_threads = self._choice = faster
        self._best = min(self._times[faster])
        self.probing, self._calls = False, 0

    def _start(self) -> None:
        if self._threads:
            return
        for number in range(1, self.partitions):
            tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
            thread = threading.Thread(target=self._serve, args=(tasks,), name=f"onelaunch-{number}", daemon=True)
            thread.start()  # before it is listed: a signal may arrive here, and only a started thread can be joined
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
