from __future__ import annotations

import torch
from torch import nn

from onelaunch.activations import ACTIVATIONS
from onelaunch.train.mlp import mlp


def test_layers_and_seed():
    model = mlp([4, 3, 2], activation="silu", dropout=0.5, batch_norm=True, seed=3)
    kinds = [type(layer) for layer in model]
    assert kinds == [nn.Flatten, nn.Linear, nn.BatchNorm1d, nn.SiLU, nn.Dropout, nn.Linear]
    state = torch.get_rng_state()
    again = mlp([4, 3, 2], activation="silu", dropout=0.5, batch_norm=True, seed=3)
    assert torch.equal(again[1].weight, model[1].weight)
    assert not torch.equal(mlp([4, 3, 2], seed=4)[1].weight, model[1].weight)
    assert torch.equal(torch.get_rng_state(), state)


def test_every_activation():
    for name, entry in ACTIVATIONS.items():
        assert entry.matches(mlp([4, 3, 2], activation=name)[2])


def test_layer_norm_and_no_activation():
    kinds = [type(layer) for layer in mlp([4, 3, 2], activation=None, layer_norm=True)]
    assert kinds == [nn.Flatten, nn.Linear, nn.LayerNorm, nn.Linear]
