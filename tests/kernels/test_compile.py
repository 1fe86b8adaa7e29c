"""Every kernel compiles for the chips we name, on a machine with none of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


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
    # A row of few classes stays in one thread, with every Triton: what goes from lane to lane are a program's two sums.
    few = [line for line in done.stdout.splitlines() if line.startswith("cross_entropy_kernel") and "warps=1 " in line]
    assert few
    assert all(line.endswith(" shuffles=10") for line in few), few
