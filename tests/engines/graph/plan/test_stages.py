"""Which networks the graph engine refuses, and with which reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from onelaunch.bench.workload import Residual
from onelaunch.engines.graph import ENGINE
from onelaunch.engines.graph.plan.stages import stages_of
from onelaunch.engines.stages import UnsupportedNetworkError
from onelaunch.run.parse import parse_network
from onelaunch.train.inputs import make_run


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ([nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)], "layer '1' is a BatchNorm1d"),
        ([nn.Dropout(0.1), nn.Linear(4, 2)], "a layer stands before the first Linear"),
        ([nn.Linear(4, 4), nn.ReLU(), nn.Tanh(), nn.Linear(4, 2)], "a tanh follows another activation or a Dropout"),
        ([nn.Linear(4, 4), nn.LeakyReLU(0.3), nn.Linear(4, 2)], "LeakyReLU has negative_slope=0.3, not 0.01"),
        ([nn.Linear(4, 4), nn.Dropout(0.1), nn.Dropout(0.1), nn.Linear(4, 2)], "two Dropouts follow one another"),
        (
            [nn.Linear(4, 4), nn.LayerNorm(4), nn.LayerNorm(4), nn.Linear(4, 2)],
            "layer '2' is a second LayerNorm after one Linear",
        ),
        ([nn.Linear(4, 4), nn.LayerNorm(4, eps=0.0), nn.Linear(4, 2)], "layer '1' has eps=0.0"),
        ([Residual(nn.Linear(4, 4)), nn.Linear(4, 2)], "the network's input is added to a later value"),
        ([nn.Linear(4, 4), Residual(nn.ReLU()), nn.Linear(4, 2)], "a value is added within its own stage"),
        (
            [nn.Linear(4, 4), Residual(Residual(nn.Linear(4, 4)), nn.Linear(4, 4)), nn.Linear(4, 2)],
            "a value is added twice",
        ),
        ([nn.Linear(4, 2), nn.Sigmoid()], "a layer follows the last Linear"),
        ([nn.Linear(4, 2000)], "the model has 2000 outputs, more than 1024"),
    ],
)
def test_the_reason_of_a_refusal(layers, reason):
    with pytest.raises(UnsupportedNetworkError, match=reason):
        stages_of(parse_network(nn.Sequential(*layers)))
    model = nn.Sequential(*layers)
    outputs = 2000 if "2000" in reason else 2
    run = make_run(model, torch.randn(8, 4), torch.randint(outputs, (8,)), None, {"steps": 1, "batch_size": 4})
    assert ENGINE.unsupported_reason(run).startswith(reason)
