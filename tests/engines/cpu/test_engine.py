"""What the engine declares: where it can run, and which runs it refuses."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from onelaunch.engines import cpu
from onelaunch.engines.cpu.plan.target import host
from onelaunch.train.inputs import make_run

OPTIONS = {"epochs": 1, "batch_size": 4}


def unsupported_reason(model: nn.Module, **options: object) -> str:
    x, y = torch.zeros(8, 4), torch.zeros(8, dtype=torch.int64)
    return cpu.ENGINE.unsupported_reason(make_run(model, x, y, None, {**OPTIONS, **options}))


def test_refusals_say_why() -> None:
    plain = nn.Sequential(nn.Linear(4, 2))
    assert unsupported_reason(plain) == ""
    assert "fp16" in unsupported_reason(plain, precision="fp16")
    assert ("needs a CPU with AMX" in unsupported_reason(plain, precision="bf16")) == (not host().tiles)
    assert "Softshrink" in unsupported_reason(nn.Sequential(nn.Linear(4, 2), nn.Softshrink()))


def test_names_that_the_engine_does_not_declare_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "ACTIVATIONS", cpu.ACTIVATIONS - {"mish"})
    monkeypatch.setattr(cpu, "OPTIMIZERS", cpu.OPTIMIZERS - {"lion"})
    assert "mish" in unsupported_reason(nn.Sequential(nn.Linear(4, 2), nn.Mish()))
    assert "lion" in unsupported_reason(nn.Sequential(nn.Linear(4, 2)), optimizer="lion")


def test_the_engine_runs_on_the_cpu_only() -> None:
    assert cpu.ENGINE.unavailable_reason(torch.device("cpu")) == ""
    assert "cuda" in cpu.ENGINE.unavailable_reason(torch.device("cuda"))


def test_importing_the_engine_does_not_import_llvm() -> None:
    code = (
        "import sys, onelaunch.engines.cpu; "
        "assert not [name for name in sys.modules if name.startswith(('llvmlite', 'onelaunch.engines.cpu.'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
