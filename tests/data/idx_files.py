"""Writes small data sets in the format in which MNIST is published."""

from __future__ import annotations

import gzip
import hashlib
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np

from onelaunch.data import mnist


def idx_bytes(values: np.ndarray, kind: int = 8) -> bytes:
    return struct.pack(f">HBB{values.ndim}I", 0, kind, values.ndim, *values.shape) + values.astype(np.uint8).tobytes()


def small_set(train: int = 30, test: int = 20) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    return {
        file: rng.integers(0, 256, (rows, 28, 28), np.uint8) if "images" in file else rng.integers(0, 10, rows)
        for file, rows in zip(mnist.FILES, (train, train, test, test), strict=True)
    }


def write_set(folder: Path, *, packed: bool = True, files: dict[str, np.ndarray] | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file, values in (files or small_set()).items():
        content = idx_bytes(values)
        (folder / (file + ".gz" * packed)).write_bytes(gzip.compress(content, mtime=0) if packed else content)


def published(folder: Path, mirrors: tuple[str, ...], like: mnist.ImageSet = mnist.MNIST) -> mnist.ImageSet:
    """An image set with the checksums of the files in this folder, published on these mirrors."""
    sums = (hashlib.md5((folder / f"{file}.gz").read_bytes()).hexdigest() for file in mnist.FILES)
    return replace(like, mirrors=mirrors, md5=tuple(sums))
