from __future__ import annotations

from torch import nn

from onelaunch.engines.cpu.plan.settings import Settings, useful_partitions
from onelaunch.run.parse import parse_network


def test_settings_have_only_what_changes_the_code() -> None:
    """A search over these options costs no compilation."""
    fields = Settings.__dataclass_fields__
    assert not set(fields) & {"lr", "betas", "eps", "seed", "rows", "schedule"}
    for name in ("momentum", "weight_decay", "label_smoothing"):
        assert fields[name].type == "bool", f"only whether {name} is used may change the code"


def test_small_networks_get_one_partition_and_large_ones_one_per_thread() -> None:
    small = parse_network(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    large = parse_network(nn.Sequential(nn.Linear(784, 784), nn.ReLU(), nn.Linear(784, 10)))
    assert useful_partitions(small, 32, 8) == 1
    assert useful_partitions(large, 64, 8) == 8
    assert useful_partitions(large, 64, 16) == 8  # more take longer
    assert useful_partitions(large, 64, 1) == 1
