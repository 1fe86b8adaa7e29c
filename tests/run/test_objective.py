"""Losses, correct predictions and the denominators of their means."""

from __future__ import annotations

import pytest
import torch

from onelaunch.engines.contract import Metrics
from onelaunch.run.objective import as_features, count_correct, has_accuracy, loss_of
from onelaunch.run.spec import LOSSES, Spec
from tests import reference


@pytest.mark.parametrize("loss", LOSSES)
def test_metrics_from_sums_are_the_means(loss):
    spec = Spec(rows=150, steps=1, loss=loss)
    output = torch.randn(150, 4, dtype=torch.float64)
    _, target = reference.problem(loss)
    if loss != "cross_entropy":
        target = target.double()
    unreduced = reference.LOSSES[loss](output, target, reduction="none")
    correct = count_correct(spec, output, target)
    metrics = Metrics.of(spec, unreduced.sum().item(), int(correct or 0), 150, 4)
    assert metrics.loss == pytest.approx(loss_of(spec, output, target).item(), rel=1e-12)
    assert (correct is not None) == has_accuracy(spec) == (metrics.accuracy is not None)
    if loss == "cross_entropy":
        assert metrics.accuracy == (output.argmax(1) == target).double().mean().item()
    if loss == "bce_with_logits":
        assert metrics.accuracy == ((output > 0) == (target == 1)).double().mean().item()


def test_features():
    assert torch.equal(as_features(torch.tensor([255, 51], dtype=torch.uint8), torch.float32), torch.tensor([1.0, 0.2]))
    assert as_features(torch.tensor([1, 2]), torch.float32).dtype == torch.int64
    assert as_features(torch.tensor([1.0]), torch.float64).dtype == torch.float64
