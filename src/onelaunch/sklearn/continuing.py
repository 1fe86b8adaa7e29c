"""A later call on a fitted estimator, by `partial_fit` or `warm_start`: its seeds, its held-out rows, what may change."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import nn

from onelaunch.errors import OnelaunchError, abbreviate
from onelaunch.sklearn.parameter_checks import hidden_widths
from onelaunch.sklearn.training import Network
from onelaunch.train.hold_out import hold_out

ARCHITECTURE = (
    "hidden_layer_sizes", "activation", "batch_norm", "layer_norm", "scale", "scale_target", "n_estimators", "preset",
)  # fmt: skip


def architecture_of(estimator: Any) -> dict[str, Any]:
    """The parameters of an estimator that its networks and their inputs are made by."""
    settings = {name: getattr(estimator, name) for name in ARCHITECTURE if hasattr(estimator, name)}
    return {**settings, "hidden_layer_sizes": tuple(hidden_widths(estimator.hidden_layer_sizes))}


def check_architecture_unchanged(estimator: Any, before: dict[str, Any]) -> None:
    """Raise OnelaunchError for the first parameter that is not the one that the networks were made with."""
    for name, value in architecture_of(estimator).items():
        if name in before and before[name] != value:
            raise OnelaunchError(
                f"{name}={abbreviate(getattr(estimator, name))} differs from {abbreviate(before[name])}, with which the "
                f"network was made: set it back, or call fit with warm_start=False for a new network"
            )


def later_seed(seed: int, calls: int) -> int:
    """The seed of a network's call after so many others: its masks and row orders go on instead of repeating."""
    return seed if not calls else int(np.random.SeedSequence((seed, calls)).generate_state(1)[0])


def with_dropout(model: nn.Sequential, p: float) -> nn.Sequential:
    """The network with dropout `p` in each hidden layer; the same object if that is its dropout already."""
    if {module.p for module in model if isinstance(module, nn.Dropout)} == ({p} if p and _has_hidden(model) else set()):
        return model
    layers: list[nn.Module] = []
    for module in model:
        if isinstance(module, nn.Linear) and p and any(isinstance(layer, nn.Linear) for layer in layers):
            layers.append(nn.Dropout(p))
        if not isinstance(module, nn.Dropout):
            layers.append(module)
    return nn.Sequential(*layers)


def _has_hidden(model: nn.Sequential) -> bool:
    return sum(isinstance(module, nn.Linear) for module in model) > 1


def with_held_out_rows(network: Network, seed: int) -> Network:
    """The network with its rows split by `seed`, that of its first call: rows that were held out are not trained later."""
    options = dict(network.options)
    classes = torch.from_numpy(network.y) if options["loss"] == "cross_entropy" else None
    train, held = (rows.numpy() for rows in hold_out(len(network.x), options["validation"], seed, classes))
    options["validation"] = (network.x[held], network.y[held])
    weight = None if network.weight is None else network.weight[train]
    return dataclasses.replace(network, x=network.x[train], y=network.y[train], weight=weight, options=options)
