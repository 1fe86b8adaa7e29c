"""The sizes of an MLP and what its kernels derive from them; without Triton, for machines that lack it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from onelaunch.integers import clamp, next_power_of_2, round_up

# The largest tile of a layer's values, and how many of their columns one product takes at a time, or gives as its rows. H200,
# 8-64-64-4, 256 rows, fp32, forward: 4.9 µs with a depth of 32; 6.8 with 64, for which the registers do not suffice; 7.1 with
# 32 and plain FMAs.
MAX_BLOCK, MAX_DEPTH = 128, 32
MIN_BLOCK = 16  # of `tl.dot`
ALIGNED = 8  # parameters: the gradient of each weight and bias begins at a multiple of 16 bytes


@dataclass(frozen=True)
class Shape:
    """Of an MLP: its numbers of inputs, of hidden units and of outputs, and which layers have a bias."""

    widths: tuple[int, ...]
    biased: tuple[bool, ...]

    @property
    def blocks(self) -> tuple[int, ...]:
        """Columns of a tile of each layer's values."""
        return tuple(clamp(MIN_BLOCK, next_power_of_2(width), MAX_BLOCK) for width in self.widths)

    @property
    def depths(self) -> tuple[int, ...]:
        """Columns of each layer's values that a product takes at a time, or rows that it gives."""
        return tuple(min(block, MAX_DEPTH) for block in self.blocks)

    @property
    def hidden(self) -> tuple[int, ...]:
        """Where each hidden layer's columns begin among those of all, and their number."""
        return tuple(accumulate(self.widths[1:-1], initial=0))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each layer's weight and of its bias, in turns; 0 for no bias."""
        layers = zip(pairwise(self.widths), self.biased, strict=True)
        return tuple(
            size for (inputs, outputs), biased in layers for size in (inputs * outputs, outputs if biased else 0)
        )

    @property
    def gradients(self) -> tuple[int, ...]:
        """Where the gradients of each weight and of each bias begin in one vector, in turns, and the vector's length."""
        return tuple(accumulate((round_up(size, ALIGNED) for size in self.sizes), initial=0))
