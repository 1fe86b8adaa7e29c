from __future__ import annotations

import pytest
import torch


@pytest.fixture(
    params=[
        torch.float32,
        torch.float16,
        torch.bfloat16,
    ],
    ids=["fp32", "fp16", "bf16"],
)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param
