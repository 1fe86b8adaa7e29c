"""Without generated code, as in the tests of level 2, and with float32 products in float32."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.fuse.conftest import few_threads, fresh_dynamo, no_code
from tests.step.tape import tapes

__all__ = ["few_threads", "fresh_dynamo", "no_code", "tapes"]

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = (
        "1"  # the databases import Triton, which tests of kernels in this process interpret
    )


@pytest.fixture(autouse=True)
def same_numbers() -> Iterator[None]:
    """cuDNN convolves float32 in TF32 by default, and may choose another algorithm in each run."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        yield
