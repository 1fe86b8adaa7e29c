"""Strips of columns that several programs share; tests/engines/graph/test_parity.py has the other cases of this kernel."""

from __future__ import annotations

import pytest

from tests.conftest import LOSS_TOLERANCE, WEIGHT_TOLERANCE
from tests.engines.graph.harness import assert_follows_eager, data, network

pytestmark = pytest.mark.usefixtures("one_thread")


def test_strips_that_several_programs_share():
    widths = [5, 20, 260, 3]
    model = network(widths, "gelu", 0.2)
    x, y = data(widths, "cross_entropy", rows=16)
    options = {"steps": 2, "batch_size": 16, "lr": 0.1}
    assert_follows_eager(
        model, x, y, options, losses=LOSS_TOLERANCE, weights=WEIGHT_TOLERANCE, validation=False
    )  # fmt: skip
