"""The narrow step with two and four Linears, without a bias too; tests/engines/graph/test_parity.py has three Linears."""

from __future__ import annotations

import pytest

from tests.conftest import LOSS_TOLERANCE, WEIGHT_TOLERANCE
from tests.engines.graph.harness import assert_follows_eager, data, network, use_shape
from tests.reference import OPTIMIZERS

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("widths", "optimizer", "loss", "activation", "bias"),
    [
        ([7, 20, 4], "sgd", "cross_entropy", "relu", True),
        ([7, 16, 9, 12, 4], "sgd-nesterov", "bce_with_logits", "gelu", False),
    ],
)
def test_depths_and_no_bias(widths, optimizer, loss, activation, bias, monkeypatch):
    use_shape("narrow", monkeypatch)
    model = network(widths, activation, bias=bias)
    options = {**OPTIMIZERS[optimizer], "steps": 2, "batch_size": 40, "loss": loss}
    x, y = data(widths, loss, rows=65)
    assert_follows_eager(
        model, x, y, options, losses=LOSS_TOLERANCE, weights=WEIGHT_TOLERANCE, validation=False
    )  # fmt: skip
