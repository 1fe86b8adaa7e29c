"""Members over several processes or machines: chunks of them through joblib, whose backend may be Dask, Ray or Spark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from onelaunch.errors import OnelaunchError, require_integer
from onelaunch.integers import ceil_div

CHUNKS_PER_JOB = 4  # so that a slow chunk does not leave the other workers idle for long
Task = TypeVar("Task")
Item = TypeVar("Item")
Result = TypeVar("Result")


def in_chunks(
    work: Callable[[Task, Sequence[Item]], list[Result]], task: Task, items: Sequence[Item], n_jobs: int | None
) -> list[Result]:
    """`work(task, items)`, in chunks through joblib unless n_jobs is None or 1. The results are in the order of the items."""
    if n_jobs is not None and require_integer("n_jobs", n_jobs, "a number of jobs, -1 for all, or None") == 0:
        raise OnelaunchError("n_jobs=0 would train nothing: pass a number of jobs, -1 for all, or None")
    if n_jobs is None or n_jobs == 1:
        return work(task, items)
    try:
        from joblib import Parallel, delayed, effective_n_jobs
    except ImportError as error:
        raise OnelaunchError(f"n_jobs={n_jobs} needs joblib: pip install joblib, or pass n_jobs=None") from error
    jobs = effective_n_jobs(n_jobs)
    size = max(1, ceil_div(len(items), CHUNKS_PER_JOB * jobs))
    chunks = [items[first : first + size] for first in range(0, len(items), size)]
    calls = (delayed(_on_a_device)(work, task, chunk, number) for number, chunk in enumerate(chunks))
    return [result for part in Parallel(n_jobs=n_jobs)(calls) for result in part]


def _on_a_device(
    work: Callable[[Task, Sequence[Item]], list[Result]], task: Task, items: Sequence[Item], number: int
) -> list[Result]:
    """With several GPUs, each chunk has the next one as its current device."""
    if torch.cuda.device_count() > 1:
        torch.cuda.set_device(number % torch.cuda.device_count())
    return work(task, items)
