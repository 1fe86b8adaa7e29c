"""What a plan is made for: the run's settings and the chip, in the sizes of the tensor core."""

from __future__ import annotations

from dataclasses import dataclass

from onelaunch.engines.resident.plan.stages import Stage

WARPS = 8
THREADS = WARPS * 32
TILE, STEP = 8, 16
ROW_TILE = 16
MOST_OUTPUTS = 64
MOST_BATCH = 4096
MOST_ROWS = 256  # of a pass; a larger batch takes several
MOST_SUMS = 16  # accumulator tiles a warp holds at once: 64 registers
LEFT_BYTES, RIGHT_BYTES, TILE_BYTES = 512, 256, 512  # of one operand fragment or fp32 tile over 32 lanes
SCORE_BYTES = 16  # a loss and its right predictions, on their way to block 0
FLAG_STRIDE = 8  # words: a flag has a 32-byte sector to itself
INTERVAL = 128  # steps whose learning rates are computed at once
REGISTERS = 255
WORKING_REGISTERS = 112  # addresses, operands, partial sums; measured with ptxas over the compiled list
PLANES = {"bf16": 1, "fp16": 1, "tf32": 2, "fp32": 3}


@dataclass(frozen=True)
class Settings:
    """All that the code depends on."""

    stages: tuple[Stage, ...]
    batch: int
    rows: int
    precision: str  # bf16, fp16, tf32 or fp32
    optimizer: str
    momentum: bool
    nesterov: bool
    weight_decay: bool
    schedule: str
    loss: str
    smooths: bool
    bytes_input: bool  # uint8 rows
    validates: bool


def planes_of(settings: Settings) -> int:
    """Half-precision numbers that make up one value."""
    return PLANES[settings.precision]
