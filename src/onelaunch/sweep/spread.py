"""Members over several processes or machines: chunks of them through joblib, whose backend may be Dask, Ray or Spark."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from onelaunch.errors import OnelaunchError, require_integer
from onelaunch.integers import ceil_div
from onelaunch.sweep.active import Switch

CHUNKS_PER_JOB = 4  # so that a slow chunk does not leave the other workers idle for long
MAX_CHUNK = 256  # members per call: what a sweep that is killed loses, per job
WATCH_SECONDS = 0.1  # how often a worker looks for the file that says stop
LOST = "a worker process ended, perhaps for lack of memory"
Task = TypeVar("Task")
Item = TypeVar("Item")
Result = TypeVar("Result")
Work = Callable[[Task, Sequence[Item]], list[Result]]


class LostWorkerError(OnelaunchError):
    """A worker process has been killed, or has crashed."""


def is_here(n_jobs: int | None) -> bool:
    """Whether this process does the work, without joblib."""
    if n_jobs is not None and require_integer("n_jobs", n_jobs, "a number of jobs, -1 for all, or None") == 0:
        raise OnelaunchError("n_jobs=0 would train nothing: pass a number of jobs, -1 for all, or None")
    return n_jobs is None or n_jobs == 1


def in_chunks(work: Work[Task, Item, Result], task: Task, items: Sequence[Item], n_jobs: int | None) -> list[Result]:
    """`work(task, items)`, in chunks through joblib unless n_jobs is None or 1. The results are in the order of the items."""
    if is_here(n_jobs):
        return work(task, items)
    parts = dict(as_they_come(work, task, items, n_jobs))
    return [result for number in sorted(parts) for result in parts[number]]


def as_they_come(
    work: Work[Task, Item, Result], task: Task, items: Sequence[Item], n_jobs: int | None, switch: Switch | None = None
) -> Iterator[tuple[int, list[Result]]]:
    """The number and the results of each chunk, when it is done. After a stop no chunk begins, and a broken pool is the end."""
    try:
        from joblib import Parallel, delayed, effective_n_jobs
    except ImportError as error:
        raise OnelaunchError(f"n_jobs={n_jobs} needs joblib: pip install joblib, or pass n_jobs=None") from error
    switch = switch or Switch()
    jobs = effective_n_jobs(n_jobs)
    size = min(MAX_CHUNK, max(1, ceil_div(len(items), CHUNKS_PER_JOB * jobs)))
    chunks = [items[first : first + size] for first in range(0, len(items), size)]
    call = delayed(_in_a_worker)

    def calls(first: int, last: int) -> Iterator[Any]:
        for number in range(first, min(last, len(chunks))):
            if switch.stop:
                return
            yield call(work, task, chunks[number], number, os.getpid())

    try:
        parallel = Parallel(n_jobs=n_jobs, batch_size=1, return_as="generator_unordered")
        each = len(chunks)
    except (TypeError, ValueError):  # joblib before 1.4, or a backend that returns all results at once
        parallel = Parallel(n_jobs=n_jobs, batch_size=1)
        each = jobs
    try:
        for first in range(0, len(chunks), max(1, each)):
            yield from parallel(calls(first, first + each))
    except BrokenProcessPool as error:  # Ctrl-C reaches workers too, and ends those that have not begun a chunk yet
        if not switch.stop:
            raise _lost_worker(n_jobs, error) from error
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        if "pickle" not in str(error):
            raise
        remedy = "define functions in a module, or pass n_jobs=None"
        raise OnelaunchError(
            f"n_jobs={n_jobs} cannot send its task to a worker ({_reason(error)}): {remedy}"
        ) from error


def _lost_worker(n_jobs: int | None, error: BrokenProcessPool) -> OnelaunchError:
    if "un-serialize" in str(error):
        remedy = "pass functions and data that other processes can import, or n_jobs=None"
        return OnelaunchError(f"n_jobs={n_jobs}: a worker process cannot read its task ({_reason(error)}): {remedy}")
    return LostWorkerError(f"n_jobs={n_jobs}: {LOST}: pass a smaller number")


def _reason(error: Exception) -> str:
    """The last line of the error, or of the traceback in quotes that joblib has as its cause."""
    return str(error.__cause__ or error).strip(' \n"').splitlines()[-1]


def _in_a_worker(
    work: Work[Task, Item, Result], task: Task, items: Sequence[Item], number: int, parent: int
) -> tuple[int, list[Result]]:
    """With several GPUs, each chunk has the next one as its current device."""
    if os.getpid() != parent and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which says what to do
    if torch.cuda.device_count() > 1:
        torch.cuda.set_device(number % torch.cuda.device_count())
    return number, work(task, items)


@contextmanager
def watched(stop_file: Path) -> Iterator[Switch]:
    """A switch for a worker, which says stop when the file exists. On a machine without this file system, it never does."""
    switch, ended = Switch(stop=stop_file.exists()), threading.Event()

    def watch() -> None:
        while not switch.stop and not ended.wait(WATCH_SECONDS):
            switch.stop = stop_file.exists()

    thread = threading.Thread(target=watch, name="onelaunch-stop", daemon=True)
    thread.start()
    try:
        yield switch
    finally:
        ended.set()
        thread.join()
