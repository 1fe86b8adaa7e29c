"""Every kernel compiles for the supported chips, on a machine without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Triton chooses which threads hold which elements, and its versions choose differently unless the kernel leaves no choice: with
# 3.7 the statistics once took 1280 shuffles and three times the registers. These are what the sums across threads need.
MAX_SHUFFLES = {
    "activation_dropout_forward_kernel": 0,
    "activation_dropout_backward_kernel": 26,
    "statistics_kernel": 76,
    "normalise_kernel": 0,
    "gradient_sums_kernel": 32,
    "input_gradient_kernel": 0,
    "cross_entropy_kernel": 44,
    "long_row_kernel": 42,
    "gradient_kernel": 0,
    "norm_forward_kernel": 20,
    "norm_backward_kernel": 58,
}


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_compiles(capability: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    script = Path(__file__).with_name("compile_all.py")
    done = subprocess.run([sys.executable, script, str(capability)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = {line.split()[0] for line in done.stdout.splitlines()}
    assert len(compiled) > 12
    assert ("linear_tma_kernel" in compiled) == (capability >= 90)
    lines = [line.split() for line in done.stdout.splitlines()]
    shuffles = [(name, warps, int(count.removeprefix("shuffles="))) for name, _, warps, count in lines]
    for name, limit in MAX_SHUFFLES.items():
        assert [count for other, _, count in shuffles if other == name], name
        assert max(count for other, _, count in shuffles if other == name) <= limit, (name, shuffles)
    # A row of few classes stays in one thread: only a program's two sums need shuffles.
    assert {count for name, warps, count in shuffles if name == "cross_entropy_kernel" and warps == "warps=1"} == {10}
