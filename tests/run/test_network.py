"""Which models count as an MLP, and the reason for those that do not."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import onelaunch as ol
from onelaunch.activations import ACTIVATIONS
from onelaunch.run.network import Activation, BatchNorm, Dropout, Flatten, Linear, NotAnMlpError
from onelaunch.run.parse import parse_network


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
    network = parse_network(model)
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


def shared_norm() -> nn.Module:
    norm = nn.BatchNorm1d(2, affine=False)
    return nn.Sequential(nn.Linear(2, 2), norm, nn.Linear(2, 2), norm)


def shared_buffers() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[3].running_mean = model[1].running_mean
    return model


def switched_off() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].track_running_stats = False
    return model


def narrow_bias() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].bias = nn.Parameter(torch.zeros(1))
    return model


def empty() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 2))
    model[0].out_features = model[1].in_features = 0
    model[0].weight, model[0].bias = nn.Parameter(torch.zeros(0, 2)), nn.Parameter(torch.zeros(0))
    model[1].weight = nn.Parameter(torch.zeros(2, 0))
    return model


def renamed() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_state_dict_post_hook(lambda *_: None)
    return model


def test_a_dropout_used_twice_draws_what_it_draws_on_the_eager_engine():
    twice, once = nn.Dropout(0.5), nn.Dropout(0.3)
    model = nn.Sequential(nn.Linear(6, 5), twice, nn.Linear(5, 5), twice, nn.Linear(5, 5), once, nn.Linear(5, 3))
    network = parse_network(model)
    assert [layer for layer in network.layers if isinstance(layer, Dropout)] == [
        Dropout(0.5, 0), Dropout(0.5, 2), Dropout(0.3, 1)
    ]  # fmt: skip
    losses = []
    for engine in ("cpu", "eager"):
        copied = copy.deepcopy(model)
        torch.manual_seed(1)
        x, y = torch.randn(40, 6), torch.arange(40) % 3
        losses.append(ol.fit(copied, x, y, epochs=3, batch_size=8, engine=engine, progress=False).losses)
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Softmax(1)), r"do not have 1 \(Softmax\)$"),
        (lambda: nn.Sequential(nn.Conv2d(1, 1, 1)), r"do not have 0 \(Conv2d\)$"),
        (
            lambda: nn.Sequential(nn.Conv2d(1, 1, 1), nn.Flatten(), nn.Linear(4, 4), nn.GLU(), nn.Linear(2, 2)),
            r"do not have 0 \(Conv2d\), 3 \(GLU\)$",
        ),
        (
            lambda: nn.Sequential(nn.Flatten(0), nn.Linear(2, 2)),
            r"layer '0' changes the shape \[3, 2\] of a batch to \[6\]",
        ),
        (lambda: nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 2)), "2 inputs follows one of 3 outputs"),
        (lambda: nn.Sequential(nn.ReLU()), "no Linear"),
        (lambda: nn.Sequential(nn.Linear(2, 2)).double(), "torch.float64, not torch.float32"),
        (hooked, "has a hook"),
        (hooked_gradient, "weight of layer '0' has a hook"),
        (hooked_sum, "bias of layer '0' has a hook"),
        (frozen, "0.bias is frozen"),
        (shared, "share their memory"),
        (tied, "share their memory"),
        (normed, "layer '0'"),
        (shared_norm, "share their memory"),
        (shared_buffers, "running_mean and .*running_mean share their memory"),
        (switched_off, "running statistics, but they are switched off"),
        (narrow_bias, r"bias of layer '0' has shape \(1,\), not \(2,\)"),
        (renamed, "has a hook"),
        (empty, "or is empty"),
        (
            lambda: nn.Sequential(nn.Linear(2, 2), nn.ELU(alpha=2.0)),
            r"layer '1' is ELU\(alpha=2.0\) \(alpha=2.0; the native engines take 1.0\)$",
        ),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Softplus(beta=3.0)), r"\(beta=3.0; the native engines take 1.0\)$"),
        (
            lambda: nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)])),
            r"^forward fails in a trial: [^\n]*$",
        ),
    ],
)
def test_the_reason_is_given(make, reason):
    with pytest.raises(NotAnMlpError, match=reason):
        parse_network(make())


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_of_the_table_is_known(name):
    network = parse_network(nn.Sequential(nn.Linear(2, 2), ACTIVATIONS[name].make_module()))
    assert isinstance(network.layers[1], Activation)
    assert network.layers[1].name == name


def test_numbers_of_numpy_are_converted():
    """A search over sizes, or arithmetic with `x.shape`, yields such numbers."""
    eight, p = np.int64(8), np.float64(0.25)
    model = nn.Sequential(nn.Linear(4, eight), nn.LeakyReLU(np.float32(0.2)), nn.Dropout(p), nn.Linear(eight, 3))
    network = parse_network(model)
    assert network.layers[:3] == (
        Linear("0", 4, 8, True),
        Activation("leaky_relu", float(np.float32(0.2))),
        Dropout(0.25, 0),
    )
    assert "np." not in repr(network)  # the native engines write these numbers into source code
    x, y = torch.randn(20, 4), torch.arange(20) % 3
    losses = [
        ol.fit(copy.deepcopy(model), x, y, epochs=2, engine=engine, progress=False).losses
        for engine in ("cpu", "eager")
    ]
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-5, atol=0)
    with pytest.raises(NotAnMlpError, match="slope inf, which float32 does not hold"):
        parse_network(nn.Sequential(nn.Linear(4, 3), nn.LeakyReLU(float("inf"))))
