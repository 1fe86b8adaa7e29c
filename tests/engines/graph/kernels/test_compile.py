"""Every kernel of a step compiles for chips with and without a tensor memory accelerator, on a machine without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

SCRIPT = Path(__file__).parent.with_name("compile_steps.py")


@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_of_a_step_compiles(capability):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *(path for path in sys.path if path)])
    done = subprocess.run([sys.executable, SCRIPT, str(capability)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = {line.split()[0] for line in done.stdout.splitlines()}
    assert len(kernels) >= 12, kernels
