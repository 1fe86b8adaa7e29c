"""The division of a network into stages, and the reasons of an engine that lacks a name."""

from __future__ import annotations

from torch import nn

from onelaunch.engines.stages import Stage, cut_into_stages, unsupported_names
from onelaunch.run.network import Activation, Dropout, Linear
from onelaunch.run.parse import parse_network


def test_a_stage_is_a_linear_and_what_follows_it():
    model = nn.Sequential(nn.Flatten(), nn.Tanh(), nn.Linear(4, 3), nn.ReLU(), nn.Dropout(0.5), nn.Linear(3, 2))
    assert cut_into_stages(parse_network(model)) == (
        Stage(None, (Activation("tanh"),)),
        Stage(Linear("2", 4, 3, True), (Activation("relu"), Dropout(0.5, 0))),
        Stage(Linear("5", 3, 2, True), ()),
    )


def test_what_an_engine_lacks_is_named():
    network = parse_network(nn.Sequential(nn.Linear(4, 3), nn.Mish(), nn.Linear(3, 3), nn.ELU(), nn.Linear(3, 2)))
    known = frozenset({"relu", "mish", "elu"})
    assert unsupported_names(network, known, "sgd", frozenset({"sgd"})) == ""
    assert "activation elu, mish" in unsupported_names(network, frozenset({"relu"}), "sgd", frozenset({"sgd"}))
    assert "optimizer 'lion'" in unsupported_names(network, known, "lion", frozenset({"sgd"}))
