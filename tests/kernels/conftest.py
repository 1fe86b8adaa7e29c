"""Kernels run on a GPU where there is one, else through Triton's interpreter on CPU tensors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.pairwise import cases

INTERPRETED = not torch.cuda.is_available()
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

DTYPES = {"cpu": (torch.float32, torch.float16), "cuda": (torch.float32, torch.float16, torch.bfloat16)}


def kernel_devices() -> tuple[Any, ...]:
    """The CPU, for the interpreter, only without a GPU; with one, Triton compiles all kernels of the process."""
    gpu = pytest.param(torch.device("cuda"), marks=pytest.mark.gpu, id="cuda")
    return (pytest.param(torch.device("cpu"), id="cpu"), gpu) if INTERPRETED else (gpu,)


def kernel_cases(*axes: Sequence[Any]) -> list[Any]:
    """Pairwise cases of (device, dtype, *axes). The interpreter takes no bfloat16: it is silently wrong in it."""
    return [
        pytest.param(*device.values, *case, marks=device.marks, id="-".join((str(device.id), *map(str, case))))
        for device in kernel_devices()
        for case in cases(DTYPES[device.values[0].type], *axes)
    ]


@pytest.fixture(params=kernel_devices())
def kernel_device(request: pytest.FixtureRequest) -> torch.device:
    return request.param
