"""What counts as a plain MLP, and the reason where a model does not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from onelaunch.train.build import mlp
from onelaunch.train.network import Activation, BatchNorm, Dropout, Flatten, Linear, NotPlainError, describe


def test_every_layer_is_named():
    model = nn.Sequential(
        nn.Flatten(),
        nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5, eps=1e-3, momentum=None), nn.LeakyReLU(0.2)),
        nn.Dropout(0.1),
        nn.Identity(),
        nn.Linear(5, 4, bias=False),
        nn.GELU(approximate="tanh"),
        nn.Dropout(0.3),
        nn.Linear(4, 2),
    )
    network = describe(model)
    assert network.layers == (
        Flatten(),
        Linear("1.0", 6, 5, True),
        BatchNorm("1.1", 5, 1e-3, None, True, True),
        Activation("leaky_relu", 0.2),
        Dropout(0.1, 0),
        Linear("4", 5, 4, False),
        Activation("gelu_tanh"),
        Dropout(0.3, 1),
        Linear("7", 4, 2, True),
    )
    assert str(network) == "6-5-4-2"
    names = set(model.state_dict())
    assert all(f"{layer.path}.weight" in names for layer in network.linears)


class Custom(nn.Linear):
    pass


def hooked_gradient() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3))
    model[0].weight.register_hook(lambda gradient: gradient * 0)
    return model


def hooked_sum() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3))
    model[0].bias.register_post_accumulate_grad_hook(lambda parameter: None)
    return model


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_hook(lambda *_: None)
    return model


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].bias.requires_grad_(False)
    return model


def shared() -> nn.Module:
    layer = nn.Linear(2, 2)
    return nn.Sequential(layer, nn.ReLU(), layer)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    return model


def normed() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Linear(2, 2), "is a Linear, not an nn.Sequential"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Softmax(1)), "layer '1' is Softmax"),
        (lambda: nn.Sequential(nn.Conv2d(1, 1, 1)), "layer '0' is Conv2d"),
        (lambda: nn.Sequential(Custom(2, 2)), "layer '0' is Custom"),
        (lambda: nn.Sequential(nn.Flatten(0), nn.Linear(2, 2)), "layer '0' is Flatten"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Flatten()), "Flatten stands after"),
        (lambda: nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 2)), "2 inputs follows one of 3 outputs"),
        (lambda: nn.Sequential(nn.ReLU()), "no Linear"),
        (lambda: nn.Sequential(nn.Linear(2, 2)).double(), "torch.float64, not torch.float32"),
        (hooked, "has a hook"),
        (hooked_gradient, "weight of layer '0' has a hook"),
        (hooked_sum, "bias of layer '0' has a hook"),
        (frozen, "0.bias is frozen"),
        (shared, "used twice"),
        (tied, "share their memory"),
        (normed, "layer '0'"),
    ],
)
def test_the_reason_is_given(make, reason):
    with pytest.raises(NotPlainError, match=reason):
        describe(make())


def test_mlp_builds_what_it_says():
    model = mlp([4, 3, 2], activation="silu", dropout=0.5, batch_norm=True, seed=3)
    kinds = [type(layer) for layer in model]
    assert kinds == [nn.Flatten, nn.Linear, nn.BatchNorm1d, nn.SiLU, nn.Dropout, nn.Linear]
    state = torch.get_rng_state()
    again = mlp([4, 3, 2], activation="silu", dropout=0.5, batch_norm=True, seed=3)
    assert torch.equal(again[1].weight, model[1].weight)
    assert not torch.equal(mlp([4, 3, 2], seed=4)[1].weight, model[1].weight)
    assert torch.equal(torch.get_rng_state(), state)
