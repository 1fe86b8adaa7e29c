"""What the classifier and the regressor share: the network, training on the engines, and predictions.

A fit goes through these stages: check and weight the rows (`sklearn/rows.py`), scale them (`onelaunch.data.scaling`), build
the networks (`onelaunch.train.mlp`), train them together (`sklearn/training.py`), and keep them on the CPU for predictions.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import nn

from onelaunch.data.scaling import FeatureScaling
from onelaunch.device import default_device
from onelaunch.sklearn.continuing import (
    architecture_of,
    check_architecture_unchanged,
    later_seed,
    with_dropout,
    with_held_out_rows,
)
from onelaunch.sklearn.convergence import Convergence
from onelaunch.sklearn.lbfgs import train_lbfgs
from onelaunch.sklearn.networks import make_network, network_widths
from onelaunch.sklearn.parameter_checks import check_parameters
from onelaunch.sklearn.parameter_names import named_by_parameters
from onelaunch.sklearn.parameters import MLPParameters
from onelaunch.sklearn.presets import left_out, preset_of, temperature_of
from onelaunch.sklearn.record import record_fit, warn_of_max_iter
from onelaunch.sklearn.rows import Rows, to_float32
from onelaunch.sklearn.training import Network, Prepared, train_networks
from onelaunch.sklearn.validation import validated
from onelaunch.train.history import History
from onelaunch.train.predict import float64_outputs


class BaseMLP(MLPParameters):
    """The common methods of `MLPClassifier` and `MLPRegressor`."""

    models_: list[nn.Sequential]
    n_iter_: int
    _rules: list[Convergence]
    _first_seeds: list[int] | None = None  # of the fit that made the networks: they choose the rows to hold out
    _calls = 0  # that have trained these networks

    @property
    def model_(self) -> nn.Sequential:
        """The trained network, a PyTorch module on the CPU that takes scaled rows; the first of several."""
        check_is_fitted(self)
        return self.models_[0]

    @property
    def coefs_(self) -> list[np.ndarray]:
        """The weights of each Linear of `model_`, [inputs, outputs], in the dtype of the X of `fit`."""
        return [self._as_fitted(layer.weight).T for layer in self.model_ if isinstance(layer, nn.Linear)]

    @property
    def intercepts_(self) -> list[np.ndarray]:
        """The bias of each Linear of `model_`, [outputs], in the dtype of the X of `fit`."""
        return [self._as_fitted(layer.bias) for layer in self.model_ if isinstance(layer, nn.Linear)]

    def _as_fitted(self, values: torch.Tensor) -> np.ndarray:
        return values.detach().numpy().astype(getattr(self, "_dtype", np.float32))

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

    @property
    def _no_improvement_count(self) -> int:
        """Under scikit-learn's private name, which scripts read: epochs since the loss last improved by `tol`."""
        return self._rules[0].epochs_without_improvement

    @property
    def _optimizer(self) -> Convergence:
        """Under scikit-learn's private name, which scripts read: it has the `learning_rate`."""
        return self._rules[0]

    def _scaled(self, rows: Rows, *, continues: bool) -> np.ndarray:
        """The features of checked rows as the networks take them, float32. `continues`: with the scaling of the last fit."""
        check_parameters(self)
        if continues:
            check_architecture_unchanged(self, getattr(self, "_architecture", {}))
        else:
            self._scaling = FeatureScaling.fit(rows.x, rows.weight) if self.scale else None
        return to_float32("X", rows.x, "scale='robust'") if self._scaling is None else self._scaling.transform(rows.x)

    def _fit_prepared(self, prepared: Prepared, *, continues: bool, epochs: int | None = None) -> None:
        """Train the networks together and set the attributes of the fit.

        continues: start from the networks of the last fit. epochs: instead of `max_iter`.
        """
        networks = self._networks(prepared, continues=continues, epochs=epochs)
        try:
            with named_by_parameters():
                histories = self._train(networks, prepared)
        finally:
            for network in networks:
                network.model.to("cpu").eval()
        self._finish(prepared, [network.model for network in networks], histories, continues)
        if epochs is None and self.solver in ("adam", "sgd") and self.n_iter_ == self.max_iter:
            warn_of_max_iter(self.max_iter, self._rules[0])

    def _trains_alone(self, networks: list[Network]) -> bool:
        """Whether networks in one launch with others would not be trained as this estimator's parameters say."""
        return self.solver == "lbfgs" or any(network.trains_alone for network in networks)

    def _train(self, networks: list[Network], prepared: Prepared) -> list[History]:
        if self.solver == "lbfgs":
            return [train_lbfgs(network.model, prepared, self._lbfgs_settings()) for network in networks]
        return train_networks(networks, verbose=bool(self.verbose))

    def _networks(self, prepared: Prepared, *, continues: bool = False, epochs: int | None = None) -> list[Network]:
        """The networks to train, each with the arguments of its `ol.fit`."""
        random = check_random_state(self.random_state)
        device = default_device() if self.device == "auto" else torch.device(self.device)
        widths = [] if continues else network_widths(self, prepared.x.shape[1], prepared.outputs, device)
        preset = preset_of(self)
        seeds = [int(random.randint(2**31 - 1)) for _ in range(preset.networks)]
        with named_by_parameters():
            options = self._options(len(prepared.x), prepared.loss, epochs)
        dropout = 0.0 if self.solver == "lbfgs" else float(self.dropout)
        if continues:
            models = [with_dropout(model, dropout) for model in self.models_]
        else:
            models = [make_network(self, widths, dropout, seed) for seed in seeds]
            self._calls, self._first_seeds = 0, seeds
        dtype = torch.float64 if self.solver == "lbfgs" else torch.float32
        ends = self.solver is not None and self.max_iter != "auto" and "validation" not in options and epochs is None
        self._rules = self._convergences(continues=continues, partial=epochs is not None, ends=ends)
        networks = [
            Network(
                model.to(device, dtype), prepared.x, prepared.y, prepared.weight,
                {**options, "seed": later_seed(seed, self._calls)}, rule, bool(self.shuffle),
            )
            for model, seed, rule in zip(models, seeds, self._rules, strict=True)
        ]  # fmt: skip
        if preset.leaves_out:
            networks = [one.without(rows) for one, rows in zip(networks, self._left_out(prepared), strict=True)]
        if continues and "validation" in options:
            networks = [with_held_out_rows(*pair) for pair in zip(networks, self._first_seeds or seeds, strict=True)]
        return networks

    def _convergences(self, *, continues: bool, partial: bool, ends: bool) -> list[Convergence]:
        """scikit-learn's rules for each network. Those of a fitted estimator go on; `fit` starts with the first rate again."""
        rate_rule = self._rate_rule()
        settings: dict[str, Any] = {
            "rate_rule": rate_rule, "first_rate": self.learning_rate_init, "power_t": self.power_t, "tol": self.tol,
            "patience": self.n_iter_no_change, "ends_training": ends or (rate_rule == "adaptive" and not partial),
        }  # fmt: skip
        if not (partial and continues):
            settings["learning_rate"] = self.learning_rate_init
        before = getattr(self, "_rules", []) if continues else []
        networks = preset_of(self).networks
        if len(before) != networks:
            before = [Convergence(learning_rate=self.learning_rate_init) for _ in range(networks)]
        return [dataclasses.replace(rule, **settings) for rule in before]

    def _finish(
        self, prepared: Prepared, models: list[nn.Sequential], histories: list[History], continues: bool
    ) -> None:
        """Set the attributes of a fit whose networks are trained."""
        self.models_ = models
        self.n_outputs_ = prepared.outputs
        self._architecture = architecture_of(self)
        self._calls += 1
        if prepared.loss == "cross_entropy":
            self.temperature_ = self._temperature(prepared) if preset_of(self).leaves_out else 1.0
        record_fit(self, histories, len(prepared.x), continues)

    def _left_out(self, prepared: Prepared) -> list[np.ndarray]:
        """The rows that each network has not seen."""
        assert self._first_seeds is not None
        return left_out(prepared, len(self._first_seeds), self._first_seeds[0])

    def _temperature(self, prepared: Prepared) -> float:
        pairs = [(model, rows) for model, rows in zip(self.models_, self._left_out(prepared), strict=True) if len(rows)]
        weight = np.ones(len(prepared.x)) if prepared.weight is None else prepared.weight
        logits = [float64_outputs(model, prepared.x[rows]) for model, rows in pairs]
        return temperature_of(logits, [prepared.y[rows] for _, rows in pairs], [weight[rows] for _, rows in pairs])

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


def has_partial_fit(estimator: BaseMLP) -> bool:
    """Raise AttributeError for the solver that has no epochs."""
    if estimator.solver == "lbfgs":
        raise AttributeError("partial_fit is not available with solver='lbfgs': pass 'adam' or 'sgd'")
    return True
