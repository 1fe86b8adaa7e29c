"""Runs the zoo: each model in a process of its own. They compile side by side, and are timed one after another."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from onelaunch.bench.case import OURS
from onelaunch.bench.measure import summarise
from onelaunch.bench.zoo.draw import Drawn

COMPILE_SECONDS = 420.0  # for both steps of a model, while as many others compile; then it is cut off
TIMING_SECONDS = 60.0
START_SECONDS = 120.0  # until a model has been built and trained by one step, which is not compiled
CODE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
Message = dict[str, Any]


def record(drawn: Drawn, found: Message) -> dict[str, Any]:
    """What was found of one model, in the form of a benchmark case's result."""
    result: dict[str, Any] = {
        "name": f"zoo/{drawn.title}", "group": "zoo", "unit": "step", "about": f"training step of {drawn.about}", "times": {},
    }  # fmt: skip
    for outcome in ("skipped", "failed"):
        if outcome in found:
            return result | {"check": f"{outcome}: {found[outcome]}"}
    times = {name: summarise(samples) for name, samples in found["seconds"].items()}
    ours = times[OURS].median
    counts = {name: f"{one['kernels']} kernels, {one['copies']} copies" for name, one in found["operations"].items()}
    choice = found["choice"] or found["reason"] or "no pattern matches"
    return result | {
        "check": "passed",
        "times": {name: asdict(timing) for name, timing in times.items()},
        "ratio": {name: timing.median / ours for name, timing in times.items() if name != OURS},
        "absent": {}, "floor_seconds": None, "floor_share": None, "work": {},
        "peak_bytes": found["peak_bytes"],
        "notes": {"choice": choice} | {f"one step of {name}": count for name, count in counts.items()},
    }  # fmt: skip


class _Process:
    """A model that compiles in the background. Its messages arrive in `messages`; None when it has ended."""

    def __init__(self, drawn: Drawn, seed: int, environment: dict[str, str]) -> None:
        self.drawn, self.begin = drawn, time.monotonic()
        asked = json.dumps({"drawn": drawn, "seed": seed})
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "onelaunch.bench.zoo.process", asked], env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.messages: queue.Queue[Message | None] = queue.Queue()
        self._last_error = ""
        self._readers = [threading.Thread(target=one, daemon=True) for one in (self._read, self._read_errors)]
        for reader in self._readers:
            reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self.messages.put(json.loads(line))
        self.messages.put(None)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._last_error = line.strip() or self._last_error

    def next_message(self, seconds: float) -> Message:
        try:
            found = self.messages.get(timeout=max(0.0, seconds))
        except queue.Empty:
            found = {"failed": f"not done after {time.monotonic() - self.begin:.0f} s"}
        return {"failed": self._last_error or "the process ended"} if found is None else found

    def measure(self) -> Message:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except OSError:
            return {"failed": self._last_error or "the process ended"}
        return self.next_message(TIMING_SECONDS)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for reader in self._readers:  # they end with the pipes, which processes of the compiler may still hold
            reader.join(timeout=5.0)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what could not be written to a process that has ended
                pipe.close()


def run_zoo(
    models: Sequence[Drawn], seed: int, show: Callable[[dict[str, Any]], None], *, wanted: int, limit: float | None = None,
    side_by_side: int | None = None,
) -> None:  # fmt: skip
    """Measure models in this order until `wanted` of them could be trained, and show the record of each.

    limit: seconds after which no further ones are started. side_by_side: how many compile at a time.
    """
    cores = os.cpu_count() or 1
    at_once = side_by_side or max(1, cores - 2)
    environment = {CODE_THREADS: str(max(1, cores // at_once)), **os.environ}
    begin, trained, waiting = time.monotonic(), 0, list(models)
    while waiting and (missing := wanted - trained) > 0:
        if limit is not None and time.monotonic() - begin > limit:
            break
        processes: list[_Process] = []
        try:
            started = _started(waiting, min(at_once, missing), seed, environment, processes, show)
            trained += len(started)
            _measure(started, show)
        finally:
            for process in processes:
                process.end()


def _started(
    waiting: list[Drawn], count: int, seed: int, environment: dict[str, str], processes: list[_Process],
    show: Callable[[dict[str, Any]], None],
) -> list[_Process]:  # fmt: skip
    """Processes for so many of the waiting models that can be trained; those that cannot are shown with their reasons."""
    trained: list[_Process] = []
    asked: list[_Process] = []
    while len(trained) < count and (waiting or asked):
        while waiting and len(trained) + len(asked) < count:
            asked.append(_Process(waiting.pop(0), seed, environment))
            processes.append(asked[-1])
        process = asked.pop(0)
        message = process.next_message(START_SECONDS)
        if "trains" in message:
            trained.append(process)
        else:
            process.end()
            show(record(process.drawn, {"skipped": message.get("skipped") or message["failed"]}))
    return trained


def _measure(processes: list[_Process], show: Callable[[dict[str, Any]], None]) -> None:
    """All have compiled before the first is timed: compiling takes the cores that launch steps."""
    deadline = time.monotonic() + COMPILE_SECONDS
    messages = [one.next_message(deadline - time.monotonic()) for one in processes]
    for process, message in zip(processes, messages, strict=True):
        if "ready" not in message:
            process.end()
    for process, message in zip(processes, messages, strict=True):
        show(record(process.drawn, process.measure() if "ready" in message else message))
        process.end()
