"""Reads safetensors files at any path, mapped into memory: a large file takes its size once, not twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from onelaunch.operating_system import path_of


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """safetensors' `safe_open` of the file. Raises OSError if it cannot be read, SafetensorError if it is damaged.

    On Linux the file is named by its descriptor. safetensors opens a path twice, and a run may replace the file in between;
    and it refuses a path that is not UTF-8.
    """
    from safetensors import safe_open

    with open(path, "rb") as file, safe_open(path_of(file, path), framework="pt") as tensors:
        yield tensors


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """All tensors of the file, and its metadata. Raises as `open_tensors` does."""
    with open_tensors(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
