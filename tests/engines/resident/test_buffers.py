"""Targets as the resident kernel fetches them, and the rows' weights beside them."""

from __future__ import annotations

import pytest
import torch

from onelaunch.engines.resident.buffers import targets_as_fetched
from tests.engines.resident.planning import plan_of


@pytest.mark.parametrize("loss", ["cross_entropy", "mse", "bce_with_logits"])
def test_the_weight_follows_the_target(loss):
    y = torch.randint(3, (20,)) if loss == "cross_entropy" else torch.rand(20, 3)
    expected = y.to(torch.int32)[:, None] if loss == "cross_entropy" else y
    plain = plan_of([5, 8, 3], loss=loss)
    assert torch.equal(targets_as_fetched(y, plain), expected)
    plan = plan_of([5, 8, 3], loss=loss, weighted=True)
    weights = torch.rand(20, dtype=torch.float64)
    for given, column in ((weights, weights.float()), (None, torch.ones(20))):
        found = targets_as_fetched(y, plan, given)
        assert found.is_contiguous()
        assert found.shape == (20, plan.target_words) == (20, plain.target_words + 1)
        assert torch.equal(found[:, :-1], expected)
        assert torch.equal(found[:, -1].contiguous().view(torch.float32), column)
    assert plan.loss_units == plain.loss_units == plain.target_words
