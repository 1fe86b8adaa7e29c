"""What the classifier and the regressor share: parameters, the network, training on the engines, and its record.

A fit goes through these stages: check and weight the rows (`sklearn/rows.py`), scale them (`onelaunch.data.scaling`), build
the networks (`onelaunch.train.mlp`), train them together (`sklearn/training.py`), and keep them on the CPU for predictions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import nn

from onelaunch.data.hold_out import held_out_count
from onelaunch.data.scaling import FeatureScaling
from onelaunch.device import default_device
from onelaunch.errors import OnelaunchError, abbreviate, require_integer
from onelaunch.optimizers import OPTIMIZERS
from onelaunch.run import table_defaults as defaults
from onelaunch.run.early_stopping import EarlyStopping
from onelaunch.sklearn.parameter_checks import check_parameters, hidden_widths
from onelaunch.sklearn.parameter_names import named_by_parameters
from onelaunch.sklearn.rows import Rows, to_float32
from onelaunch.sklearn.training import Network, Prepared, train_networks
from onelaunch.sklearn.validation import validated
from onelaunch.train.history import History
from onelaunch.train.memory import no_room_reason, parameters_of, training_copies
from onelaunch.train.mlp import mlp
from onelaunch.train.predict import float64_outputs

MIN_ROWS_TO_STOP_EARLY = 10_000  # with early_stopping="auto"
ACTIVATION_ALIASES = {"logistic": "sigmoid", "identity": None}  # scikit-learn's names


class BaseMLP(BaseEstimator):
    """The parameters of `MLPClassifier` and `MLPRegressor`, and their common methods."""

    models_: list[nn.Sequential]
    loss_curve_: list[float]
    t_: int

    def __init__(
        self,
        hidden_layer_sizes: Any = defaults.HIDDEN,
        activation: str = "relu",
        *,
        alpha: float = defaults.WEIGHT_DECAY,
        batch_size: int | str = "auto",
        learning_rate_init: float = defaults.LR,
        max_iter: int | str = "auto",
        early_stopping: bool | str = "auto",
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 10,
        tol: float = 1e-4,
        random_state: Any = None,
        warm_start: bool = False,
        verbose: bool = False,
        dropout: float = defaults.DROPOUT,
        batch_norm: bool = False,
        layer_norm: bool = False,
        schedule: str = "auto",
        optimizer: str = defaults.OPTIMIZER,
        solver: str | None = None,
        learning_rate: str | None = None,
        shuffle: bool = True,
        momentum: float = 0.9,
        nesterovs_momentum: bool = True,
        beta_1: float | None = None,
        beta_2: float | None = None,
        epsilon: float | None = None,
        scale: str | None = "robust",
        scale_target: bool = True,  # a classifier, which has no such parameter, does not use it
        n_estimators: int = 1,
        precision: str = "auto",
        engine: str = "auto",
        device: str = "auto",
    ) -> None:
        self.hidden_layer_sizes = hidden_layer_sizes
        self.activation = activation
        self.alpha = alpha
        self.batch_size = batch_size
        self.learning_rate_init = learning_rate_init
        self.max_iter = max_iter
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.tol = tol
        self.random_state = random_state
        self.warm_start = warm_start
        self.verbose = verbose
        self.dropout = dropout
        self.batch_norm = batch_norm
        self.layer_norm = layer_norm
        self.schedule = schedule
        self.optimizer = optimizer
        self.solver = solver
        self.learning_rate = learning_rate
        self.shuffle = shuffle
        self.momentum = momentum
        self.nesterovs_momentum = nesterovs_momentum
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon
        self.scale = scale
        self.scale_target = scale_target
        self.n_estimators = n_estimators
        self.precision = precision
        self.engine = engine
        self.device = device

    @property
    def model_(self) -> nn.Sequential:
        """The trained network, a PyTorch module on the CPU that takes scaled rows; the first of several."""
        check_is_fitted(self)
        return self.models_[0]

    @property
    def coefs_(self) -> list[np.ndarray]:
        """The weights of each Linear of `model_`, [inputs, outputs]."""
        return [layer.weight.detach().numpy().T.copy() for layer in self.model_ if isinstance(layer, nn.Linear)]

    @property
    def intercepts_(self) -> list[np.ndarray]:
        """The bias of each Linear of `model_`, [outputs]."""
        return [layer.bias.detach().numpy().copy() for layer in self.model_ if isinstance(layer, nn.Linear)]

    @property
    def n_layers_(self) -> int:
        """The number of layers of `model_`, with its input and output."""
        return len(self.coefs_) + 1

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "models_")

    def _scaled(self, rows: Rows, *, continues: bool) -> np.ndarray:
        """The features of checked rows as the networks take them, float32. `continues`: with the scaling of the last fit."""
        check_parameters(self)
        if not continues:
            self._scaling = FeatureScaling.fit(rows.x, rows.weight) if self.scale else None
        return to_float32("X", rows.x, "scale='robust'") if self._scaling is None else self._scaling.transform(rows.x)

    def _fit_prepared(self, prepared: Prepared, *, continues: bool, epochs: int | None = None) -> None:
        """Train the networks together and set the attributes of the fit.

        continues: start from the networks of the last fit. epochs: instead of `max_iter`.
        """
        networks = self._networks(prepared, continues=continues, epochs=epochs)
        try:
            with named_by_parameters():
                histories = train_networks(networks, verbose=bool(self.verbose))
        finally:
            for network in networks:
                network.model.to("cpu").eval()
        self._finish(prepared, [network.model for network in networks], histories, continues)

    def _networks(self, prepared: Prepared, *, continues: bool = False, epochs: int | None = None) -> list[Network]:
        """The networks to train, each with the arguments of its `ol.fit`."""
        random = check_random_state(self.random_state)
        device = default_device() if self.device == "auto" else torch.device(self.device)
        widths = [] if continues else self._widths(prepared, device)
        seeds = [int(random.randint(2**31 - 1)) for _ in range(self.n_estimators)]
        with named_by_parameters():
            options = self._options(len(prepared.x), prepared.loss, epochs)
        if continues:
            models = self.models_
        else:
            models = [self._network(widths, seed) for seed in seeds]
        return [
            Network(model.to(device), prepared.x, prepared.y, prepared.weight, {**options, "seed": seed})
            for model, seed in zip(models, seeds, strict=True)
        ]

    def _finish(
        self, prepared: Prepared, models: list[nn.Sequential], histories: list[History], continues: bool
    ) -> None:
        """Set the attributes of a fit whose networks are trained."""
        self.models_ = models
        self.n_outputs_ = prepared.outputs
        self._record(histories, len(prepared.x), continues)

    def _record(self, histories: list[History], rows: int, continues: bool) -> None:
        """The record of training, as scikit-learn names it; of several networks, the first one's."""
        epochs = histories[0].epochs
        before = self.loss_curve_ if continues else []
        self.loss_curve_ = before + [epoch["loss"] for epoch in epochs]
        self.loss_ = self.loss_curve_[-1]
        self.n_iter_ = len(self.loss_curve_)
        self.t_ = (self.t_ if continues else 0) + rows * len(epochs)
        validation = [epoch["validation"] for epoch in epochs if epoch["validation"]]
        scores = [-found["loss"] if found["accuracy"] is None else found["accuracy"] for found in validation]
        self.validation_scores_ = scores or None
        self.best_validation_score_ = max(scores) if scores else None
        self.best_loss_ = None if scores else min(self.loss_curve_)
        self.history_ = histories[0]

    def _widths(self, prepared: Prepared, device: torch.device) -> list[int]:
        """The widths of the networks. Raises OnelaunchError if `n_estimators` of them do not fit into memory."""
        widths = [prepared.x.shape[1], *hidden_widths(self.hidden_layer_sizes), prepared.outputs]
        optimizer = self.solver or self.optimizer
        trains_here = device.type == "cpu" and optimizer in OPTIMIZERS
        copies = training_copies(optimizer) if trains_here else 1
        if reason := no_room_reason(self.n_estimators * parameters_of(widths), copies):
            several = "" if self.n_estimators == 1 else f" with n_estimators={self.n_estimators}"
            given = f"hidden_layer_sizes={abbreviate(self.hidden_layer_sizes)}{several}"
            remedy = f"pass smaller widths{' or fewer networks' if several else ''}"
            raise OnelaunchError(f"{given} does not fit into memory ({reason}): {remedy}")
        return widths

    def _network(self, widths: list[int], seed: int) -> nn.Sequential:
        known = isinstance(self.activation, str)
        return mlp(
            widths, activation=ACTIVATION_ALIASES.get(self.activation, self.activation) if known else self.activation,
            dropout=self.dropout, batch_norm=bool(self.batch_norm), layer_norm=bool(self.layer_norm), seed=seed,
        )  # fmt: skip

    def _options(self, rows: int, loss: str, epochs: int | None) -> dict[str, Any]:
        """The arguments of `ol.fit` for this many rows."""
        batch_size = defaults.table_batch_size(rows) if self.batch_size == "auto" else self.batch_size
        batch_size = min(require_integer("batch_size", batch_size, "'auto' or rows per step, 1 or more"), rows)
        if batch_size < 1:
            raise OnelaunchError(f"batch_size={batch_size} must be 1 or more, or 'auto'")
        stops_early = epochs is None and self._stops_early(rows)
        trained = rows - held_out_count(rows, self.validation_fraction) if stops_early else rows
        wanted: Any = self.max_iter if epochs is None else epochs
        wanted = defaults.table_epochs(rows, batch_size) if wanted == "auto" else wanted
        options: dict[str, Any] = {
            "epochs": require_integer("max_iter", wanted, "'auto' or a number of epochs, 1 or more"),
            "batch_size": batch_size, "lr": self.learning_rate_init, "weight_decay": self.alpha,
            "schedule": self._schedule(partial=epochs is not None), "loss": loss, "precision": self.precision,
            "engine": self.engine, **self._optimizer_options(),
            "drop_last": bool(self.batch_norm) and trained > batch_size and trained % batch_size == 1,  # BatchNorm1d
        }  # fmt: skip
        if stops_early:
            options["validation"] = float(self.validation_fraction)
            options["early_stopping"] = EarlyStopping(self.n_iter_no_change, min_delta=self.tol)
        return options

    def _schedule(self, *, partial: bool) -> str:
        """The schedule of `ol.fit`. "auto" is constant in `partial_fit`, which does not know how many calls follow."""
        given = self.learning_rate or self.schedule
        return ("constant" if partial else defaults.SCHEDULE) if given == "auto" else given

    def _optimizer_options(self) -> dict[str, Any]:
        """The optimizer and what it takes of `momentum`, `beta_1`, `beta_2` and `epsilon`."""
        name = self.solver or self.optimizer
        if name == "sgd":
            nesterov = bool(self.nesterovs_momentum) and bool(self.momentum)
            return {"optimizer": name, "momentum": self.momentum, "nesterov": nesterov}
        if name not in ("adam", "adamw"):
            return {"optimizer": name}
        given = zip((self.beta_1, self.beta_2), defaults.BETAS, strict=True)
        betas = tuple(default if beta is None else beta for beta, default in given)
        return {"optimizer": name, "betas": betas, "eps": defaults.EPS if self.epsilon is None else self.epsilon}

    def _stops_early(self, rows: int) -> bool:
        return rows > MIN_ROWS_TO_STOP_EARLY if self.early_stopping == "auto" else bool(self.early_stopping)

    def _outputs(self, X: Any) -> list[np.ndarray]:
        """The float64 outputs of each network for the rows of X; in float64 they do not depend on the batch they are in."""
        check_is_fitted(self)
        X = dense(validated(self, X, reset=False))
        x = X if self._scaling is None else self._scaling.transform(X)
        return [float64_outputs(model, x) for model in self.models_]


def dense(X: Any) -> np.ndarray:
    """X as an array; a sparse matrix is expanded."""
    found: np.ndarray = X.toarray() if hasattr(X, "toarray") else X
    return found
