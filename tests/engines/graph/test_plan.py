"""The plan of a step: what follows from a network and a batch, with no device; and which networks the engine refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from onelaunch.device import A100, H200, Chip
from onelaunch.engines.graph import ENGINE
from onelaunch.engines.graph.plan.plan import plan_step
from onelaunch.engines.graph.plan.stages import Stage, stages_of
from onelaunch.engines.stages import UnsupportedNetworkError
from onelaunch.run.network import Linear, parse_network
from onelaunch.train.inputs import make_run
from tests.conftest import ROOT
from tests.engines.graph.test_memory import check

SCRIPT = Path(__file__).with_name("compile_steps.py")


def stages(widths: list[int], activation: str = "relu", p: float = 0.0) -> list[Stage]:
    made = [Stage(Linear(str(n), *pair, True), activation, p) for n, pair in enumerate(pairwise(widths))]
    made[-1] = Stage(made[-1].linear)
    return made


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("batch", [1, 32, 64, 65, 300, 5000])
@pytest.mark.parametrize("widths", [[784, 10], [20, 30, 1000], [784, 2048, 2048, 10], [64, 64, 64, 16]])
def test_every_buffer_has_its_place(widths, batch, precision):
    step = plan_step(
        stages(widths, "gelu"), batch=batch, rows=7 * batch, steps_per_epoch=7, precision=precision, check_rows=500,
        states=2,
    )  # fmt: skip
    for operation in (*step.operations, *step.evaluation):
        assert set(operation.uses) <= set(step.spaces), operation
    layout = step.layout()
    check(layout)
    assert set(layout.offsets) == set(step.spaces)
    assert layout.nbytes <= 1.05 * layout.lower_bound
    freed = [name for names in step.last_uses(step.operations) for name in names]
    assert sorted(freed) == sorted({name for one in step.operations for name in one.uses} - step.kept)


def test_a_smaller_chip_gets_smaller_tiles():
    small = Chip(84, 99 * 1024)
    for batch in (32, 4096):
        step = plan_step(
            stages([784, 2048, 2048, 10]), batch=batch, rows=batch, steps_per_epoch=1, precision="bf16", check_rows=0,
            states=0, chip=small,
        )  # fmt: skip
        for one in step.operations:
            weight_bytes = 4 if step.small else 2
            assert not one.tile.tma
            assert one.tile.stages * one.tile.k * (2 * one.tile.m + weight_bytes * one.tile.n) <= small.shared_bytes


def test_few_kernels_a_step():
    def kinds(widths: list[int], batch: int) -> list[str]:
        step = plan_step(
            stages(widths), batch=batch, rows=batch, steps_per_epoch=1, precision="bf16", check_rows=0, states=0
        )
        return [operation.kind for operation in step.operations]

    assert kinds([784, 2048, 2048, 2048, 10], 32) == [
        "forward", "forward", "forward", "output_row", "strip", "strip", "ends_update",
    ]  # fmt: skip
    assert kinds([64, 64, 64, 16], 262_144) == ["narrow_step", "narrow_update"]
    assert kinds([784, 1024, 1024, 10], 4096)[:4] == ["gather", "forward", "forward", "output"]


def test_weights_in_halves_where_they_gain():
    def halves(widths: list[int], **options: object) -> bool:
        given = {"batch": 32, "precision": "bf16", "states": 0, "chip": H200, **options}
        step = plan_step(stages(widths), rows=64, steps_per_epoch=2, check_rows=0, **given)
        kinds = {space.kind for name, space in step.spaces.items() if name.startswith(("high.", "low."))}
        assert kinds in (set(), {"bf16", "int16"})
        assert all(one.tile.tma for one in step.operations if one.kind == "strip") or not kinds
        return bool(kinds)

    assert halves([784, 2048, 2048, 10])
    assert not halves([784, 2048, 2048, 10], batch=65)
    assert not halves([784, 2048, 2048, 10], precision="fp16")
    assert not halves([784, 2048, 2048, 10], states=1)
    assert not halves([784, 2048, 2048, 10], chip=A100)
    assert not halves([785, 2048, 2048, 10])
    assert not halves([784, 10])


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ([nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)], "layer '1' is a BatchNorm1d"),
        ([nn.Dropout(0.1), nn.Linear(4, 2)], "a layer stands before the first Linear"),
        ([nn.Linear(4, 4), nn.ReLU(), nn.Tanh(), nn.Linear(4, 2)], "a tanh follows another activation or a Dropout"),
        ([nn.Linear(4, 4), nn.LeakyReLU(0.3), nn.Linear(4, 2)], "LeakyReLU has negative_slope=0.3, not 0.01"),
        ([nn.Linear(4, 4), nn.Dropout(0.1), nn.Dropout(0.1), nn.Linear(4, 2)], "two Dropouts follow one another"),
        ([nn.Linear(4, 2), nn.Sigmoid()], "a layer follows the last Linear"),
        ([nn.Linear(4, 2000)], "the model has 2000 outputs, more than 1024"),
    ],
)
def test_says_what_it_does_not_take(layers, reason):
    with pytest.raises(UnsupportedNetworkError, match=reason):
        stages_of(parse_network(nn.Sequential(*layers)))
    model = nn.Sequential(*layers)
    outputs = 2000 if "2000" in reason else 2
    run = make_run(model, torch.randn(8, 4), torch.randint(outputs, (8,)), None, {"steps": 1, "batch_size": 4})
    assert ENGINE.unsupported_reason(run) == reason


def test_needs_a_cuda_device():
    where = ENGINE.unavailable_reason(torch.device("cpu"))
    assert where == (
        "the model lies on cpu: model.cuda() brings it to the GPU"
        if torch.cuda.is_available()
        else "this machine has no CUDA device"
    )


@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_of_a_step_compiles(capability):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *(path for path in sys.path if path)])
    done = subprocess.run([sys.executable, SCRIPT, str(capability)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = {line.split()[0] for line in done.stdout.splitlines()}
    assert len(kernels) >= 12, kernels
