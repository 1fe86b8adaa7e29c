"""What a plan is made for: the settings of the run, and the sizes that the tensor core prescribes."""

from __future__ import annotations

from dataclasses import dataclass

from onelaunch.engines.resident.plan.stages import Stage

WARPS = 8  # per block
THREADS = WARPS * 32
ROW_TILE, N_TILE, K_TILE = 16, 8, 16  # rows, units and inputs of one `mma.m16n8k16`
MAX_OUTPUTS = 64
MAX_BATCH = 4096
MAX_ROWS = 256  # per pass; a larger batch takes several passes
MAX_SUMS = 16  # accumulator tiles that a warp holds at once: 64 registers
LEFT_BYTES, RIGHT_BYTES, TILE_BYTES = 512, 256, 512  # of one operand fragment or fp32 tile over 32 lanes
SCORE_BYTES = 16  # a loss and its correct predictions, as sent to block 0
FLAG_STRIDE = 8  # words: each flag has a 32-byte sector to itself
INTERVAL = 128  # steps whose learning rates are computed at once
REGISTERS = 255  # per thread
ALL_REGISTERS = 65536  # of a multiprocessor
MIN_EPS = 1e-12  # from here on, roots of the smallest numbers may be rounded to zero
MAX_DROPOUTS = 16  # of a member, whose probabilities are in its parameters
MEMBER_BYTES = 640  # of shared memory: a member's number and parameters
RESERVED_REGISTERS = (
    112  # for addresses, operands and partial sums; measured with ptxas over the compiled plans of the tests
)
PLANES = {"bf16": 1, "fp16": 1, "tf32": 2, "fp32": 3}  # 16-bit numbers whose sum is one value


@dataclass(frozen=True)
class Settings:
    """Everything that the generated code depends on."""

    stages: tuple[Stage, ...]
    batch: int
    rows: int
    precision: str  # a key of PLANES
    optimizer: str
    momentum: bool
    nesterov: bool
    weight_decay: bool
    schedule: str
    loss: str
    label_smoothing: bool
    uint8_rows: bool
    validates: bool
    weighted: bool = False  # rows have weights in the mean loss of their batch
    tiny_eps: bool = False  # eps of the optimizer is below MIN_EPS
    members: bool = False  # one launch trains many networks, which blocks (or clusters) take from a queue
    per_multiprocessor: int = 1  # blocks that share a multiprocessor, each of another member
