"""The network and the training for a table where the user does not say, partly by its number of rows.

`docs/lab-notebook/tables.md` has the measurements behind these values. Tables overfit soon: few steps with a large learning
rate beat many small ones. Nothing here imports torch, so that help texts do not wait for it.
"""

from __future__ import annotations

from onelaunch.integers import ceil_div

MIN_BATCH, MAX_BATCH = 32, 256
BATCHES_PER_EPOCH = 16  # aimed at, within the limits of the batch
STEPS = 500  # aimed at, within the limits of the epochs
MIN_EPOCHS, MAX_EPOCHS = 12, 60

HIDDEN = (128, 128)
DROPOUT = 0.2
LR = 4e-3
WEIGHT_DECAY = 0.02
BETAS = (0.9, 0.95)
EPS = 1e-5  # of Adam; smaller ones make rows of vanishing weight count once the others are learned
OPTIMIZER, SCHEDULE = "adamw", "one_cycle"


def table_batch_size(rows: int) -> int:
    """Rows per step: the power of two nearest below rows / 16, at least 32 and at most 256."""
    wanted = max(1, rows // BATCHES_PER_EPOCH)
    return min(MAX_BATCH, max(MIN_BATCH, 1 << (wanted.bit_length() - 1)))


def table_epochs(rows: int, batch_size: int, steps: int = STEPS, longest: int = MAX_EPOCHS) -> int:
    """Passes over the table: about 500 steps, but at least 12 and at most 60 epochs."""
    return min(longest, max(MIN_EPOCHS, round(steps / ceil_div(rows, batch_size))))
