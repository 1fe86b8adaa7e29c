"""Numbers that a caller passes and changes become symbols in the graph: patterns whose ops need constants leave them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.fuse.rewritten import Rewritten

X, IMAGES = torch.randn(5, 6).double(), torch.randn(2, 3, 6, 6).double()
TARGET, WEIGHT = torch.tensor([0, 1, 2, 3, 4]), torch.randn(6, 6).double()
KERNEL, MEAN, VARIANCE = torch.randn(3, 3, 3, 3).double(), torch.zeros(3).double(), torch.ones(3).double()


def convolution(padding: int) -> torch.Tensor:
    return torch.relu(F.batch_norm(F.conv2d(IMAGES, KERNEL, padding=padding), MEAN, VARIANCE))


CALLS: dict[str, tuple[Callable[[Any], torch.Tensor], tuple[float, ...]]] = {
    "ignore_index": (lambda i: F.cross_entropy(F.linear(X, WEIGHT), TARGET, ignore_index=i), (2, 3, 4)),
    "label_smoothing": (lambda s: F.cross_entropy(F.linear(X, WEIGHT), TARGET, label_smoothing=s), (0.1, 0.2, 0.3)),
    "padding": (convolution, (2, 3, 4)),
}


@pytest.mark.parametrize("name", CALLS)
def test_numbers_that_change_from_call_to_call(name: str) -> None:
    function, values = CALLS[name]
    rewritten = Rewritten(function, aot=True)
    for value in values:
        torch.testing.assert_close(rewritten(value), function(value))
