"""The plan of a step: what follows from a network and a batch, without a device."""

from __future__ import annotations

import pytest

from onelaunch.device import A100, H200, Chip
from onelaunch.engines.graph.plan.memory import lower_bound
from onelaunch.engines.graph.plan.plan import plan_step
from tests.engines.graph.plan.planning import check, stages


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("batch", [1, 32, 64, 65, 300, 5000])
@pytest.mark.parametrize("widths", [[784, 10], [20, 30, 1000], [784, 2048, 2048, 10], [64, 64, 64, 16]])
@pytest.mark.parametrize("clips", [False, True])
def test_every_buffer_has_an_offset(clips, widths, batch, precision):
    step = plan_step(
        stages(widths, "gelu"), batch=batch, rows=7 * batch, steps_per_epoch=7, precision=precision,
        validation_rows=500, states=2, clips=clips,
    )  # fmt: skip
    for operation in (*step.operations, *step.evaluation):
        assert set(operation.uses) <= set(step.buffers), operation
    layout = step.layout()
    check(layout)
    assert set(layout.offsets) == set(step.buffers)
    assert layout.nbytes <= 1.05 * lower_bound(layout.buffers)
    freed = [name for names in step.last_uses(step.operations) for name in names]
    assert sorted(freed) == sorted({name for one in step.operations for name in one.uses} - step.persistent)


def test_a_smaller_chip_gets_smaller_tiles():
    small = Chip(84, 99 * 1024)
    for batch in (32, 4096):
        step = plan_step(
            stages([784, 2048, 2048, 10]), batch=batch, rows=batch, steps_per_epoch=1, precision="bf16",
            validation_rows=0, states=0, chip=small,
        )  # fmt: skip
        for one in step.operations:
            weight_bytes = 4 if step.small else 2
            assert not one.tile.tma
            assert one.tile.stages * one.tile.k * (2 * one.tile.m + weight_bytes * one.tile.n) <= small.shared_bytes


def test_few_kernels_per_step():
    def kinds(widths: list[int], batch: int, clips: bool = False) -> list[str]:
        step = plan_step(
            stages(widths), batch=batch, rows=batch, steps_per_epoch=1, precision="bf16", validation_rows=0, states=0,
            clips=clips,
        )  # fmt: skip
        return [operation.kind for operation in step.operations]

    assert kinds([784, 2048, 2048, 2048, 10], 32) == [
        "forward", "forward", "forward", "output_small_batch", "fused_backward", "fused_backward",
        "first_and_last_update",
    ]  # fmt: skip
    assert kinds([64, 64, 64, 16], 262_144) == ["narrow_step", "narrow_update"]
    assert kinds([64, 64, 64, 16], 262_144, True) == ["narrow_step", "narrow_update", "clip_factor", "clipped_update"]
    assert kinds([784, 1024, 10], 32, True)[-3:] == ["clip_factor", "clipped_update", "clipped_update"]
    assert kinds([784, 1024, 1024, 10], 4096)[:4] == ["gather", "forward", "forward", "output"]


def test_weights_are_split_where_that_gains():
    def splits(widths: list[int], **options: object) -> bool:
        given = {"batch": 32, "precision": "bf16", "states": 0, "chip": H200, **options}
        step = plan_step(stages(widths), rows=64, steps_per_epoch=2, validation_rows=0, **given)
        dtypes = {buffer.dtype for name, buffer in step.buffers.items() if name.startswith(("high.", "low."))}
        assert dtypes in (set(), {"bf16", "int16"})
        assert all(one.tile.tma for one in step.operations if one.kind == "fused_backward") or not dtypes
        return bool(dtypes)

    assert splits([784, 2048, 2048, 10])
    assert not splits([784, 2048, 2048, 10], batch=65)
    assert not splits([784, 2048, 2048, 10], precision="fp16")
    assert not splits([784, 2048, 2048, 10], states=1)
    assert not splits([784, 2048, 2048, 10], chip=A100)
    assert not splits([784, 2048, 2048, 10], clips=True)
    assert not splits([785, 2048, 2048, 10])
    assert not splits([784, 10])
