"""PyTorch's global generators, which all threads of a process share: whoever seeds them for a while holds the lock."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

GENERATORS = threading.RLock()


@contextmanager
def seeded(seed: int, devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Seed the generators of the CPU and of `devices` for the block, and restore their state at its end."""
    with GENERATORS, torch.random.fork_rng(list(devices)):
        torch.manual_seed(seed)
        yield


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the state of PyTorch's generators at the end of the block, which may seed them."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    kept = torch.random.fork_rng(devices)
    kept.__enter__()
    try:
        yield
    finally:
        with GENERATORS:
            kept.__exit__(None, None, None)
