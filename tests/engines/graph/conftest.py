"""Kernels run on a GPU where there is one, else in Triton's interpreter on CPU tensors."""

from __future__ import annotations

import os

import pytest
import torch

import onelaunch as ol
from tests.interpreter import patch_language_once_per_launch

INTERPRETED = not torch.cuda.is_available()
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    patch_language_once_per_launch()


@pytest.fixture(autouse=True)
def row_order_from_the_host(request, monkeypatch):
    """Sessions take the row order from `ol.permutation`: interpreted, its kernel took two thirds of a session's time.

    kernels/test_run_state.py compares the kernel with `ol.permutation`.
    """
    if INTERPRETED and "one_thread" in request.fixturenames:  # the tests that run sessions
        from onelaunch.engines.graph import session

        def fill(order: torch.Tensor, keys: torch.Tensor, seed: int, epoch: int) -> None:
            order.copy_(ol.permutation(len(order), seed, epoch))

        monkeypatch.setattr(session, "fill_row_order", fill)
