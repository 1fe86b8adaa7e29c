"""The parameters of the estimators, and the arguments of `ol.fit` that follow from them."""

from __future__ import annotations

import math
from typing import Any

from sklearn.base import BaseEstimator

from onelaunch.data.hold_out import held_out_count
from onelaunch.errors import OnelaunchError, require_integer
from onelaunch.run import table_defaults as defaults
from onelaunch.run.early_stopping import EarlyStopping
from onelaunch.sklearn.lbfgs import LbfgsSettings
from onelaunch.sklearn.presets import check_preset, preset_of

MIN_ROWS_TO_STOP_EARLY = 10_000  # with early_stopping="auto"
LBFGS_ITERATIONS = 200  # with max_iter="auto"; scikit-learn's default
POWER_T, MAX_FUN = 0.5, 15_000  # scikit-learn's defaults


class MLPParameters(BaseEstimator):
    """The parameters of `MLPClassifier` and `MLPRegressor`; `MLPClassifier` says what they mean."""

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
        n_iter_no_change: float = 10,
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
        power_t: float = POWER_T,
        max_fun: int = MAX_FUN,
        scale: str | None = "robust",
        scale_target: bool = True,  # a classifier, which has no such parameter, does not use it
        n_estimators: int = 1,
        preset: str = "default",
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
        self.power_t = power_t
        self.max_fun = max_fun
        self.scale = scale
        self.scale_target = scale_target
        self.n_estimators = n_estimators
        self.preset = preset
        self.precision = precision
        self.engine = engine
        self.device = device

    def __setstate__(self, state: dict[str, Any]) -> None:
        """An estimator that was saved by an earlier version has not all parameters."""
        super().__setstate__({"power_t": POWER_T, "max_fun": MAX_FUN, "preset": "default", **state})

    def _options(self, rows: int, loss: str, epochs: int | None) -> dict[str, Any]:
        """The arguments of `ol.fit` for this many rows."""
        batch_size = defaults.table_batch_size(rows) if self.batch_size == "auto" else self.batch_size
        batch_size = min(require_integer("batch_size", batch_size, "'auto' or rows per step, 1 or more"), rows)
        if batch_size < 1:
            raise OnelaunchError(f"batch_size={batch_size} must be 1 or more, or 'auto'")
        check_preset(self, partial=epochs is not None)
        if epochs is not None and self.early_stopping != "auto" and self.early_stopping:
            raise OnelaunchError("partial_fit does not support early_stopping=True: pass False, or 'auto'")
        stops_early = epochs is None and self._stops_early(rows)
        trained = rows - held_out_count(rows, self.validation_fraction) if stops_early else rows
        wanted: Any = self.max_iter if epochs is None else epochs
        if wanted == "auto":
            preset = preset_of(self)
            wanted = defaults.table_epochs(rows, batch_size, preset.steps, preset.epochs)
        # BatchNorm1d takes no batch of one row. Networks that leave rows out have fewer than this.
        has_one_row_left = trained % batch_size == 1 or preset_of(self).leaves_out
        options: dict[str, Any] = {
            "epochs": require_integer("max_iter", wanted, "'auto' or a number of epochs, 1 or more"),
            "batch_size": batch_size, "lr": self.learning_rate_init, "weight_decay": self.alpha,
            "schedule": self._schedule(partial=epochs is not None), "loss": loss, "precision": self.precision,
            "engine": self.engine, **self._optimizer_options(),
            "drop_last": bool(self.batch_norm) and trained > batch_size and has_one_row_left,
        }  # fmt: skip
        if stops_early:
            options["validation"] = float(self.validation_fraction)
            waits = self.n_iter_no_change != math.inf and self._rate_rule() != "adaptive"
            patience: Any = self.n_iter_no_change if waits else options["epochs"]
            options["early_stopping"] = EarlyStopping(patience, min_delta=self.tol)
        return options

    def _schedule(self, *, partial: bool) -> str:
        """The schedule of `ol.fit`. "auto" is constant in `partial_fit`, which does not know how many calls follow."""
        given = "constant" if self.learning_rate else self.schedule
        return ("constant" if partial else defaults.SCHEDULE) if given == "auto" else given

    def _rate_rule(self) -> str:
        """scikit-learn's `learning_rate`, which only "sgd" follows."""
        return self.learning_rate if self.learning_rate and (self.solver or self.optimizer) == "sgd" else "constant"

    def _lbfgs_settings(self) -> LbfgsSettings:
        max_iter = LBFGS_ITERATIONS if self.max_iter == "auto" else int(self.max_iter)
        smoothing = float(getattr(self, "label_smoothing", 0.0))
        return LbfgsSettings(self.alpha, max_iter, self.max_fun, self.tol, smoothing, bool(self.verbose))

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
        if self.early_stopping != "auto":
            return bool(self.early_stopping)
        return rows > MIN_ROWS_TO_STOP_EARLY and not preset_of(self).leaves_out
