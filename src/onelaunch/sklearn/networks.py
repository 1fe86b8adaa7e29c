"""The networks of an estimator, made from its parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from onelaunch.errors import OnelaunchError, abbreviate
from onelaunch.optimizers import OPTIMIZERS
from onelaunch.sklearn.parameter_checks import hidden_widths
from onelaunch.sklearn.presets import preset_of
from onelaunch.train.memory import no_room_reason, parameters_of, training_copies
from onelaunch.train.mlp import mlp

ACTIVATION_ALIASES = {"logistic": "sigmoid", "identity": None}  # scikit-learn's names


def network_widths(estimator: Any, inputs: int, outputs: int, device: torch.device) -> list[int]:
    """The widths of the networks. Raises OnelaunchError if `n_estimators` of them do not fit into memory."""
    widths = [inputs, *hidden_widths(estimator.hidden_layer_sizes), outputs]
    optimizer = estimator.solver or estimator.optimizer
    trains_here = device.type == "cpu" and optimizer in OPTIMIZERS
    copies = training_copies(optimizer) if trains_here else 1
    networks = preset_of(estimator).networks
    if reason := no_room_reason(networks * parameters_of(widths), copies):
        several = "" if networks == 1 else f" with n_estimators={networks}"
        given = f"hidden_layer_sizes={abbreviate(estimator.hidden_layer_sizes)}{several}"
        remedy = f"pass smaller widths{' or fewer networks' if several else ''}"
        raise OnelaunchError(f"{given} does not fit into memory ({reason}): {remedy}")
    return widths


def make_network(estimator: Any, widths: list[int], dropout: float, seed: int) -> nn.Sequential:
    """A new network of these widths with the estimator's activation and norms, on the CPU."""
    activation = estimator.activation
    return mlp(
        widths, activation=ACTIVATION_ALIASES.get(activation, activation) if isinstance(activation, str) else activation,
        dropout=dropout, batch_norm=bool(estimator.batch_norm), layer_norm=bool(estimator.layer_norm), seed=seed,
    )  # fmt: skip
