"""The tile of a GEMM. Plans are made without Triton, so this file does not import it."""

from __future__ import annotations

from typing import NamedTuple


class GemmTile(NamedTuple):
    """The part of a GEMM that one program computes at a time, its warps and the depth of its pipeline."""

    m: int
    n: int
    k: int
    warps: int = 4
    stages: int = 3
    tma: bool = False
    per_multiprocessor: int = 1  # programs of a persistent grid: two hide one's epilogue behind the other's products
    splits: int = 1  # programs that share one output tile, each with a part of the inner dimension

    def __str__(self) -> str:
        kind = f"-tma{self.per_multiprocessor}" if self.tma else ""
        return f"triton-{self.m}x{self.n}x{self.k}-w{self.warps}-s{self.stages}{kind}"
