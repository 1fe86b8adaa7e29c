"""`onelaunch.sklearn.MLPRegressor`."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.utils import column_or_1d
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import _check_sample_weight

from onelaunch.data.scaling import TargetScaling
from onelaunch.sklearn.estimator import BaseMLP, dense, has_partial_fit
from onelaunch.sklearn.rows import fits_float32, make_rows, to_float32
from onelaunch.sklearn.training import Prepared
from onelaunch.sklearn.validation import validated


class MLPRegressor(RegressorMixin, BaseMLP):
    """A neural network for regression, trained by onelaunch's engines; scikit-learn's MLPRegressor with more options.

    It takes one or several targets and dense or sparse rows. The parameters are those of `MLPClassifier`, without
    class_weight and label_smoothing. Predictions are in the units of y.

    scale_target: True standardises the targets for training, whatever `scale` does to the features; False takes them as
    they are, which suits targets around 1.

    `validation_scores_` and `best_validation_score_` are minus the mean squared error of the targets as they are trained on,
    where scikit-learn has R².
    """

    def __setstate__(self, state: dict[str, Any]) -> None:
        """An estimator that was saved without `scale_target` standardised its targets if it scaled its features."""
        super().__setstate__({"scale_target": state.get("scale") is not None, **state})

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> MLPRegressor:
        """Train on the rows of X [rows, features] with targets y [rows] or [rows, targets]; returns self.

        sample_weight: one number per row, 0 or more; a row of weight 2 counts as two rows.
        """
        return self._fit(X, y, sample_weight, continues=bool(self.warm_start) and hasattr(self, "models_"))

    @available_if(has_partial_fit)
    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> MLPRegressor:
        """Train one epoch on these rows; returns self. The first call fixes the scaling of features and targets.

        The optimizer starts afresh in each call, and the learning rate stays at `learning_rate_init` unless `schedule` is
        given.
        """
        return self._fit(X, y, sample_weight, continues=hasattr(self, "models_"), epochs=1)

    def _fit(self, X: Any, y: Any, sample_weight: Any, *, continues: bool, epochs: int | None = None) -> MLPRegressor:
        self._fit_prepared(self._prepare(X, y, sample_weight, continues=continues), continues=continues, epochs=epochs)
        return self

    def _prepare(self, X: Any, y: Any, sample_weight: Any = None, *, continues: bool = False) -> Prepared:
        """The checked and scaled rows of a fit. Sets the attributes that follow from the data."""
        X, y = validated(self, X, y, multi_output=True, y_numeric=True, reset=not continues)
        if sample_weight is not None:
            sample_weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        if y.ndim == 2 and y.shape[1] == 1:
            y = column_or_1d(y, warn=True)
        flat = y.ndim == 1
        targets = np.asarray(y, np.float64).reshape(len(y), -1)
        if continues and targets.shape[1] != self.n_outputs_:
            raise ValueError(f"y has {targets.shape[1]} targets, the fitted estimator {self.n_outputs_}: pass as many")
        rows = make_rows(dense(X), targets, sample_weight, in_order=not self.shuffle)
        if not continues:
            self._target_scaling = TargetScaling.fit(rows.y, rows.weight) if self.scale_target else None
            self._flat = flat
            self._dtype = X.dtype if fits_float32(targets) else np.dtype(np.float64)
        if self._target_scaling is None:
            scaled = to_float32("y", rows.y, "scale_target=True")
        else:
            scaled = self._target_scaling.transform(rows.y)
        self.out_activation_ = "identity"
        return Prepared(
            self._scaled(rows, continues=continues), scaled, rows.weight, targets.shape[1], "mse", rows.total_weight
        )

    def predict(self, X: Any) -> np.ndarray:
        """The predicted targets, [rows], or [rows, targets] if y had two dimensions; the mean of the networks'.

        They are float64, or float32 if the rows of `fit` were float32 and the targets are of a size that it can hold.
        """
        outputs = np.mean(self._outputs(X), axis=0)
        if self._target_scaling is not None:
            outputs = self._target_scaling.inverse(outputs)
        outputs = outputs.astype(getattr(self, "_dtype", np.float64), copy=False)
        return outputs[:, 0] if self._flat else outputs
