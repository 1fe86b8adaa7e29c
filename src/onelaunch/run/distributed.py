"""Several processes that train one model together: who is who, and the few things they must agree on.

`torchrun --nproc-per-node N -m onelaunch train …` starts N processes; `joined` makes them one group (NCCL on CUDA, gloo on a
CPU). A program that has called `torch.distributed.init_process_group` itself gets the same from `ol.fit`. Each batch is cut
into consecutive parts, one a rank, so that dropout masks and row order are those of one process; gradients, losses and the
wish to stop are shared. Rank 0 writes.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed

from onelaunch.errors import OnelaunchError

TIMEOUT = timedelta(minutes=5)  # for a rank that neither answers nor dies


@dataclass(frozen=True)
class World:
    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this process is the one that writes and speaks."""
        return self.rank == 0

    def part(self, rows: int) -> slice:
        """This rank's share of so many rows."""
        return slice(self.rank * rows // self.size, (self.rank + 1) * rows // self.size)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Over all ranks, in place."""
        if self.size > 1:
            with as_lost_rank():
                distributed.all_reduce(tensor)
        return tensor

    def any(self, wish: bool, device: torch.device) -> bool:
        """Whether some rank wants it. All ranks must ask."""
        if self.size == 1:
            return wish
        return bool(self.sum(torch.tensor(int(wish), device=device)))


def world() -> World:
    """The processes that train together here; one, unless a group was joined."""
    if distributed.is_available() and distributed.is_initialized():
        return World(distributed.get_rank(), distributed.get_world_size())
    return World()


@contextmanager
def process_group() -> Iterator[World]:
    """The group that torchrun started this process in, left again at the end; alone where it was started otherwise."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or world().size > 1:
        yield world()
        return
    cuda = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if cuda:
        if local >= torch.cuda.device_count():
            raise OnelaunchError(
                f"torchrun started process {local} on a machine with {torch.cuda.device_count()} GPUs: "
                "pass a smaller --nproc-per-node"
            )
        torch.cuda.set_device(local)
    with as_lost_rank():
        distributed.init_process_group("nccl" if cuda else "gloo", timeout=TIMEOUT)
    try:
        yield world()
    finally:
        gc.collect()  # DDP first: who lets go of the group last waits for its threads, and DDP would hold Python's lock then
        distributed.destroy_process_group()


class LostRankError(OnelaunchError):
    """Another process of the job is gone or does not answer."""


@contextmanager
def as_lost_rank() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise lost_rank_error(error) from error


def lost_rank_error(error: Exception) -> LostRankError:
    said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    reason = re.sub(r"^\[[^]]*\]\s*", "", said).split(". This is typically", 1)[0]  # without gloo's file and guesses
    return LostRankError(f"another process of this job died or does not answer ({reason}): see its output, and resume")


def is_lost_rank(error: Exception) -> bool:
    """Whether an error inside DDP's own communication means that a rank is gone."""
    return world().size > 1 and any(word in str(error) for word in ("gloo", "NCCL", "Connection", "ProcessGroup"))
