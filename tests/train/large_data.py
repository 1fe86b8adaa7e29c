"""For processes of their own: training on large rows, with the memory that it takes or may take."""

from __future__ import annotations

import hashlib
import json
import resource
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

import onelaunch as ol

INPUTS = 50


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, 16), nn.ReLU(), nn.Linear(16, 2))


def train(x: np.ndarray, **options) -> str:
    """A digest of the losses and weights after one epoch."""
    model = network()
    y = np.resize(np.array([0, 1, 1], np.int64), len(x))
    history = ol.fit(model, x, y, epochs=1, batch_size=4096, progress=False, **options)
    digest = hashlib.sha256(np.array(history.losses).tobytes())
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def status(name: str) -> int:
    """A number of /proc/self/status in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def measure(rows: int, options: dict) -> None:
    """Print the digest, the bytes of x, and by how much the process grows at most while `fit` runs."""
    x = np.random.default_rng(0).standard_normal((rows, INPUTS), dtype=np.float32)
    train(x[:20_000].copy(), **options)  # the code is compiled and every library loaded
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = status("VmRSS")
    digest = train(x, **options)
    print(json.dumps([digest, x.nbytes, status("VmHWM") - before]))


def limited(path: str, allowed: int, options: dict) -> None:
    """Print the digest of a run on a memory-mapped file, in which the process may allocate `allowed` bytes at most."""
    train(np.zeros((20_000, INPUTS), np.float32), **options)
    limit = status("VmData") + allowed
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    print(json.dumps([train(np.load(path, mmap_mode="r"), **options)]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    kind, what, *rest = sys.argv[1:]
    if kind == "measure":
        measure(int(what), json.loads(rest[0]))
    else:
        limited(what, int(rest[0]), json.loads(rest[1]))
