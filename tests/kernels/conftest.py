"""Kernels run on a GPU where there is one, else through Triton's interpreter on CPU tensors."""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = not torch.cuda.is_available()
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported


@pytest.fixture(
    params=[
        pytest.param(
            "cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="the interpreter is off where there is a GPU")
        ),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def kernel_device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(
    params=[
        torch.float32,
        torch.float16,
        pytest.param(torch.bfloat16, marks=pytest.mark.gpu),  # the interpreter is silently wrong in bf16
    ],
    ids=["fp32", "fp16", "bf16"],
)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    if request.param is torch.bfloat16 and INTERPRETED:
        pytest.skip("the interpreter is wrong in bf16")
    return request.param
