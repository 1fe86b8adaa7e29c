"""Processes that start at once: forked from a server that has imported torch and onelaunch, which takes seconds of CPU time."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable, Mapping
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

from tests.conftest import LONGEST_SECONDS

# PyTorch imports its compiler at the first optimizer step.
MODULES = [
    "torch", "torch._dynamo", "safetensors.torch", "sklearn.datasets", "matplotlib.figure",
    "matplotlib.backends.backend_agg", "onelaunch.train.fit", "onelaunch.cli.train",
]  # fmt: skip


def start(
    function: Callable[..., None], *arguments: Any, output: Path, environment: Mapping[str, str] | None = None,
    gpu: bool = False,
) -> BaseProcess:  # fmt: skip
    """Run `function(*arguments)` in a new process, which prints into the file `output`. All must be picklable.

    With `gpu` it sees the first GPU and is a fresh interpreter, since CUDA does not survive a fork; else it sees no GPU.
    """
    context: BaseContext = multiprocessing.get_context("spawn" if gpu else "forkserver")
    context.set_forkserver_preload(MODULES)
    process: BaseProcess = context.Process(  # type: ignore[attr-defined]
        target=_run, args=(function, arguments, output, dict(environment or {})), daemon=True
    )
    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": "0" if gpu else ""}):
        process.start()
    return process


def onelaunch(*arguments: str) -> None:
    """`python -m onelaunch arguments…`, as a function for `start`."""
    sys.argv = ["onelaunch", *arguments]
    runpy.run_module("onelaunch", run_name="__main__", alter_sys=True)


def _run(function: Callable[..., None], arguments: tuple[Any, ...], output: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    import torch

    torch.set_num_threads(1)
    function(*arguments)


def exit_code_and_output(process: BaseProcess, output: Path) -> tuple[int | None, str]:
    """Wait for the end of `process`, and kill it shortly before its test would time out."""
    process.join(LONGEST_SECONDS - 30)
    if process.exitcode is None:
        process.kill()
        process.join()
    return process.exitcode, output.read_text()
