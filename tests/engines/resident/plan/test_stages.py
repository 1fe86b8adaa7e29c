"""Networks cut into Linears with what follows them; layers that the engine does not support are named."""

from __future__ import annotations

import pytest
from torch import nn

from onelaunch.engines.resident.plan.stages import stages_of
from onelaunch.engines.stages import UnsupportedNetworkError
from onelaunch.run.parse import parse_network


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ([nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)], "BatchNorm1d is not in this engine"),
        ([nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)], "LayerNorm is not in this engine"),
        ([nn.Dropout(0.1), nn.Linear(4, 2)], "before the first Linear"),
        ([nn.ReLU(), nn.Linear(4, 2)], "before the first Linear"),
    ],
)
def test_unsupported_layers_are_named(layers, reason):
    with pytest.raises(UnsupportedNetworkError, match=reason):
        stages_of(parse_network(nn.Sequential(*layers)))


def test_a_stage_is_a_linear_and_what_follows_it():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2), nn.Tanh())
    assert [len(stage.chain) for stage in stages_of(parse_network(model))] == [2, 1]
