"""`onelaunch.sklearn.MLPClassifier`."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from scipy.special import expit, softmax
from sklearn.base import ClassifierMixin
from sklearn.utils import column_or_1d, compute_sample_weight
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets, type_of_target, unique_labels
from sklearn.utils.validation import _check_sample_weight

from onelaunch.errors import OnelaunchError, abbreviate, require_option
from onelaunch.run import table_defaults as defaults
from onelaunch.sklearn.estimator import BaseMLP, dense, has_partial_fit
from onelaunch.sklearn.parameters import MAX_FUN, POWER_T
from onelaunch.sklearn.presets import preset_of
from onelaunch.sklearn.rows import make_rows
from onelaunch.sklearn.training import Prepared
from onelaunch.sklearn.validation import validated

log = logging.getLogger("onelaunch")


class MLPClassifier(ClassifierMixin, BaseMLP):
    """A neural network for classification, trained by onelaunch's engines; scikit-learn's MLPClassifier with more options.

    It takes binary, multiclass and multilabel targets, dense or sparse rows, and labels of any type.

    Parameters of scikit-learn's class, with other defaults:
    hidden_layer_sizes: widths of the hidden layers.
    activation: one of `onelaunch.activations`, or "logistic" or "identity".
    alpha: weight decay, decoupled for optimizer="adamw" (the default), else an L2 penalty.
    batch_size: rows per step; "auto" chooses by the number of rows.
    learning_rate_init: the largest learning rate of the schedule.
    max_iter: the number of epochs; "auto" chooses by the number of rows.
    early_stopping: hold out `validation_fraction` of the rows, stop after `n_iter_no_change` epochs in which the validation
    loss has not improved by `tol`, and keep the best epoch's weights. "auto": with more than 10,000 rows.
    random_state, warm_start, verbose: as in scikit-learn. With an integer, each later call goes on with other random numbers.
    solver: "adam" or "sgd", instead of `optimizer`; momentum, nesterovs_momentum: of "sgd". With a number as `max_iter`,
    training also ends as in scikit-learn: once the loss has not improved by `tol` for `n_iter_no_change` epochs.
    Or "lbfgs", which trains on all rows at once, in float64 and without dropout; max_fun: the number of losses it may compute.
    beta_1, beta_2, epsilon: of "adam" and "adamw"; None for our own.
    learning_rate: "constant", "adaptive" or "invscaling" (the latter two of "sgd"), instead of `schedule`; power_t: of
    "invscaling". shuffle: False visits the rows in their order. It and those two rates train with PyTorch's operations.

    Further parameters:
    dropout, batch_norm, layer_norm: in each hidden layer.
    schedule: as in `ol.fit`, over the steps of one call; "auto" is "one_cycle" in `fit` and "constant" in `partial_fit`.
    optimizer, label_smoothing, precision, engine: as in `ol.fit`.
    class_weight: None, "balanced", or {label: weight} (a list of such dicts for multilabel targets).
    scale: "robust" scales features by their quartiles and clips them smoothly to (-3, 3); None takes them as they are.
    n_estimators: train this many networks from different seeds and average their probabilities.
    preset: "best" trains 8 networks for longer, with label_smoothing=0.1, each without an eighth of the rows. On these
    `temperature_` is found; a regressor keeps the best epoch of each network. It takes about ten times as long, and has better
    probabilities. Parameters that you set count.
    device: "auto" (a GPU if there is one), "cpu" or "cuda".

    Attributes: `classes_`, `models_`, `model_`, `history_`, and those of scikit-learn's class. `coefs_` apply to scaled rows.
    """

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
        class_weight: Any = None,
        label_smoothing: float = 0.0,
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
        n_estimators: int = 1,
        preset: str = "default",
        precision: str = "auto",
        engine: str = "auto",
        device: str = "auto",
    ) -> None:
        super().__init__(
            hidden_layer_sizes, activation, alpha=alpha, batch_size=batch_size, learning_rate_init=learning_rate_init,
            max_iter=max_iter, early_stopping=early_stopping, validation_fraction=validation_fraction,
            n_iter_no_change=n_iter_no_change, tol=tol, random_state=random_state, warm_start=warm_start,
            verbose=verbose, dropout=dropout, batch_norm=batch_norm, layer_norm=layer_norm, schedule=schedule,
            optimizer=optimizer, solver=solver, learning_rate=learning_rate, shuffle=shuffle, momentum=momentum,
            nesterovs_momentum=nesterovs_momentum, beta_1=beta_1, beta_2=beta_2, epsilon=epsilon, power_t=power_t,
            max_fun=max_fun, scale=scale, n_estimators=n_estimators, preset=preset, precision=precision, engine=engine,
            device=device,
        )  # fmt: skip
        self.class_weight = class_weight
        self.label_smoothing = label_smoothing

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> MLPClassifier:
        """Train on the rows of X [rows, features] with labels y [rows], or [rows, labels] of 0 and 1; returns self.

        sample_weight: one number per row, 0 or more; a row of weight 2 counts as two rows.
        """
        continues = bool(self.warm_start) and hasattr(self, "models_")
        return self._fit(X, y, sample_weight, continues=continues)

    @available_if(has_partial_fit)
    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> MLPClassifier:
        """Train one epoch on these rows; returns self. The first call fixes the scaling of the features.

        classes: all labels that later calls may have, in the first call. The optimizer starts afresh in each call, and the
        learning rate stays at `learning_rate_init` unless `schedule` is given.
        """
        if not hasattr(self, "models_"):
            if classes is None and type_of_target(y) != "multilabel-indicator":
                raise ValueError("classes must be passed on the first call to partial_fit")
            return self._fit(X, y, sample_weight, continues=False, classes=classes, epochs=1)
        if classes is not None and not np.array_equal(self.classes_, np.unique(classes)):
            raise ValueError(f"classes={classes!r} is not the same as on the last call to partial_fit: {self.classes_}")
        return self._fit(X, y, sample_weight, continues=True, epochs=1)

    def _fit(
        self, X: Any, y: Any, sample_weight: Any, *, continues: bool, classes: Any = None, epochs: int | None = None
    ) -> MLPClassifier:
        prepared = self._prepare(X, y, sample_weight, continues=continues, classes=classes, all_labels=epochs is None)
        self._fit_prepared(prepared, continues=continues, epochs=epochs)
        return self

    def _prepare(
        self, X: Any, y: Any, sample_weight: Any = None, *, continues: bool = False, classes: Any = None,
        all_labels: bool = True,
    ) -> Prepared:  # fmt: skip
        """The checked and scaled rows of a fit. Sets the attributes that follow from the data."""
        X, y = validated(self, X, y, multi_output=True, reset=not continues)
        if sample_weight is not None:
            sample_weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        check_classification_targets(y)
        multilabel = type_of_target(y, input_name="y") == "multilabel-indicator"
        if multilabel:
            y = dense(y)
            found = np.arange(y.shape[1])
        else:
            y = column_or_1d(y, warn=True)
            found = unique_labels(y)
        if continues:
            self._check_labels(found, multilabel, all_of_them=all_labels)
        else:
            self.classes_ = found if classes is None else unique_labels(classes)
            self._multilabel, self._dtype = multilabel, X.dtype
            self._check_labels(found, multilabel, all_of_them=False)
        if self.class_weight is not None:
            if isinstance(self.class_weight, str):
                require_option("class_weight", self.class_weight, ("balanced",), or_else="a dict {label: weight}")
            by_class = compute_sample_weight(self.class_weight, y)
            if not (np.isfinite(by_class).all() and (by_class >= 0).all()):
                given = abbreviate(self.class_weight)
                raise OnelaunchError(f"class_weight={given}: pass weights that are finite numbers, 0 or more")
            sample_weight = by_class if sample_weight is None else by_class * sample_weight
        targets = y.astype(np.float32) if multilabel else np.searchsorted(self.classes_, y)
        loss = "bce_with_logits" if multilabel else "cross_entropy"
        rows = make_rows(dense(X), targets, sample_weight, in_order=not self.shuffle)
        if not multilabel and len(self.classes_) < 2:
            only = self.classes_[:1].tolist()[0]  # a Python value: NumPy's would be shown with their type
            log.warning("y has 1 class, %r, which will be predicted for every row", only)
        self.out_activation_ = "logistic" if multilabel else "softmax"
        return Prepared(
            self._scaled(rows, continues=continues), rows.y, rows.weight, len(self.classes_), loss, rows.total_weight
        )

    def _check_labels(self, found: np.ndarray, multilabel: bool, *, all_of_them: bool) -> None:
        """Raise ValueError for labels of another kind, and for labels that are not in `classes_`."""
        unknown = np.setdiff1d(found, self.classes_)
        differ = len(found) != len(self.classes_) and (all_of_them or multilabel)
        if multilabel != self._multilabel or len(unknown) or differ:
            if all_of_them:
                raise ValueError(
                    "warm_start can only be used where `y` has the same classes as in the previous call to fit. "
                    f"Previously got {self.classes_}, `y` has {found}, which are not those of the fitted estimator"
                )
            raise ValueError(f"y has the classes {found}, which are not those of the fitted estimator: {self.classes_}")

    def _options(self, rows: int, loss: str, epochs: int | None) -> dict[str, Any]:
        options = super()._options(rows, loss, epochs)
        if loss == "cross_entropy":
            options["label_smoothing"] = preset_of(self).label_smoothing
        return options

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probability of each class, float64 [rows, classes]; of each label, for multilabel targets."""
        outputs = self._outputs(X)
        temperature = getattr(self, "temperature_", 1.0)
        of_one = expit if self._multilabel else lambda output: softmax(output / temperature, axis=1)
        return np.mean([of_one(output) for output in outputs], axis=0)

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """The logarithm of `predict_proba`."""
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))

    def predict(self, X: Any) -> np.ndarray:
        """The most probable label of each row; 0 or 1 for each label of multilabel targets."""
        probabilities = self.predict_proba(X)
        if self._multilabel:
            return (probabilities > 0.5).astype(np.int64)
        return self.classes_[probabilities.argmax(axis=1)]
