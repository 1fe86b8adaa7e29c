"""A DataLoader as the argument x of `fit`, or as `validation`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from onelaunch.engines.eager.loader import Batch, loader_batches
from onelaunch.errors import OnelaunchError
from onelaunch.rng import check_seed
from onelaunch.run.options import Options
from onelaunch.wrong_inputs import require_no_class


def open_loader(
    loader: DataLoader[Any], y: Any, options: dict[str, Any]
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, dict[str, Any], int]:
    """(inputs and targets of the first batch, the options with the loader's batch size, rows per epoch)."""
    if y is not None:
        raise OnelaunchError("x is a DataLoader, which has the targets too: leave y out")
    require_no_class(options.get("loss"))
    batches, rows = _lengths("x", loader)
    inputs, targets = next(_batches("x", loader, check_seed(options.get("seed", 0))))
    size = loader.batch_size or len(targets)
    passed = options.get("batch_size", size)
    if passed not in (size, Options.batch_size):
        raise OnelaunchError(
            f"batch_size={passed} does not go with a DataLoader, whose batches have {size} rows: leave it out"
        )
    options = {**options, "batch_size": size, "drop_last": loader.drop_last}
    whole, rest = divmod(rows, size)
    if batches != whole + (rest > 0 and not loader.drop_last):
        raise OnelaunchError(
            f"x is a DataLoader of {batches} batches for {rows} rows: batches must have {size} rows each"
        )
    return inputs, targets, options, rows


def all_rows(loader: DataLoader[Any], seed: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """The inputs and targets of all batches of the DataLoader `validation`, as one batch."""
    batches = list(_batches("validation", loader, seed))
    inputs = zip(*(batch[0] for batch in batches), strict=True)
    return tuple(torch.cat(parts) for parts in inputs), torch.cat([batch[1] for batch in batches])


def _lengths(argument: str, loader: DataLoader[Any]) -> tuple[int, int]:
    """The batches and rows of an epoch."""
    try:
        return len(loader), len(loader.sampler)  # type: ignore[arg-type]
    except TypeError:
        unknown = f"{argument} is a DataLoader of unknown length"
        raise OnelaunchError(f"{unknown}: give its dataset or sampler a __len__") from None


def _batches(argument: str, loader: DataLoader[Any], seed: int) -> Iterator[Batch]:
    """The batches of the first epoch. Raises OnelaunchError if there is none, or if what comes is a row, not a batch."""
    count, rows = _lengths(argument, loader)
    if not count:
        why = f"has no batch: drop_last=True drops its {rows} rows, fewer than batch_size={loader.batch_size}"
        why = f"{why}; pass drop_last=False" if rows and loader.drop_last else "has no rows: pass a dataset with some"
        raise OnelaunchError(f"{argument} is a DataLoader that {why}")
    for inputs, targets in loader_batches(loader, seed, 0):
        if not targets.dim():
            remedy = "pass a batch_size to it, as in DataLoader(dataset, batch_size=32)"
            raise OnelaunchError(f"{argument} is a DataLoader of single rows, not of batches: {remedy}")
        yield inputs, targets
