"""Tensors that have names, compared by the tolerances of `tests/conftest.py`."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.conftest import TOLERANCE

RTOL, ATOL = TOLERANCE[torch.float32]


def assert_same(
    what: str, got: Sequence[Tensor | None], expected: Sequence[Tensor | None], rtol: float = RTOL, atol: float = ATOL
) -> None:
    """Each tensor is close to the other of its place: both None, or of equal shape and type. NaNs are equal."""
    for index, (one, two) in enumerate(zip(got, expected, strict=True)):
        if one is None or two is None:
            assert one is two, f"{what} {index}: {one} for {two}"
        else:
            message = functools.partial("{} {}: {}".format, what, index)
            torch.testing.assert_close(one, two, rtol=rtol, atol=atol, equal_nan=True, msg=message)
