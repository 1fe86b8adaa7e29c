from __future__ import annotations

from torch import nn

from onelaunch.engines.cpu.plan.stages import stages_of
from onelaunch.run.parse import parse_network


def test_stages_group_what_follows_each_linear() -> None:
    model = nn.Sequential(
        nn.BatchNorm1d(9), nn.Linear(9, 33), nn.BatchNorm1d(33), nn.GELU(), nn.Dropout(0.5), nn.Linear(33, 1000)
    )
    stages = stages_of(parse_network(model))
    assert [stage.width for stage in stages] == [9, 33, 1000]
    assert [stage.batch_norms for stage in stages] == [(1,), (1,), ()]
    assert stages[1].stores_derivative(1)
    assert not stages[1].stores_derivative(0)
