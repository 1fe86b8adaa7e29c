"""Batches from a user's DataLoader, in an order that the run's seed decides.

Before each epoch the loader's random numbers are seeded by (seed, epoch), so that a resumed run sees the same batches. They
are kept apart from those of the model: fetching a batch does not disturb its dropout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from onelaunch.errors import OnelaunchError
from onelaunch.rng import permutation_keys

Batch = tuple[tuple[torch.Tensor, ...], torch.Tensor]


def loader_batches(loader: DataLoader[Any], seed: int, epoch: int, skip: int = 0) -> Iterator[Batch]:
    """The batches (inputs, targets) of an epoch, without the first `skip`; raises OnelaunchError for anything else."""
    low, high, *_ = permutation_keys(seed, epoch)
    number = (high << 31) ^ low
    outside = torch.get_rng_state()
    torch.manual_seed(number)
    if loader.generator is not None:
        loader.generator.manual_seed(number)
    iterator = iter(loader)
    for position in range(len(loader)):
        try:
            batch = next(iterator)
        except StopIteration:
            raise OnelaunchError(f"x is a DataLoader of {len(loader)} batches that ends after {position}") from None
        finally:
            inside = torch.get_rng_state()
            torch.set_rng_state(outside)
        if position >= skip:
            yield _parts(batch)
        outside = torch.get_rng_state()
        torch.set_rng_state(inside)
    torch.set_rng_state(outside)


def _parts(batch: Any) -> Batch:
    if not isinstance(batch, tuple | list) or len(batch) != 2 or not isinstance(batch[1], torch.Tensor):
        raise OnelaunchError(
            f"x is a DataLoader of {type(batch).__name__}: its batches must be pairs (x, y) of tensors"
        )
    x, y = batch
    inputs = tuple(x) if isinstance(x, tuple | list) else (x,)
    if not all(isinstance(part, torch.Tensor) for part in inputs):
        raise OnelaunchError(
            "x is a DataLoader whose inputs are not tensors: its batches must be pairs (x, y) of tensors"
        )
    return inputs, y
