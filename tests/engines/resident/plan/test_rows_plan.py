"""Plans by rows executed in NumPy follow PyTorch, and a broken one is caught."""

from __future__ import annotations

import dataclasses

import pytest

from onelaunch.device import H200
from tests.engines.resident.fragments import RaceError
from tests.engines.resident.planning import rows_plan
from tests.engines.resident.rows_simulator import RowsBlock
from tests.engines.resident.simulated import ORDERS, assert_follows, run_broken

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("widths", "blocks", "rows", "batch", "precision", "order"),
    [
        ([9, 24, 17, 3], 1, 32, 30, "bf16", "lowest rank first"),
        ([9, 24, 17, 3], 4, 16, 50, "tf32", "highest rank first"),  # the last block's rows are not full
        ([9, 24, 17, 3], 2, 16, 80, "fp32", "at random"),  # three passes per step
        (
            [5, 8, 3],
            8,
            16,
            20,
            "bf16",
            "lowest rank first",
        ),  # blocks that own no weights, and rows for two of them only
        ([5, 3], 2, 16, 30, "bf16", "at random"),
    ],
)
def test_follows_pytorch(widths, blocks, rows, batch, precision, order):
    plan = rows_plan(widths, blocks, rows, batch=batch, precision=precision, activation="tanh")
    assert_follows(plan, ORDERS[order](), rows=100, steps=3, validation_passes=2, momentum=0.9)


def test_a_block_of_16_warps_follows_pytorch():
    plan = rows_plan([20, 40, 24, 5], 1, 48, batch=40, activation="tanh", warps=16)
    assert plan.team == 4
    assert_follows(plan, ORDERS["at random"](), rows=100, steps=3, momentum=0.9)


def test_one_buffer_of_rows_follows_pytorch():
    """The first layer's gradient is computed before the next rows are fetched over its inputs."""
    whole = rows_plan([40, 24, 3], 1, 32, batch=30)
    chip = dataclasses.replace(H200, shared_bytes=whole.shared.size - 1)
    plan = rows_plan([40, 24, 3], 1, 32, batch=30, activation="tanh", chip=chip)
    while plan.input_buffers == 2:
        chip = dataclasses.replace(chip, shared_bytes=plan.shared.size - 1)
        plan = rows_plan([40, 24, 3], 1, 32, batch=30, activation="tanh", chip=chip)
    assert plan.fits
    assert "first gradient and update" in plan.phase_names()
    assert_follows(plan, ORDERS["at random"](), rows=100, steps=3, validation_passes=2, momentum=0.9)


@pytest.mark.parametrize("blocks", [2, 8])  # all blocks own weights, or some
def test_one_buffer_for_bias_parts_is_caught(blocks, monkeypatch):
    """New weights are sent before the biases' parts are read, so a block that has all of them may be a step ahead."""
    offset = RowsBlock.bias_offset
    monkeypatch.setattr(RowsBlock, "bias_offset", lambda self, sender, use: offset(self, sender, 0))
    with pytest.raises(RaceError, match=r"bias parts.*(may still read|finds use)"):
        run_broken(rows_plan([5, 8, 3], blocks, 16, batch=16 * blocks))


def test_weights_read_before_they_arrive_are_caught():
    plan = rows_plan([5, 8, 3], 2, 16, batch=32)
    phases = [name for name in plan.phase_names() if name != "update"]
    with pytest.raises(RaceError, match="weights: block 0 reads use 1 and finds use 0"):
        run_broken(plan, phases=phases)
