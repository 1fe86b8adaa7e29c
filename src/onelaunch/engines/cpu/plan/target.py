"""The machine the code is compiled for: floats per vector register, number of registers.

The emitters depend only on these and on a few features; LLVM knows the rest of the processor. `llvmlite` is imported inside
the functions, so that importing the engine costs nothing.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from onelaunch.operating_system import may_use_tiles

CACHE_LINE = 64  # bytes


@dataclass(frozen=True)
class Target:
    triple: str
    cpu: str
    features: str  # LLVM's "+avx2,-sse4a,..."
    lanes: int  # floats in a vector
    registers: int  # vector registers
    has_fma: bool
    splats: bool  # this LLVM parses "splat (float 1.0)" (version 19 and later)
    llvm: str  # version, part of the cache key
    # Products of bf16 operands: by AMX tiles, in vector code that computes the same (for tests), or none ("").
    tiles: Literal["", "amx", "emulated"] = ""

    def heights(self, vectors: int) -> tuple[int, ...]:
        """The heights in rows of tiles that are `vectors` registers wide, in falling order. The accumulators of the tallest
        fill the registers, beside two rows of the vector operand and a broadcast value; with tiles one row lower they cover
        most numbers of rows exactly. The last serves what is left: below about 8 accumulators a tile waits for the latency of
        its multiply-adds.
        """
        if vectors == 1:
            return 12, 8
        if self.has_lane_operands:  # four rows of the vector operand, and two vectors of the other
            return 10, 9, 8
        return (13, 12, 8) if self.registers >= 32 else (6, 5, 2)

    def update_heights(self, vectors: int) -> tuple[int, ...]:
        """The heights of dW's tiles. Its rows are a layer's inputs, mostly many, which two heights cover exactly."""
        if self.has_lane_operands:  # whole vectors of inputs
            return 12, 8
        tallest, *_, lowest = self.heights(vectors)
        return tallest, lowest

    @property
    def has_tiles(self) -> bool:
        return self.tiles == "amx"

    @property
    def has_lane_operands(self) -> bool:
        """Whether a multiply-add can take one lane of a vector as a factor. There, a load that broadcasts costs as much as a
        multiply-add."""
        return self.triple.startswith(("aarch64", "arm64"))

    @property
    def vector_constraint(self) -> str:
        """The constraint of inline assembly for a vector register; empty on architectures without one here."""
        architecture = self.triple.split("-")[0]
        if architecture == "x86_64":
            return "v" if self.registers >= 32 else "x"
        return "w" if architecture in ("aarch64", "arm64") else ""

    @property
    def has_estimates(self) -> bool:
        """Whether there are AVX-512's 14-bit estimates of 1/x and 1/sqrt(x). Each with one Newton step is twice as fast as the
        exact instruction."""
        return self.lanes == 16

    def __str__(self) -> str:
        return f"{self.cpu} ({self.triple.split('-')[0]}), {self.lanes} floats per vector, {self.registers} registers"


def _shape(architecture: str, features: dict[str, bool]) -> tuple[int, int, bool]:
    """(lanes, registers, has_fma) of an architecture with these features."""
    if architecture in ("x86_64", "amd64", "i686", "i386"):
        if features.get("avx512f"):
            return 16, 32, True
        if features.get("avx2") and features.get("fma"):
            return 8, 16, True
        return 4, 16, False
    if architecture.startswith(("aarch64", "arm64")):
        return 4, 32, True
    return 4, 16, False


def _llvm_version() -> tuple[int, ...]:
    import llvmlite.binding as llvm

    return tuple(llvm.llvm_version_info)


@functools.cache
def host() -> Target:
    """This machine."""
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    triple = llvm.get_process_triple()
    lanes, registers, has_fma = _shape(triple.split("-")[0], dict(features))
    version = _llvm_version()
    has_tiles = all(features.get(name) for name in ("amx-tile", "amx-bf16", "avx512bf16", "avx512f"))
    return Target(
        triple, llvm.get_host_cpu_name(), features.flatten(), lanes, registers, has_fma, version[0] >= 19,
        ".".join(map(str, version)), "amx" if has_tiles and may_use_tiles() else "",
    )  # fmt: skip


def named(triple: str, cpu: str = "", features: tuple[str, ...] = ()) -> Target:
    """A target by name, such as `named("aarch64-unknown-linux-gnu")` or `named(triple, "haswell", ("avx2", "fma"))`."""
    lanes, registers, has_fma = _shape(triple.split("-")[0], dict.fromkeys(features, True))
    version = _llvm_version()
    flattened = ",".join(f"+{feature}" for feature in features)
    return Target(
        triple, cpu, flattened, lanes, registers, has_fma, version[0] >= 19, ".".join(map(str, version))
    )  # fmt: skip
