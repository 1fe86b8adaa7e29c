"""The code of members compiles without a GPU."""

from __future__ import annotations

import pytest

from onelaunch.device import A100, H200
from onelaunch.engines.resident.members.placement import Forced, choose_members_plan
from onelaunch.engines.resident.source.source_common import HEADERS
from onelaunch.nvrtc.compile import compile_cubin, unavailable_reason
from tests.engines.resident.planning import LAYERS, settings_of

pytestmark = pytest.mark.skipif(bool(unavailable_reason()), reason=f"cannot compile CUDA here: {unavailable_reason()}")


@pytest.mark.parametrize(
    ("widths", "chip", "arch", "forced", "changes"),
    [
        ([5, 9, 9, 2], A100, "sm_80", Forced(1, True, 2), {"optimizer": "rmsprop", "dropout": 0.5, "weighted": True}),
        ([5, 9, 9, 2], H200, "sm_90a", Forced(2, True), {"optimizer": "adam", "precision": "tf32", "validates": True}),
        (
            LAYERS,
            H200,
            "sm_90a",
            Forced(8, False),
            {"optimizer": "adam", "uint8_rows": True, "validates": True, "weighted": True},
        ),
    ],
)
def test_compiles(widths, chip, arch, forced, changes, tmp_path):
    settings = settings_of(widths, members=True, **changes)
    plan = choose_members_plan(settings, chip, 512, forced=forced).plan
    made = compile_cubin(plan.source(), arch, headers=HEADERS, place=tmp_path)
    assert made.code.startswith(b"\x7fELF")
