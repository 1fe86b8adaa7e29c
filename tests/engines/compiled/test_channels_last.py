"""Weights of convolutions, laid out anew for a run and given back to the model's own memory."""

from __future__ import annotations

import torch
from torch import nn

from onelaunch.engines.compiled.channels_last import ChannelsLast


def network(groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Conv2d(6, 8, 3, groups=groups), nn.Flatten(), nn.LazyLinear(3)
    )


def test_updates_reach_the_models_own_memory() -> None:
    model = network()
    weight, alias = model[0].weight, model[0].weight.data
    before = weight.detach().clone()
    layout = ChannelsLast(model)
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert not weight.is_contiguous()
    assert torch.equal(weight, before)
    with torch.no_grad():
        weight += 1
    layout.restore()
    layout.restore()  # a second time does nothing
    assert weight is model[0].weight
    assert weight.data_ptr() == alias.data_ptr()
    assert weight.is_contiguous()
    assert torch.equal(alias, before + 1)


def test_a_shared_weight_stays_shared() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    model[1].weight = model[0].weight
    layout = ChannelsLast(model)
    assert model[1].weight is model[0].weight
    layout.restore()
    assert model[1].weight is model[0].weight


def test_grouped_convolutions_and_weights_laid_out_by_the_user_are_left_alone() -> None:
    grouped = network(groups=2)
    ChannelsLast(grouped)
    assert all(layer.weight.is_contiguous() for layer in (grouped[0], grouped[2]))
    chosen = network()
    chosen[0].weight.data = chosen[0].weight.data.contiguous(memory_format=torch.channels_last)
    pointer = chosen[0].weight.data_ptr()
    ChannelsLast(chosen).restore()
    assert chosen[0].weight.data_ptr() == pointer
    assert chosen[0].weight.is_contiguous(memory_format=torch.channels_last)
