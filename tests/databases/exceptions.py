"""The cases of PyTorch's databases that do not follow plain PyTorch, and why.

A case in this table must fail: the entry of one that passes is needless, and fails the tests.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

# Regular expressions for "test:case:device" as a whole (the tests are "fuse", "train", "tape" and "optimizer"): the reason.
REASONS: dict[str, str] = {}
# Modules of which no case is recorded on CUDA, although they are not seen to read tensors on the host: the reason.
UNRECORDED: dict[str, str] = {
    "nn.CTCLoss": "it has the lengths on the host, and copies them to the device in every call",
}


def parameters(test: str, cases: list[Any], devices: tuple[str, ...] = ("cpu", "cuda")) -> list[Any]:
    """Each case on each device, those on CUDA marked `gpu`."""
    return [
        pytest.param(case, device, id=f"{case}-{device}", marks=marks_of(test, case, device))
        for case in cases
        for device in devices
    ]


def marks_of(test: str, case: Any, device: str) -> list[Any]:
    marks = [pytest.mark.gpu] if device == "cuda" else []
    reasons = [reason for pattern, reason in REASONS.items() if re.fullmatch(pattern, f"{test}:{case}:{device}")]
    return marks + [pytest.mark.xfail(strict=True, reason=reason) for reason in reasons]
