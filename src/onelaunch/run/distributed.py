"""Several processes that train one model together: their ranks, and the few things they must agree on.

`torchrun --nproc-per-node N -m onelaunch train …` starts N processes, and `process_group` joins them (NCCL on CUDA, gloo on a
CPU). A program that has called `torch.distributed.init_process_group` itself gets the same from `ol.fit`. Each batch is cut
into consecutive parts, one per rank, so that dropout masks and row order are those of a single process. The ranks sum
gradients and losses and agree on a stop. Rank 0 writes all files.
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

from onelaunch.errors import MAX_LONG_LINE, OnelaunchError, first_line

TIMEOUT = timedelta(minutes=5)  # how long to wait for a rank that neither answers nor exits


@dataclass(frozen=True)
class World:
    """The rank of this process and the number of processes that train together."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this process is the one that writes files and prints."""
        return self.rank == 0

    def part(self, rows: int) -> slice:
        """The rows of this rank, out of `rows` rows of a batch."""
        return slice(self.rank * rows // self.size, (self.rank + 1) * rows // self.size)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over all ranks, in place, and return it."""
        if self.size > 1:
            with as_lost_rank():
                distributed.all_reduce(tensor)
        return tensor

    def any(self, value: bool, device: torch.device) -> bool:
        """Whether `value` is true on some rank. All ranks must call this at the same point."""
        if self.size == 1:
            return value
        return bool(self.sum(torch.tensor(int(value), device=device)))


def world() -> World:
    """The processes that train together: those of PyTorch's process group, or this one alone."""
    if distributed.is_available() and distributed.is_initialized():
        return World(distributed.get_rank(), distributed.get_world_size())
    return World()


@contextmanager
def process_group() -> Iterator[World]:
    """Join the group that torchrun started this process in, and leave it at the end; without torchrun, a World of one."""
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
        # Delete DDP first: the last owner of the group waits for its threads, and DDP would hold Python's lock meanwhile.
        gc.collect()
        distributed.destroy_process_group()


class LostRankError(OnelaunchError):
    """Another process of the job has died or does not answer."""


@contextmanager
def as_lost_rank() -> Iterator[None]:
    """Turn an error of PyTorch's communication inside the block into a LostRankError."""
    try:
        yield
    except RuntimeError as error:
        raise lost_rank_error(error) from error


def lost_rank_error(error: Exception) -> LostRankError:
    """The error for the user, with the first line of `error` but without gloo's source line and its guesses."""
    reason = re.sub(r"^\[[^]]*\]\s*", "", first_line(error, MAX_LONG_LINE)).split(". This is typically", 1)[0]
    return LostRankError(f"another process of this job died or does not answer ({reason}): see its output, and resume")


def is_lost_rank(error: Exception) -> bool:
    """Whether `error` comes from DDP's own communication, which means that a rank is gone."""
    return world().size > 1 and any(word in str(error) for word in ("gloo", "NCCL", "Connection", "ProcessGroup"))
